"""Reading a placement's extents into new slabs, each of which is sealed as soon as it is complete."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack

from loaderd.crew import Crew
from loaderd.load_request import LoadProgress, LoadRequest, Pace
from loaderd.placement import ReadExtent
from loaderd.read_schedule import FilledSlab, ReadSchedule
from shared._native import crc32_combine
from shared.errors import CheckpointError, DriverError
from shared.memory.backend import MemoryBackend, Slab, WritableSlab

OnSealed = Callable[[FilledSlab, Slab], None]
"""Called once per slab, by the thread that sealed it; the slab is readable and stays open."""


class Filling:
    """The new slabs of one load while they are filled.

    Owns them: what is still open when `undo` unwinds is closed.  The work is `read`, on as many threads
    of the crew as there are."""

    def __init__(
        self,
        request: LoadRequest,
        backend: MemoryBackend,
        progress: LoadProgress,
        pace: Pace,
        on_sealed: OnSealed,
        undo: ExitStack,
    ) -> None:
        """Allocates.  Blocking; raises OutOfMemory."""
        self._checkpoint = request.checkpoint
        self._progress = progress
        self._pace = pace
        self._on_sealed = on_sealed
        self._undo = undo
        self._schedule = ReadSchedule(request.placement, crc32_combine)
        self._lock = threading.Lock()  # of the schedule and of undo
        self._sealed: dict[int, Slab] = {}
        self._writable: list[WritableSlab] = []
        for nbytes in request.placement.slabs:
            slab = backend.create_slab(request.device, nbytes)
            undo.enter_context(slab)
            self._writable.append(slab)

    @property
    def slabs(self) -> tuple[Slab, ...]:
        """All new slabs, once everything was read, in the order of the placement."""
        return tuple(self._sealed[index] for index in range(len(self._writable)))

    def read(self, crew: Crew) -> None:
        """Read extents until none is left.  Raises CheckpointError where a file ends early or cannot be
        read, Superseded where the crew is to end."""
        while True:
            with self._lock:
                extent = self._schedule.take()
            if extent is None:
                return
            self._pace.admit(extent.nbytes)
            crew.check_going()
            crc = self._read_extent(extent)
            self._progress.add_read(extent.nbytes)
            with self._lock:
                filled = self._schedule.finish(extent, crc)
            if filled is not None:
                self._seal(filled)

    def _read_extent(self, extent: ReadExtent) -> int:
        try:
            return self._writable[extent.slab].read_file(
                self._checkpoint.borrow_fd(extent.file), extent.file_offset, extent.slab_offset, extent.nbytes
            )
        except DriverError as error:
            reason = error.message if error.number else f"ends early: {error.message}"
            raise CheckpointError(
                reason, file=extent.file, tensor=extent.tensor, byte=extent.file_offset
            ) from error

    def _seal(self, filled: FilledSlab) -> None:
        slab = self._writable[filled.index].seal()
        with self._lock:
            self._undo.enter_context(slab)
            self._sealed[filled.index] = slab
        self._on_sealed(filled, slab)
