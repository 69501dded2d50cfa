"""Load and verify: from an open checkpoint and a placement to sealed, hashed, resident slabs.

Runs on worker threads; nothing here touches the daemon's state.  Some threads read (filling.py), others
hash what is sealed already (verification.py), so that a slab is verified while the next is read.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass
from queue import SimpleQueue

from loaderd.crew import Crew
from loaderd.filling import Filling
from loaderd.load_request import LoadProgress, LoadRequest, Pace, Unpaced
from loaderd.read_schedule import FilledSlab
from loaderd.verification import Verification
from shared.errors import DigestMismatch
from shared.ids import VersionTag
from shared.memory.backend import MemoryBackend, Slab
from shared.resident import Part, ResidentVersion, content_digest

READERS = min(16, os.cpu_count() or 1)
"""Threads that read, without the GIL.  Reading into a GPU gains up to 16 of them (docs/benchmarks)."""

HASHERS = os.cpu_count() or 1
"""Threads that hash, without the GIL: on the host with the processor, else waiting for the device's
kernels.  They are others than those that read, so that neither a slow file nor a long hash stops the
other."""

_HashWork = tuple[FilledSlab, Slab, list[Part]]


@dataclass(frozen=True, slots=True)
class Loaded:
    """A verified version; the caller owns `new_slabs`, the version borrows the others too.

    The two times overlap: `load_s` ends with the last byte read, `verify_s` begins when the first slab is
    complete."""

    version: ResidentVersion
    new_slabs: tuple[Slab, ...]
    load_s: float
    verify_s: float


def load_and_verify(
    request: LoadRequest,
    backend: MemoryBackend,
    progress: LoadProgress,
    cancelled: threading.Event,
    pace: Pace | None = None,
) -> Loaded:
    """Fill new slabs, seal each, and hash every byte where it will be served from.

    Blocking.  On any error nothing stays allocated.  Raises OutOfMemory, CheckpointError where a
    file ends early or changed, DigestMismatch where bytes are not those of the seal or changed
    between reading and residing, Superseded once `cancelled` is set.
    """
    with ExitStack() as undo:
        load = _Load(request, backend, progress, pace or Unpaced(), undo)
        try:
            load.run(cancelled)
        except DigestMismatch:
            request.checkpoint.verify_unchanged()  # that a file was written meanwhile is the better reason
            raise
        loaded = load.result()
        undo.pop_all()
    return loaded


class _Load:
    """One load: readers fill slabs, hashers check them."""

    def __init__(
        self,
        request: LoadRequest,
        backend: MemoryBackend,
        progress: LoadProgress,
        pace: Pace,
        undo: ExitStack,
    ) -> None:
        self._request = request
        self._progress = progress
        self._pace = pace
        self._started = self._loaded = time.perf_counter()
        self._first_sealed: float | None = None
        self._work: SimpleQueue[_HashWork | None] = SimpleQueue()
        self._verification = Verification(request, progress)
        self._filling = Filling(request, backend, progress, pace, self._queue_hashing, undo)

    def run(self, cancelled: threading.Event) -> None:
        """Read and hash everything.  Raises the first error, when all threads have ended."""
        with Crew(cancelled, READERS + HASHERS) as crew:
            hashing = crew.start(HASHERS, lambda: self._hash(crew))
            try:
                crew.wait(crew.start(READERS, lambda: self._filling.read(crew)))
                self._loaded = time.perf_counter()
                self._progress.is_verifying = True
                crew.check()
                # No later: what is offered must be the bytes of one unchanging folder.
                self._request.checkpoint.verify_unchanged()
            finally:
                for _ in hashing:
                    self._work.put(None)
            crew.wait(hashing)
            crew.check()

    def result(self) -> Loaded:
        """The version, after `run`."""
        checkpoint, new_slabs = self._request.checkpoint, self._filling.slabs
        slabs = (*new_slabs, *self._request.shared_slabs)
        layout = self._verification.layout(slabs)
        tag = VersionTag(self._request.ref, content_digest(layout, checkpoint.assets))
        verifying_since = self._loaded if self._first_sealed is None else self._first_sealed
        return Loaded(
            ResidentVersion(tag, layout, slabs, dict(checkpoint.assets)),
            new_slabs,
            load_s=self._loaded - self._started,
            verify_s=time.perf_counter() - verifying_since,
        )

    def _queue_hashing(self, filled: FilledSlab, slab: Slab) -> None:
        """A slab is complete and sealed: from here on its bytes can be hashed, and copied elsewhere."""
        if self._first_sealed is None:
            self._first_sealed = time.perf_counter()
        for batch in self._verification.batches(filled.index, slab):
            self._work.put((filled, slab, batch))

    def _hash(self, crew: Crew) -> None:
        while (work := self._work.get()) is not None:
            filled, slab, batch = work
            self._pace.admit(sum(part.nbytes for part in batch))
            crew.check_going()
            self._verification.check(filled, slab, batch)
