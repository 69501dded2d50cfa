"""In which order a load reads, and when a slab is complete."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from loaderd.placement import Placement, ReadExtent
from shared.errors import InvariantError

CombineCrc = Callable[[int, int, int], int]
"""CRC32 of two pieces put together, from their CRC32s and the bytes of the second."""


@dataclass(frozen=True, slots=True)
class FilledSlab:
    """A new slab whose last extent has been read."""

    index: int  # into placement.slabs
    crcs: Mapping[str, int]  # CRC32 of each of its tensors, as it was read


class ReadSchedule:
    """Hands out every extent of a placement once, slab by slab, so that the first slabs are complete while
    the last are still read.  Not thread-safe: its owner lets in one caller at a time."""

    def __init__(self, placement: Placement, combine: CombineCrc) -> None:
        """Raises InvariantError where nothing is read into one of the slabs."""
        self._extents: list[list[ReadExtent]] = [[] for _ in placement.slabs]
        for extent in placement.reads:
            self._extents[extent.slab].append(extent)
        empty = [index for index, extents in enumerate(self._extents) if not extents]
        if empty:
            raise InvariantError(f"nothing is read into slab {empty[0]}")
        self._combine = combine
        self._crcs: list[dict[ReadExtent, int]] = [{} for _ in placement.slabs]
        self._next = (extent for extents in self._extents for extent in extents)

    def take(self) -> ReadExtent | None:
        """The extent to read next; None when all were handed out."""
        return next(self._next, None)

    def finish(self, extent: ReadExtent, crc: int) -> FilledSlab | None:
        """Note that `extent` was read, with this CRC32; its slab if that was the last of it."""
        crcs, extents = self._crcs[extent.slab], self._extents[extent.slab]
        if extent in crcs:
            raise InvariantError(f"{extent} was read twice")
        crcs[extent] = crc
        if len(crcs) < len(extents):
            return None
        # Whatever the order in which they were read, those of one tensor are listed in file order.
        combined: dict[str, int] = {}
        for each in extents:
            before = combined.get(each.tensor)
            now = crcs[each]
            combined[each.tensor] = now if before is None else self._combine(before, now, each.nbytes)
        crcs.clear()
        extents.clear()
        return FilledSlab(extent.slab, combined)
