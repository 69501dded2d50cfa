"""What a run measures, the most important first: it may run out of time."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from tests.bench.load_report import CACHED, COLD, OURS, TMPFS

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
    """All of tmpfs, then the limits and ours everywhere, then the others.

    The disk's rate drifts: its limit is measured again after ours.
    """
    others = [peer for peer in peers if peer not in skipped]
    ours = [] if OURS in skipped else [OURS]
    order = [
        (TMPFS, [LIMITS, *ours, *others]),
        (CACHED, [LIMITS, *ours]),
        (COLD, [LIMITS, *ours, LIMITS]),
        (CACHED, others),
        (COLD, others),
    ]
    for place, steps in order:
        if place in places:
            yield from (Step(place, what) for what in steps)
