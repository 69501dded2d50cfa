"""Reading a placement's extents into new slabs, each of which is sealed as soon as it is complete."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from loaderd.crew import Crew
from loaderd.load_request import LoadProgress, LoadRequest
from loaderd.read_schedule import FilledSlab, ReadRun, ReadSchedule
from shared._native import crc32_combine
from shared.errors import CheckpointError, ReadFailed, Superseded
from shared.gate import Pacer
from shared.memory.backend import MemoryBackend, Slab, WritableSlab

OnSealed = Callable[[FilledSlab, Slab], None]
"""Called once per slab, by the thread that sealed it; the slab is readable and stays open."""


class Filling:
    """The new slabs of one load on its first device while they are filled.

    Owns them: what is still open when `undo` unwinds is closed."""

    def __init__(
        self,
        request: LoadRequest,
        backend: MemoryBackend,
        progress: LoadProgress,
        pace: Pacer,
        on_sealed: OnSealed,
        undo: ExitStack,
    ) -> None:
        self._backend = backend
        self._device = request.devices[0]
        self._sizes = request.placement.slabs
        self._checkpoint = request.checkpoint
        self._progress = progress
        self._pace = pace
        self._on_sealed = on_sealed
        self._undo = undo
        self._schedule = ReadSchedule(
            request.placement, crc32_combine, readers=backend.readers, slabs_at_once=backend.slabs_at_once
        )
        self._lock = threading.Lock()  # of the schedule and of undo
        self._sealed: dict[int, Slab] = {}
        self._writable: dict[int, WritableSlab] = {}
        self._allocated = threading.Condition(self._lock)
        self._is_allocating = True

    @property
    def slabs(self) -> tuple[Slab, ...]:
        """All new slabs, once everything was read, in the order of the placement."""
        return tuple(self._sealed[index] for index in range(len(self._sizes)))

    def begin(self, crew: Crew) -> Sequence[threading.Thread]:
        """Allocate the first slab and have the crew's threads read into it, while one of them allocates the
        others: they end when all are sealed, with OutOfMemory, with CheckpointError where a file ends early
        or cannot be read, with Superseded where the crew is to end.  Raises OutOfMemory."""
        # The first one here: beside a dozen threads that start, it took twice as long.
        for index in self._schedule.order[:1]:
            self._create(index)
        allocating = crew.start(1, lambda: self._allocate(crew))
        return [*allocating, *crew.start(self._backend.readers, lambda: self._read(crew))]

    def _create(self, index: int) -> None:
        slab = self._backend.create_slab(self._device, self._sizes[index])
        with self._allocated:
            self._undo.enter_context(slab)
            self._writable[index] = slab
            self._allocated.notify_all()

    def _allocate(self, crew: Crew) -> None:
        try:
            for index in self._schedule.order[1:]:
                if crew.is_ending:
                    return
                self._create(index)
        finally:
            with self._allocated:
                self._is_allocating = False
                self._allocated.notify_all()

    def _read(self, crew: Crew) -> None:
        self._backend.stay_near(self._device)
        while True:
            with self._lock:
                taken = self._schedule.take()
            if taken is None:
                return
            number, run = taken
            slab = self._awaited(run.slab)  # before the gate: what cannot be read need not be let through
            self._pace.admit(run.nbytes)
            crew.check_going()
            crcs = self._read_run(run, slab)
            self._progress.add_read(run.nbytes)
            with self._lock:
                filled = self._schedule.finish(number, run, crcs)
            if filled is not None:
                self._seal(filled)

    def _read_run(self, run: ReadRun, slab: WritableSlab) -> list[int]:
        fd = self._checkpoint.borrow_fd(run.file)
        try:
            return slab.read_pieces(fd, run.file_offset, run.pieces)
        except ReadFailed as error:
            extent = run.extent_at(error.byte)
            reason = error.message if error.number else f"ends early: {error.message}"
            raise CheckpointError(reason, file=run.file, tensor=extent.tensor, byte=error.byte) from error

    def _awaited(self, index: int) -> WritableSlab:
        with self._allocated:
            self._allocated.wait_for(lambda: index in self._writable or not self._is_allocating)
            slab = self._writable.get(index)
        if slab is None:
            raise Superseded("the slabs could not be allocated")
        return slab

    def _seal(self, filled: FilledSlab) -> None:
        slab = self._writable[filled.index].seal()
        with self._lock:
            self._undo.enter_context(slab)
            self._sealed[filled.index] = slab
        self._on_sealed(filled, slab)
