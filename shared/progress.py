"""Whether something that has work makes progress: hung is not healthy, idle is not hung."""

from __future__ import annotations

from dataclasses import dataclass

NS_PER_S = 1_000_000_000


def is_stuck(has_work: bool, last_step_ns: int, now_ns: int, limit_s: float) -> bool:
    """Work is pending and `limit_s` have passed since the last step; clocks are monotonic.

    After an idle time `last_step_ns` must be the moment the work arrived: see Progress.
    """
    return has_work and now_ns - last_step_ns > limit_s * NS_PER_S


@dataclass(frozen=True, slots=True)
class Progress:
    """The last observation and since when nothing has moved: the input of `is_stuck`.

    The time of the engine's last step alone would call an engine stuck whose first request after
    an idle hour has just arrived.
    """

    has_work: bool
    steps: int
    since_ns: int  # the last step seen, or the arrival of the work, or the start of idleness

    def observe(self, has_work: bool, steps: int, now_ns: int) -> Progress:
        """The state after an observation of pending work and of a count of steps that only grows."""
        has_moved = steps != self.steps
        has_arrived = has_work and not self.has_work
        since_ns = now_ns if has_moved or has_arrived or not has_work else self.since_ns
        return Progress(has_work, steps, since_ns)

    def is_stuck(self, now_ns: int, limit_s: float) -> bool:
        """Work has been pending for longer than `limit_s` without a step."""
        return is_stuck(self.has_work, self.since_ns, now_ns, limit_s)
