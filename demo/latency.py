"""Percentiles, and inter-token gaps split by what was going on while they lasted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from demo.evidence import Answer


@dataclass(frozen=True, slots=True)
class Summary:
    """Nearest-rank percentiles of some samples, in the samples' unit."""

    count: int
    p50: float
    p99: float
    max: float


def summarize(samples: Iterable[float]) -> Summary | None:
    """The summary of `samples`, or None if there are none: no traffic is not zero latency."""
    ordered = sorted(samples)
    if not ordered:
        return None
    return Summary(len(ordered), _rank(ordered, 50), _rank(ordered, 99), ordered[-1])


def _rank(ordered: Sequence[float], percent: int) -> float:
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]


@dataclass(frozen=True, slots=True)
class Window:
    """A stretch of time in which the operator did something; CLOCK_MONOTONIC nanoseconds."""

    started_ns: int
    ended_ns: int

    def overlaps(self, started_ns: int, ended_ns: int) -> bool:
        """Whether any instant between the two lies in the window."""
        return started_ns <= self.ended_ns and self.started_ns <= ended_ns


@dataclass(frozen=True, slots=True)
class Gaps:
    """Inter-token gaps in milliseconds: touched by a window, and all others."""

    quiet_ms: tuple[float, ...]
    busy_ms: tuple[float, ...]


def split_gaps(answers: Iterable[Answer], busy: Sequence[Window]) -> Gaps:
    """Every gap between two chunks of one answer; one that touches a busy window is not quiet."""
    quiet: list[float] = []
    during: list[float] = []
    for answer in answers:
        for before, after in zip(answer.chunk_ns, answer.chunk_ns[1:], strict=False):
            gap_ms = (after - before) / 1e6
            is_busy = any(window.overlaps(before, after) for window in busy)
            (during if is_busy else quiet).append(gap_ms)
    return Gaps(tuple(quiet), tuple(during))


def in_flight_during(answers: Iterable[Answer], window: Window) -> int:
    """How many answers were under way at some instant of the window."""
    return sum(window.overlaps(answer.started_ns, answer.ended_ns) for answer in answers)
