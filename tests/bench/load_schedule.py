"""What a run measures, the most important first: it may run out of time."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from tests.bench.load_report import COLD, OURS, PLACES

LIMITS = "limits"
"""Stands where a loader's name would."""


@dataclass(frozen=True, slots=True)
class Step:
    """One process's work: the limits of a place, or one loader at it."""

    place: str
    what: str

    @property
    def is_limits(self) -> bool:
        """Whether it measures the machine."""
        return self.what == LIMITS


def schedule(places: Collection[str], peers: Sequence[str], skipped: Collection[str]) -> Iterator[Step]:
    """At each place the limits, ours, then the others; at the disk, whose rate drifts, the limit is measured
    again after ours."""
    for place in PLACES:
        if place not in places:
            continue
        yield Step(place, LIMITS)
        if OURS not in skipped:
            yield Step(place, OURS)
            if place == COLD:
                yield Step(place, LIMITS)
        for peer in peers:
            if peer not in skipped:
                yield Step(place, peer)
