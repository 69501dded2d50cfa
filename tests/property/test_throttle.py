"""The throttle against a made-up host: inferds whose steps slow down with what is copied beside them."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loaderd import throttle as throttle_module
from loaderd.throttle import Limits, Phase, Served, Throttle, Window
from shared.ids import LeaseId

REPORT_S = 0.1
MB = 1e6
LIMITS = Limits()


@dataclass
class Inferd:
    """Decodes in `step_s` when left alone; copies at `hurt_bytes_per_s` double that."""

    step_s: float
    hurt_bytes_per_s: float = math.inf
    noise: float = 0.02
    is_serving: bool = True

    def latency_s(self, bytes_per_s: float) -> float:
        return self.step_s * (1 + bytes_per_s / self.hurt_bytes_per_s)


@dataclass
class Host:
    """Steps time by a report at a time, and checks at every moment what must always hold."""

    inferds: list[Inferd]
    capacity_bytes_per_s: float  # what the machine could copy
    throttle: Throttle = field(default_factory=lambda: Throttle(LIMITS))
    now_s: float = 1000.0
    moved: float = 0.0
    marked: tuple[float, float] = (0.0, 0.0)  # of the throttle's last since_s, and what had moved then
    random: random.Random = field(default_factory=lambda: random.Random(1))
    owed: dict[int, float] = field(default_factory=dict)  # parts of steps

    def idle(self, seconds: float) -> None:
        """Nothing is copied; reports come each second."""
        assert self.throttle.phase is Phase.IDLE
        for _ in range(round(seconds)):
            self._advance(1.0, 0.0)

    def work(self, seconds: float) -> list[float]:
        """Copy; returns the bytes per second that went through in each report's time."""
        speeds = []
        for _ in range(round(seconds / REPORT_S)):
            speed = min(self.throttle.allowed, self.capacity_bytes_per_s)
            speeds.append(speed)
            self._advance(REPORT_S, speed)
        return speeds

    def begin(self) -> None:
        self.throttle = self.throttle.begin(self.now_s)

    def _advance(self, seconds: float, speed: float) -> None:
        began, self.now_s = self.now_s, self.now_s + seconds
        self.moved += speed * seconds
        for number, inferd in enumerate(self.inferds):
            steps, took = 0, 0.0
            if inferd.is_serving:
                step_s = inferd.latency_s(speed) * self.random.uniform(1 - inferd.noise, 1 + inferd.noise)
                exact = self.owed.get(number, 0.0) + seconds / step_s
                steps = math.floor(exact)
                self.owed[number] = exact - steps
                took = steps * step_s
            window = Window(began, self.now_s, steps, took, inferd.is_serving)
            self.throttle = self.throttle.observe(LeaseId(number), window)
            self._tick()

    def _tick(self) -> None:
        since, before = self.marked
        moved = self.moved - before if since == self.throttle.since_s else 0.0
        self.throttle = self.throttle.tick(self.now_s, round(moved))
        if self.throttle.since_s != since:
            self.marked = (self.throttle.since_s, self.moved)
        allowed = self.throttle.allowed
        assert allowed == 0.0 or allowed >= LIMITS.floor_bytes_per_s
        assert self.throttle.phase is not Phase.LOOKING or self.now_s - self.throttle.since_s < 2.0, (
            "no look is for ever"
        )


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


steps_s = st.floats(0.002, 0.15)


def check_that_it_settles(step_s: float, capacity: float, relative: float, seed: int) -> None:
    """Copies end up near the rate that adds what may be added, or at the floor."""
    hurt = capacity * relative  # a full copy at least triples the latency
    host = Host([Inferd(step_s, hurt)], capacity, random=random.Random(seed))
    host.idle(5)
    host.begin()
    host.work(40)
    settled = [speed for speed in host.work(60) if speed > 0]
    ideal = min(capacity, max(LIMITS.above_share * hurt, LIMITS.floor_bytes_per_s))
    assert mean(settled) <= max(1.5 * ideal, LIMITS.floor_bytes_per_s)
    assert mean(settled) >= 0.4 * ideal


@settings(max_examples=60, deadline=None)
@given(steps_s, st.floats(1e9, 1e11), st.floats(0.005, 0.5), st.integers(0, 1000))
def test_it_settles_where_latency_is_allowed_to_be(
    step_s: float, capacity: float, relative: float, seed: int
) -> None:
    check_that_it_settles(step_s, capacity, relative, seed)


def test_one_that_takes_a_standstill_for_peace_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where copies are so heavy that no token comes at all, there is no latency to be seen."""

    def seen(served: Served, waited_s: float = 0.0) -> float | None:
        return served.decode_s / served.steps if served.steps else None

    monkeypatch.setattr(Served, "latency_s", seen)
    with pytest.raises(AssertionError):
        check_that_it_settles(0.09375, 1e9, 0.0078, 0)


def check_that_clients_own_load_is_not_held_against_copies(rise: float, step_s: float) -> None:
    """Copies that harm nobody go on at full speed, though latency has risen with the clients' load."""
    inferd = Inferd(step_s)
    host = Host([inferd], 8e9)
    host.idle(5)
    host.begin()
    host.work(2)
    inferd.step_s *= rise
    host.work(30)
    speeds = host.work(20)
    assert mean(speeds) >= 0.4 * host.capacity_bytes_per_s


@settings(max_examples=40, deadline=None)
@given(st.floats(0.2, 6), steps_s)
def test_clients_own_load_is_not_held_against_copies(rise: float, step_s: float) -> None:
    check_that_clients_own_load_is_not_held_against_copies(rise, step_s)


def test_a_throttle_that_never_looks_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throttle_module, "STALE_S", math.inf)
    with pytest.raises(AssertionError):
        check_that_clients_own_load_is_not_held_against_copies(3.0, 0.02)


@settings(max_examples=40, deadline=None)
@given(st.lists(steps_s, min_size=1, max_size=4), st.integers(0, 3))
def test_the_worst_off_decides(base: list[float], which: int) -> None:
    inferds = [Inferd(step_s, 1e12) for step_s in base]
    inferds[which % len(inferds)].hurt_bytes_per_s = 4e9
    host = Host(inferds, 40e9)
    host.idle(5)
    host.begin()
    host.work(40)
    settled = [speed for speed in host.work(60) if speed > 0]
    assert 0.3 * 0.6e9 <= mean(settled) <= 1.5 * 0.6e9


@settings(max_examples=40, deadline=None)
@given(steps_s, st.floats(1e8, 1e10))
def test_a_copy_that_hurts_at_any_rate_still_ends(step_s: float, nbytes: float) -> None:
    host = Host([Inferd(step_s, 1e6)], 50e9)
    host.idle(5)
    host.begin()
    host.work(20)
    before = host.moved
    seconds = 3 * nbytes / LIMITS.floor_bytes_per_s + 5
    host.work(seconds)
    assert host.moved - before >= nbytes, "looks take less than two thirds of the time"


@settings(max_examples=40, deadline=None)
@given(steps_s, st.floats(1e6, 1e11), st.floats(0, 30))
def test_without_traffic_nothing_is_held_back(step_s: float, hurt: float, worked: float) -> None:
    inferd = Inferd(step_s, hurt, is_serving=False)
    host = Host([inferd], 50e9)
    host.idle(5)
    host.begin()
    assert set(host.work(3)) == {host.capacity_bytes_per_s}, "nobody has asked for anything"
    inferd.is_serving = True
    host.work(worked + 1)
    assert math.isfinite(host.throttle.rate)
    inferd.is_serving = False
    host.work(throttle_module.LINGER_S + REPORT_S)
    assert set(host.work(3)) == {host.capacity_bytes_per_s}, "the last client has gone"
    assert host.throttle.excess is None


def check_that_it_resumes(step_s: float) -> None:
    """A disturbance that goes away leaves nothing behind."""
    inferd = Inferd(step_s, 1e9)
    host = Host([inferd], 10e9)
    host.idle(5)
    host.begin()
    host.work(20)
    assert host.throttle.excess is not None
    inferd.hurt_bytes_per_s = math.inf
    host.work(60)
    assert host.throttle.excess is None
    assert mean(host.work(20)) >= 0.4 * host.capacity_bytes_per_s


@settings(max_examples=30, deadline=None)
@given(steps_s)
def test_it_resumes(step_s: float) -> None:
    check_that_it_resumes(step_s)


def test_one_that_never_speeds_up_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(throttle: Throttle, now_s: float, used: float) -> Throttle:
        return throttle._enter(Phase.WORKING, now_s, rate=throttle.rate)

    monkeypatch.setattr(Throttle, "_speed_up", never)
    with pytest.raises(AssertionError):
        check_that_it_resumes(0.01)


def test_after_the_work_windows_are_quiet_again() -> None:
    host = Host([Inferd(0.01, 1e9)], 10e9)
    host.idle(5)
    quiet = host.throttle.served[LeaseId(0)].baseline_s
    assert quiet == pytest.approx(0.01, rel=0.02)
    host.begin()
    host.work(5)
    host.throttle = host.throttle.end(host.now_s)
    assert host.throttle.allowed == math.inf
    host.idle(3)
    assert host.throttle.served[LeaseId(0)].baseline_s == pytest.approx(0.01, rel=0.02)


def test_a_window_that_was_partly_work_counts_for_nothing() -> None:
    throttle = Throttle(LIMITS).observe(LeaseId(0), Window(0, 1, 100, 1.0, is_serving=True)).begin(1.5)
    assert throttle.phase is Phase.WORKING
    mixed = throttle.observe(LeaseId(0), Window(1, 2, 10, 10.0, is_serving=True))
    assert mixed.served[LeaseId(0)].steps == 0
    clean = throttle.observe(LeaseId(0), Window(1.5, 2, 10, 10.0, is_serving=True))
    assert clean.served[LeaseId(0)].steps == 10
