"""The gate: bytes per second by a clock that the test moves, and threads that wait at it."""

from __future__ import annotations

import math
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from shared.errors import Superseded
from shared.gate import GRAIN_S, PIECE_BYTES, Gate

MB = 1_000_000


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def is_open(gate: Gate) -> bool:
    """Whether something would get through now."""
    with ThreadPoolExecutor(1) as thread:
        late = threading.Event()
        passing = thread.submit(gate.admit, 0, late)
        try:
            passing.result(0.02)
        except TimeoutError:
            late.set()
            with pytest.raises(Superseded):
                passing.result(5)
            return False
    return True


def test_without_a_limit_nothing_waits() -> None:
    gate = Gate(clock=Clock())
    for _ in range(1000):
        gate.admit(1 << 40)
    assert gate.admitted_bytes == 1000 << 40
    assert gate.grain_bytes(4 << 30) == 4 << 30


def test_the_next_bytes_wait_for_those_before() -> None:
    clock = Clock()
    gate = Gate(10 * MB, clock=clock)
    gate.admit(5 * MB)
    assert not is_open(gate)
    clock.now_s += 0.49
    assert not is_open(gate)
    clock.now_s += 0.02
    assert is_open(gate)


def test_a_pause_saves_nothing_up() -> None:
    clock = Clock()
    gate = Gate(10 * MB, clock=clock)
    clock.now_s += 3600
    gate.admit(10 * MB)
    assert not is_open(gate), "an idle hour must not end in a burst"


def test_a_new_rate_counts_for_what_is_owed() -> None:
    clock = Clock()
    gate = Gate(10 * MB, clock=clock)
    gate.admit(10 * MB)
    gate.set_rate(100 * MB)
    clock.now_s += 0.11
    assert is_open(gate), "one second at the old rate is a tenth at the new"
    gate.admit(100 * MB)
    gate.set_rate(10 * MB)
    clock.now_s += 1.5
    assert not is_open(gate)
    gate.set_rate(math.inf)
    assert is_open(gate)


def test_who_waits_at_a_closed_gate_goes_on_when_it_opens() -> None:
    gate = Gate(0.0)
    with ThreadPoolExecutor(2) as threads:
        waiting = [threads.submit(gate.admit, 1) for _ in range(2)]
        assert not any(each.done() for each in waiting)
        gate.set_rate(math.inf)
        for each in waiting:
            each.result(5)
    assert gate.admitted_bytes == 2


def test_who_waits_leaves_when_the_work_has_ended() -> None:
    gate = Gate(0.0)
    ended = threading.Event()
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(gate.admit, 1, ended)
        ended.set()
        with pytest.raises(Superseded):
            waiting.result(5)
    assert gate.admitted_bytes == 0


@pytest.mark.parametrize(
    ("bytes_per_s", "most", "grain"),
    [
        (math.inf, 4 << 30, 4 << 30),
        (4 << 20, 4 << 30, PIECE_BYTES),
        (10 << 30, 64 << 30, round((10 << 30) * GRAIN_S)),
        (1 << 60, 4 << 30, 4 << 30),
        (64 << 20, 1 << 20, 1 << 20),
    ],
)
def test_pieces_are_small_while_the_rate_is(bytes_per_s: float, most: int, grain: int) -> None:
    assert Gate(bytes_per_s).grain_bytes(most) == grain


@pytest.mark.parametrize(
    ("bytes_per_s", "nbytes", "spread_s"),
    [(math.inf, 1 << 30, 0.0), (0.0, 1 << 30, 0.0), (100 * MB, 10 * MB, 0.1), (100 * MB, 1 << 30, GRAIN_S)],
)
def test_pieces_are_spread_over_the_time_they_are_due(
    bytes_per_s: float, nbytes: int, spread_s: float
) -> None:
    assert Gate(bytes_per_s).spread_s(nbytes) == spread_s
