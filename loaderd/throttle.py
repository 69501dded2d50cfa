"""`Throttle`: how fast copies and digests may go beside serving.  A pure state machine.

What it goes by is the time between two tokens, as the inferds report it.  That time also grows with the
clients' own load, so a baseline from earlier proves nothing: at times the throttle *looks*, which is to
let nothing through until the inferds have reported what decoding takes without it.  What stays slow
during a look is not slow because of copies.

While nobody decodes, the rate is unlimited.  When decoding begins it starts low and doubles until latency
rises or more is allowed than is used; from then on it is halved when latency rises and goes up in small
steps else, but never below a floor, so that every push comes to its end.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType

from shared.ids import LeaseId

ENOUGH_STEPS = 8
"""Steps whose mean is worth comparing."""

LOOK_AT_MOST_S = 1.2
"""Longest look; where steps are slower than ENOUGH_STEPS in it, fewer have to do."""

JUDGE_WITHIN_S = 1.0
"""Longest time at one rate before it is judged by what there is."""

SETTLE_S = 0.25
"""What was let through before a look may be at work for this long; windows from then on show what decoding
takes alone."""

STALE_S = 4.0
"""Age from which a baseline is looked for again before anything is concluded from it."""

LINGER_S = 2.0
"""An inferd counts as serving for this long after it was last seen to: longer than the gaps between the
requests of one client, and than the time between two reports."""

QUIET_WINDOWS = 5
"""Newest windows without any work whose median is the baseline when work begins."""

STEPS_UP = 4
"""Steps in which the rate climbs back to where latency rose last."""


class Phase(StrEnum):
    """What the throttle does."""

    IDLE = "idle"  # no work: every window is quiet
    LOOKING = "looking"  # nothing goes through
    WORKING = "working"


@dataclass(frozen=True, slots=True)
class Limits:
    """What the throttle keeps to."""

    above_share: float = 0.15  # of the quiet inter-token latency: what may be added to it
    floor_bytes_per_s: float = float(64 << 20)
    start_bytes_per_s: float = float(256 << 20)


@dataclass(frozen=True, slots=True)
class Window:
    """What an inferd did between two reports."""

    began_s: float
    ended_s: float
    steps: int  # that only decoded, right after another step
    decode_s: float  # that these steps took, together
    is_serving: bool  # tokens came, or sequences were running at its end


@dataclass(frozen=True, slots=True)
class Served:
    """An inferd as far as the throttle knows it."""

    is_serving: bool = False  # in its newest window
    serving_s: float = -math.inf  # when it was last seen to serve
    baseline_s: float | None = None  # time between tokens without work; None: nothing was decoded then
    looked_s: float = -math.inf  # when the baseline was taken
    quiet: tuple[float, ...] = ()  # newest quiet windows
    steps: int = 0  # gathered since the phase or the rate began
    decode_s: float = 0.0

    def latency_s(self, waited_s: float = 0.0) -> float | None:
        """Mean time between tokens of what was gathered in `waited_s`; where sequences ran and not one got
        its token, it is at least that."""
        if self.steps:
            return self.decode_s / self.steps
        return waited_s if self.is_serving and waited_s else None


@dataclass(frozen=True, slots=True)
class Excess:
    """The latency that made the throttle back off."""

    lease: LeaseId
    latency_s: float
    baseline_s: float


@dataclass(frozen=True, slots=True)
class Throttle:
    """One moment of it; each method returns the next.  Times are of one monotonic clock."""

    limits: Limits = field(default_factory=Limits)
    phase: Phase = Phase.IDLE
    since_s: float = -math.inf  # of the phase, and of the rate
    rate: float = math.inf  # bytes per s
    knee: float | None = None  # the rate at which latency rose last
    excess: Excess | None = None  # since the throttle backs off; None: it does not
    served: Mapping[LeaseId, Served] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def allowed(self) -> float:
        """Bytes per second that may go through now."""
        return 0.0 if self.phase is Phase.LOOKING else self.rate

    # --- what happens ----------------------------------------------------------------------------

    def begin(self, now_s: float) -> Throttle:
        """Work begins."""
        return self._enter(Phase.WORKING, now_s, rate=math.inf).tick(now_s, 0)

    def end(self, now_s: float) -> Throttle:
        """No work is left."""
        return replace(self._enter(Phase.IDLE, now_s, rate=math.inf), knee=None, excess=None)

    def observe(self, lease: LeaseId, window: Window) -> Throttle:
        """An inferd reported; windows that began before the phase did mix two things and count for none."""
        before = self.served.get(lease, Served())
        after = replace(before, is_serving=window.is_serving)
        if window.is_serving:
            after = replace(after, serving_s=window.ended_s)
        settle_s = SETTLE_S if self.phase is Phase.LOOKING else 0.0
        if window.began_s >= self.since_s + settle_s:
            if self.phase is not Phase.IDLE:
                after = replace(
                    after, steps=before.steps + window.steps, decode_s=before.decode_s + window.decode_s
                )
            elif window.steps >= ENOUGH_STEPS:
                quiet = (*before.quiet, window.decode_s / window.steps)[-QUIET_WINDOWS:]
                after = replace(
                    after, quiet=quiet, baseline_s=statistics.median(quiet), looked_s=window.ended_s
                )
        return replace(self, served=MappingProxyType({**self.served, lease: after}))

    def forget(self, lease: LeaseId) -> Throttle:
        """An inferd is gone."""
        rest = {key: served for key, served in self.served.items() if key != lease}
        return replace(self, served=MappingProxyType(rest))

    def tick(self, now_s: float, moved_bytes: int) -> Throttle:
        """Decide; `moved_bytes` went through since `since_s`.  Nothing else changes phase or rate while
        there is work."""
        serving = {key: served for key, served in self.served.items() if now_s - served.serving_s < LINGER_S}
        match self.phase:
            case Phase.IDLE:
                return self
            case _ if not serving:
                if self.phase is Phase.WORKING and math.isinf(self.rate):
                    return self
                return replace(self._enter(Phase.WORKING, now_s, rate=math.inf), knee=None, excess=None)
            case Phase.LOOKING:
                return self._look(serving, now_s)
            case Phase.WORKING if math.isinf(self.rate):
                start = max(self.limits.start_bytes_per_s, self.limits.floor_bytes_per_s)
                is_known = all(now_s - served.looked_s < STALE_S for served in serving.values())
                return self._enter(Phase.WORKING if is_known else Phase.LOOKING, now_s, rate=start)
            case Phase.WORKING:
                return self._judge(serving, now_s, moved_bytes)

    # --- decisions -------------------------------------------------------------------------------

    def _look(self, serving: Mapping[LeaseId, Served], now_s: float) -> Throttle:
        """Go on once every inferd that serves has shown what it takes without work."""
        is_enough = all(served.steps >= ENOUGH_STEPS for served in serving.values())
        if not is_enough and now_s - self.since_s < LOOK_AT_MOST_S:
            return self
        looked = {
            key: replace(served, baseline_s=served.latency_s(), looked_s=now_s, quiet=())
            for key, served in serving.items()
        }
        known = replace(self, served=MappingProxyType({**self.served, **looked}))
        return known._enter(Phase.WORKING, now_s, rate=self.rate)

    def _judge(self, serving: Mapping[LeaseId, Served], now_s: float, moved_bytes: int) -> Throttle:
        """Back off, go faster, or look first where what there is to compare with is old."""
        if moved_bytes == 0 and all(s.steps >= ENOUGH_STEPS for s in serving.values()):
            # Whatever made it slow, nothing was copied.
            return self._enter(Phase.WORKING, now_s, rate=self.rate)
        is_late = now_s - self.since_s >= JUDGE_WITHIN_S
        judged = {key: s for key, s in serving.items() if s.steps >= ENOUGH_STEPS or is_late}
        excesses = [
            Excess(key, latency, served.baseline_s)
            for key, served in judged.items()
            if (latency := served.latency_s(now_s - self.since_s)) is not None
            and served.baseline_s is not None
            and latency > served.baseline_s * (1 + self.limits.above_share)
        ]
        if not excesses and len(judged) < len(serving):
            return self
        if any(now_s - serving[key].looked_s >= STALE_S for key in judged):
            return self._enter(Phase.LOOKING, now_s, rate=self.rate)
        used = moved_bytes / max(now_s - self.since_s, 1e-3)
        if excesses:
            worst = max(excesses, key=lambda excess: excess.latency_s / excess.baseline_s)
            knee = max(min(self.rate, used), self.limits.floor_bytes_per_s)
            slower = max(knee / 2, self.limits.floor_bytes_per_s)
            return replace(self._enter(Phase.WORKING, now_s, rate=slower), knee=knee, excess=worst)
        return self._speed_up(now_s, used)

    def _speed_up(self, now_s: float, used: float) -> Throttle:
        if used < self.rate / 2:
            # Something else is the limit; a rate that nobody used has not been tried.
            return self._enter(Phase.WORKING, now_s, rate=self.rate)
        if self.knee is None:
            return self._enter(Phase.WORKING, now_s, rate=self.rate * 2)
        faster = self.rate + self.knee / STEPS_UP
        has_passed = faster >= 2 * self.knee
        return replace(
            self._enter(Phase.WORKING, now_s, rate=faster),
            knee=None if has_passed else self.knee,
            excess=None if has_passed else self.excess,
        )

    def _enter(self, phase: Phase, now_s: float, *, rate: float) -> Throttle:
        """Begin to gather anew."""
        served = {key: replace(each, steps=0, decode_s=0.0) for key, each in self.served.items()}
        return replace(self, phase=phase, since_s=now_s, rate=rate, served=MappingProxyType(served))
