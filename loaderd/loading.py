"""Load and verify: from an open checkpoint and a placement to sealed, hashed, resident slabs.

Runs on worker threads; nothing here touches the daemon's state.  Some threads read (filling.py), others
hash what is sealed already (verification.py) and copy it to other devices (replication.py), so that a slab
is replicated and verified while the next is read.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from queue import SimpleQueue

from loaderd.crew import Crew
from loaderd.filling import Filling
from loaderd.load_request import LoadProgress, LoadRequest
from loaderd.read_schedule import FilledSlab
from loaderd.replication import Replicas, SlabPlace
from loaderd.verification import Verification
from shared.errors import DigestMismatch
from shared.gate import Gate, Pacer
from shared.ids import DeviceId, Digest, VersionTag
from shared.layout import Layout, TensorEntry
from shared.memory.backend import MemoryBackend, Slab
from shared.resident import Part, ResidentVersion, content_digest


@dataclass(frozen=True, slots=True)
class _Hash:
    """Check some bytes of a slab, on whichever device it is."""

    filled: FilledSlab
    slab: Slab
    batch: list[Part]


@dataclass(frozen=True, slots=True)
class _Copy:
    """Copy a slab to another device, and check all of it there."""

    filled: FilledSlab
    source: Slab
    device: DeviceId


@dataclass(frozen=True, slots=True)
class Loaded:
    """A verified version, with a copy on each device; the caller owns `new_slabs`, the copies borrow the
    others too.

    The times overlap: `load_s` ends with the last byte read, `verify_s` begins when the first slab is
    complete and ends with the last copy's last byte; `replicate_s` is while bytes moved between devices."""

    copies: Mapping[DeviceId, ResidentVersion]
    new_slabs: tuple[Slab, ...]
    load_s: float
    verify_s: float
    replicate_s: float
    bytes_replicated: int


def load_and_verify(
    request: LoadRequest,
    backend: MemoryBackend,
    progress: LoadProgress,
    cancelled: threading.Event,
    pace: Pacer | None = None,
) -> Loaded:
    """Fill new slabs, seal each, copy it to the other devices, and hash every byte wherever it will be
    served from.  Each byte is read once.

    Blocking.  On any error nothing stays allocated on any device.  Raises OutOfMemory, ResourceError where
    the host gives no more threads, CheckpointError where a file ends early or changed, DigestMismatch where
    bytes are not those of the seal or changed between reading and residing, on a device that it names,
    Superseded once `cancelled` is set.
    """
    with ExitStack() as undo:
        load = _Load(request, backend, progress, pace or Gate(), undo)
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
        pace: Pacer,
        undo: ExitStack,
    ) -> None:
        self._request = request
        self._progress = progress
        self._pace = pace
        self._hashers = backend.hashers_per_device * len(request.devices)
        self._started = self._loaded = time.perf_counter()
        self._first_sealed: float | None = None
        self._work: SimpleQueue[_Hash | _Copy | None] = SimpleQueue()
        self._verification = Verification(request, progress)
        self._table: tuple[TensorEntry, ...] = ()
        self._digest: Digest
        self._assets = dict(request.checkpoint.assets)
        self._filling = Filling(request, backend, progress, pace, self._queue_sealed, undo)
        self._replicas = Replicas(backend, _lacking(request), undo)

    def run(self, cancelled: threading.Event) -> None:
        """Read, copy and hash everything.  Raises the first error, when all threads have ended."""
        for index, replicas in enumerate(self._request.shared, len(self._request.placement.slabs)):
            self._queue_copies(FilledSlab(index, {}), next(iter(replicas.values())))
        with Crew(cancelled) as crew:
            try:
                hashing = crew.start(self._hashers, lambda: self._hash(crew))
                crew.wait(self._filling.begin(crew))
                self._loaded = time.perf_counter()
                self._progress.is_verifying = True
                crew.check()
                # No later: what is offered must be the bytes of one unchanging folder.
                self._request.checkpoint.verify_unchanged()
            finally:
                for _ in range(self._hashers):
                    self._work.put(None)
            if self._verification.is_promised:
                self._describe()  # while the last bytes are hashed
            crew.wait(hashing)
            crew.check()
        if not self._table:
            self._describe()
        self._verification.check_all_found(self._table)

    def _describe(self) -> None:
        self._table = self._verification.table()
        self._digest = content_digest(Layout((), self._table), self._assets)

    def result(self) -> Loaded:
        """The version, after `run`."""
        tag = VersionTag(self._request.ref, self._digest)
        slabs = {device: self._slabs_on(device) for device in self._request.devices}
        verifying_since = self._loaded if self._first_sealed is None else self._first_sealed
        return Loaded(
            {
                device: ResidentVersion(
                    tag, Layout(tuple(slab.entry for slab in here), self._table), here, self._assets
                )
                for device, here in slabs.items()
            },
            (*self._filling.slabs, *self._replicas.made.values()),
            load_s=self._loaded - self._started,
            verify_s=time.perf_counter() - verifying_since,
            replicate_s=self._replicas.copy_s,
            bytes_replicated=self._replicas.nbytes,
        )

    def _slabs_on(self, device: DeviceId) -> tuple[Slab, ...]:
        """The slabs of one copy, in the placement's order."""
        there = {index: slab for (index, each), slab in self._replicas.made.items() if each == device}
        if device == self._request.devices[0]:
            there.update(enumerate(self._filling.slabs))
        for index, replicas in enumerate(self._request.shared, len(self._request.placement.slabs)):
            if device in replicas:
                there[index] = replicas[device]
        return tuple(slab for _, slab in sorted(there.items()))

    def _queue_sealed(self, filled: FilledSlab, slab: Slab) -> None:
        """A slab is complete and sealed: from here on its bytes can be hashed, and copied elsewhere."""
        if self._first_sealed is None:
            self._first_sealed = time.perf_counter()
        self._queue_copies(filled, slab)
        for batch in self._verification.batches(filled.index, slab, self._pace.grain_bytes):
            self._work.put(_Hash(filled, slab, batch))

    def _queue_copies(self, filled: FilledSlab, source: Slab) -> None:
        for device in self._replicas.devices(filled.index):
            self._work.put(_Copy(filled, source, device))

    def _hash(self, crew: Crew) -> None:
        while (work := self._work.get()) is not None:
            match work:
                case _Hash():
                    self._check(crew, work)
                case _Copy(filled, source, device):
                    self._admit(crew, source.entry.nbytes)
                    slab = self._replicas.make(filled.index, device, source)
                    for batch in self._verification.batches(filled.index, slab, self._pace.grain_bytes):
                        self._check(crew, _Hash(filled, slab, batch))

    def _check(self, crew: Crew, work: _Hash) -> None:
        nbytes = sum(part.nbytes for part in work.batch)
        self._admit(crew, nbytes)
        self._verification.check(work.filled, work.slab, work.batch, self._pace.spread_s(nbytes))

    def _admit(self, crew: Crew, nbytes: int) -> None:
        self._pace.admit(nbytes)
        crew.check_going()


def _lacking(request: LoadRequest) -> dict[SlabPlace, int]:
    """The sizes of the slabs that are to be copied from another device, by index and device."""
    first, *others = request.devices
    sizes = {(index, device): size for index, size in enumerate(request.placement.slabs) for device in others}
    for index, replicas in enumerate(request.shared, len(request.placement.slabs)):
        nbytes = next(iter(replicas.values())).entry.nbytes
        sizes |= {(index, device): nbytes for device in (first, *others) if device not in replicas}
    return sizes
