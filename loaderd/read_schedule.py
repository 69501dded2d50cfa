"""In which order a load reads, and when a slab is complete."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from loaderd.placement import Placement, ReadExtent
from shared.errors import InvariantError

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


def read_runs(extents: Iterable[ReadExtent], run_bytes: int) -> list[ReadRun]:
    """Parts of extents, and neighbours in a file and in a slab together, up to `run_bytes`: a large tensor is
    many reads, a thousand small ones are a few.  Extents come by slab, file and offset."""
    runs: list[list[ReadExtent]] = []
    nbytes = 0
    for extent in chain.from_iterable(_parts(extent, run_bytes) for extent in extents):
        before = runs[-1][-1] if runs else None
        is_next = before is not None and (before.slab, before.file, before.file_offset + before.nbytes) == (
            extent.slab,
            extent.file,
            extent.file_offset,
        )
        if is_next and nbytes + extent.nbytes <= run_bytes:
            runs[-1].append(extent)
            nbytes += extent.nbytes
        else:
            runs.append([extent])
            nbytes = extent.nbytes
    return [ReadRun(tuple(run)) for run in runs]


def _parts(extent: ReadExtent, most_bytes: int) -> Iterator[ReadExtent]:
    if extent.nbytes <= most_bytes:
        yield extent
        return
    for start in range(0, extent.nbytes, most_bytes):
        yield replace(
            extent,
            file_offset=extent.file_offset + start,
            slab_offset=extent.slab_offset + start,
            nbytes=min(most_bytes, extent.nbytes - start),
        )


@dataclass(slots=True)
class _SlabReads:
    """The reads of one slab."""

    index: int
    extents: list[ReadExtent]
    runs: list[ReadRun] = field(default_factory=list)  # once it is begun: some thousands in all
    taken: int = 0
    finished: int = 0
    crcs: dict[int, list[int]] = field(default_factory=dict)  # by run

    @property
    def nbytes(self) -> int:
        """Bytes of all extents."""
        return sum(extent.nbytes for extent in self.extents)

    @property
    def under_way(self) -> int:
        """Runs that are being read."""
        return self.taken - self.finished


class ReadSchedule:
    """Hands out every extent of a placement once, slab by slab and the largest slab first, so that the first
    slabs are complete while the last are still read.  Not thread-safe: its owner lets in one caller at a
    time."""

    def __init__(
        self, placement: Placement, combine: CombineCrc, *, run_bytes: int, slabs_at_once: int = 1
    ) -> None:
        """Readers spread over `slabs_at_once` slabs until the last are begun.  Raises InvariantError where
        nothing is read into one of the slabs."""
        extents: list[list[ReadExtent]] = [[] for _ in placement.slabs]
        for extent in placement.reads:
            extents[extent.slab].append(extent)
        self._slabs = [_SlabReads(index, each) for index, each in enumerate(extents)]
        empty = [slab.index for slab in self._slabs if not slab.extents]
        if empty:
            raise InvariantError(f"nothing is read into slab {empty[0]}")
        # What is hashed after the last byte came is the smallest, and the others are done by then.
        self._slabs_to_read = sorted(self._slabs, key=lambda slab: -slab.nbytes)
        self._combine = combine
        self._run_bytes = run_bytes
        self._slabs_at_once = slabs_at_once
        self._begun: list[_SlabReads] = []  # those that have runs to hand out
        self._untouched = deque(self._slabs_to_read)

    @property
    def order(self) -> list[int]:
        """The slabs, by their index in the placement, in the order in which they are read into."""
        return [slab.index for slab in self._slabs_to_read]

    def take(self) -> tuple[int, ReadRun] | None:
        """The run to read next, with its number in its slab; None when all were handed out."""
        while len(self._begun) < self._slabs_at_once and self._untouched:
            slab = self._untouched.popleft()
            slab.runs = read_runs(slab.extents, self._run_bytes)
            self._begun.append(slab)
        if not self._begun:
            return None
        slab = min(self._begun, key=self._spread if self._untouched else self._nearly_full)
        number, run = slab.taken, slab.runs[slab.taken]
        slab.taken += 1
        if slab.taken == len(slab.runs):
            self._begun.remove(slab)
        return number, run

    @staticmethod
    def _spread(slab: _SlabReads) -> int:
        return slab.under_way

    @staticmethod
    def _nearly_full(slab: _SlabReads) -> tuple[bool, int]:
        """The last slabs one after the other, or all would be full at the very end, and only then hashed.
        Two readers hardly wait for each other."""
        return slab.under_way >= 2, len(slab.runs) - slab.taken

    def finish(self, number: int, run: ReadRun, crcs: Sequence[int]) -> FilledSlab | None:
        """Note that a run was read, with the CRC32 of each of its extents; its slab if that was the last of
        it."""
        slab = self._slabs[run.slab]
        if number in slab.crcs:
            raise InvariantError(f"run {number} of slab {run.slab} was read twice")
        slab.crcs[number] = list(crcs)
        slab.finished += 1
        if slab.finished < len(slab.runs):
            return None
        # Whatever the order in which they were read, those of one tensor are listed in file order.
        combined: dict[str, int] = {}
        for each, each_run in enumerate(slab.runs):
            for extent, crc in zip(each_run.extents, slab.crcs[each], strict=True):
                before = combined.get(extent.tensor)
                combined[extent.tensor] = crc if before is None else self._combine(before, crc, extent.nbytes)
        return FilledSlab(run.slab, combined)
