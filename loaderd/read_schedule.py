"""In which order a load reads, and when a slab is complete."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from loaderd.placement import Placement, ReadExtent
from shared.errors import InvariantError

RUN_BYTES = 16 << 20
"""Most bytes of one read.  Each reader has one under way, and between two it waits for its turn in Python."""

LAST_RUN_BYTES = 2 << 20

CombineCrc = Callable[[int, int, int], int]
"""CRC32 of two pieces put together, from their CRC32s and the bytes of the second."""


@dataclass(frozen=True, slots=True)
class FilledSlab:
    """A new slab whose last extent has been read."""

    index: int  # into placement.slabs
    crcs: Mapping[str, int]  # CRC32 of each of its tensors, as it was read


@dataclass(frozen=True, slots=True)
class ReadRun:
    """Extents that follow each other in a file and go into one slab: one read."""

    extents: tuple[ReadExtent, ...]

    @property
    def file(self) -> str:
        """The file it is read from."""
        return self.extents[0].file

    @property
    def file_offset(self) -> int:
        """Where in the file it begins."""
        return self.extents[0].file_offset

    @property
    def slab(self) -> int:
        """The slab it is read into."""
        return self.extents[0].slab

    @property
    def nbytes(self) -> int:
        """Bytes of all extents."""
        return sum(extent.nbytes for extent in self.extents)

    @property
    def pieces(self) -> list[tuple[int, int]]:
        """Offset in the slab and bytes of each extent."""
        return [(extent.slab_offset, extent.nbytes) for extent in self.extents]

    def extent_at(self, file_offset: int) -> ReadExtent:
        """The extent that a byte of the file belongs to; the first where it is none of this run."""
        for extent in self.extents:
            if extent.file_offset <= file_offset < extent.file_offset + extent.nbytes:
                return extent
        return self.extents[0]


class _SlabReads:
    """The reads of one slab; its extents come by file and offset."""

    def __init__(self, index: int, extents: Sequence[ReadExtent]) -> None:
        self.index = index
        self.nbytes = self.left_bytes = sum(extent.nbytes for extent in extents)
        self.runs: list[ReadRun] = []  # those handed out
        self.crcs: dict[int, list[int]] = {}  # by run
        self._rest = deque(extents)

    @property
    def under_way(self) -> int:
        """Runs that are being read."""
        return len(self.runs) - len(self.crcs)

    @property
    def is_complete(self) -> bool:
        """Whether all was handed out and read."""
        return not self.left_bytes and not self.under_way

    def cut(self, most_bytes: int) -> ReadRun:
        """Hand out what comes next, as far as it follows each other in one file: part of a large tensor, or
        many small ones."""
        extents: list[ReadExtent] = []
        nbytes = 0
        while self._rest and nbytes < most_bytes and (not extents or _follows(extents[-1], self._rest[0])):
            extent = self._rest.popleft()
            if extent.nbytes > most_bytes - nbytes:
                extent, rest = _split(extent, most_bytes - nbytes)
                self._rest.appendleft(rest)
            extents.append(extent)
            nbytes += extent.nbytes
        self.left_bytes -= nbytes
        self.runs.append(ReadRun(tuple(extents)))
        return self.runs[-1]


def _follows(extent: ReadExtent, following: ReadExtent) -> bool:
    end = extent.file_offset + extent.nbytes
    return (extent.file, end) == (following.file, following.file_offset)


def _split(extent: ReadExtent, nbytes: int) -> tuple[ReadExtent, ReadExtent]:
    rest = replace(
        extent,
        file_offset=extent.file_offset + nbytes,
        slab_offset=extent.slab_offset + nbytes,
        nbytes=extent.nbytes - nbytes,
    )
    return replace(extent, nbytes=nbytes), rest


class ReadSchedule:
    """Hands out every extent of a placement once, slab by slab and the largest slab first, so that the first
    slabs are complete while the last are still read.  Not thread-safe: its owner lets in one caller at a
    time."""

    def __init__(
        self,
        placement: Placement,
        combine: CombineCrc,
        *,
        readers: int,
        run_bytes: int = RUN_BYTES,
        slabs_at_once: int = 1,
    ) -> None:
        """Readers spread over `slabs_at_once` slabs until the last are begun; each reads `run_bytes` at once
        until little is left.  Raises InvariantError where nothing is read into one of the slabs."""
        extents: list[list[ReadExtent]] = [[] for _ in placement.slabs]
        for extent in placement.reads:
            extents[extent.slab].append(extent)
        self._slabs = [_SlabReads(index, each) for index, each in enumerate(extents)]
        empty = [slab.index for slab in self._slabs if not slab.nbytes]
        if empty:
            raise InvariantError(f"nothing is read into slab {empty[0]}")
        # What is hashed after the last byte came is the smallest, and the others are done by then.
        self._slabs_to_read = sorted(self._slabs, key=lambda slab: -slab.nbytes)
        self._combine = combine
        self._readers = readers
        self._run_bytes = run_bytes
        self._slabs_at_once = slabs_at_once
        self._begun: list[_SlabReads] = []  # those that have something to hand out
        self._untouched = deque(self._slabs_to_read)
        self._left_bytes = sum(slab.nbytes for slab in self._slabs)

    @property
    def order(self) -> list[int]:
        """The slabs, by their index in the placement, in the order in which they are read into."""
        return [slab.index for slab in self._slabs_to_read]

    def take(self) -> tuple[int, ReadRun] | None:
        """The run to read next, with its number in its slab; None when all were handed out."""
        while len(self._begun) < self._slabs_at_once and self._untouched:
            self._begun.append(self._untouched.popleft())
        if not self._begun:
            return None
        slab = min(self._begun, key=self._spread if self._untouched else self._nearly_full)
        # Shorter towards the end: readers are done at the same time.
        share = self._left_bytes // (2 * self._readers)
        run = slab.cut(min(self._run_bytes, max(share, LAST_RUN_BYTES)))
        self._left_bytes -= run.nbytes
        if not slab.left_bytes:
            self._begun.remove(slab)
        return len(slab.runs) - 1, run

    @staticmethod
    def _spread(slab: _SlabReads) -> int:
        return slab.under_way

    @staticmethod
    def _nearly_full(slab: _SlabReads) -> tuple[bool, int]:
        """The last slabs one after the other, or all would be full at the very end, and only then hashed.
        Two readers hardly wait for each other."""
        return slab.under_way >= 2, slab.left_bytes

    def finish(self, number: int, run: ReadRun, crcs: Sequence[int]) -> FilledSlab | None:
        """Note that a run was read, with the CRC32 of each of its extents; its slab if that was the last of
        it."""
        slab = self._slabs[run.slab]
        if number in slab.crcs:
            raise InvariantError(f"run {number} of slab {run.slab} was read twice")
        slab.crcs[number] = list(crcs)
        if not slab.is_complete:
            return None
        # Whatever the order in which they were read, those of one tensor are listed in file order.
        combined: dict[str, int] = {}
        for each, each_run in enumerate(slab.runs):
            for extent, crc in zip(each_run.extents, slab.crcs[each], strict=True):
                before = combined.get(extent.tensor)
                combined[extent.tensor] = crc if before is None else self._combine(before, crc, extent.nbytes)
        return FilledSlab(run.slab, combined)
