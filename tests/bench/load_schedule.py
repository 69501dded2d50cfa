"""What a run measures and in which order, the most important first: it may run out of time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

from tests.bench.load_report import OURS, PLACES

LIMITS = "limits"
"""Stands where a loader's name would."""

COLD_SETS = 3
"""Of files on the cold disk, read in rotation; odd, so that each is read directly and loaded in turn."""

_SETTING_S = 10
"""About what the loads of one setting that count may take together."""


@dataclass(frozen=True, slots=True)
class Step:
    """One process's work: one loader, or the limits, at some places one after the other.

    To import torch and make a GPU's context takes longer than most loads: once for all places."""

    what: str
    places: tuple[str, ...]

    @property
    def is_limits(self) -> bool:
        """Whether it measures the machine."""
        return self.what == LIMITS


def schedule(
    places: Collection[str],
    peers: Mapping[str, Callable[[str], Mapping[str, str]]],
    skipped: Collection[str],
) -> Iterator[Step]:
    """The limits, ours, then the others, for which `peers` has the environment they need at a place.

    A loader may look at its environment once only: places with different ones are different steps."""
    everywhere = tuple(place for place in PLACES if place in places)
    yield Step(LIMITS, everywhere)
    if OURS not in skipped:
        yield Step(OURS, everywhere)
    for peer, environment in peers.items():
        if peer in skipped:
            continue
        left = everywhere
        while left:
            alike = tuple(place for place in left if environment(place) == environment(left[0]))
            yield Step(peer, alike)
            left = tuple(place for place in left if place not in alike)


def samples(wanted: int, first_s: float) -> int:
    """How many loads count, where the first took so long: slow ones vary less than they cost."""
    return max(1, min(wanted, int(_SETTING_S / first_s) if first_s > 0 else wanted))


@dataclass(frozen=True, slots=True)
class ColdLoad:
    """A load from the cold disk and the direct read that follows it: of which setting and sets of files."""

    setting: int
    files: int
    direct_files: int
    is_last: bool  # of its setting


def cold_loads(settings: int, rounds: int, first: int) -> list[ColdLoad]:
    """Loads and direct reads in turn, after a direct read of the set `first`: each load is between two.

    The sets rotate.  What has cached a set below this machine (a virtual disk's host) had the same chance to
    for every read: as many bytes were read since the last time."""
    return [
        ColdLoad(
            setting,
            (first + 2 * number + 1) % COLD_SETS,
            (first + 2 * number + 2) % COLD_SETS,
            is_last=number >= settings * (rounds - 1),
        )
        for number, setting in enumerate(list(range(settings)) * rounds)
    ]
