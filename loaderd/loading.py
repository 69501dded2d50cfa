"""Load and verify: from an open checkpoint and a placement to sealed, hashed, resident slabs.

Runs on worker threads; nothing here touches the daemon's state.
"""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TypeVar

from loaderd.checkpoint.checkpoint import Checkpoint
from loaderd.checkpoint.header import TensorSource
from loaderd.placement import Placement, ReadExtent
from loaderd.seal.check import check_tensor
from loaderd.seal.document import Seal
from shared._native import crc32_combine
from shared.digest import tensor_digest
from shared.errors import CheckpointError, DigestMismatch, DriverError, Superseded
from shared.ids import DeviceId, Digest, VersionRef, VersionTag
from shared.layout import Layout, SlabEntry, TensorEntry
from shared.memory.backend import MemoryBackend, Slab, WritableSlab
from shared.resident import Place, ResidentVersion, content_digest, hash_batches, resident_leaves

Item = TypeVar("Item")
Outcome = TypeVar("Outcome")

WORKERS = min(16, os.cpu_count() or 1)
"""Threads that read, and then threads that hash; both hold no GIL while they do.  Reading into a GPU
gains up to 16 of them (docs/benchmarks)."""


class LoadProgress:
    """Byte counters that workers raise and the event loop reads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.read = 0
        self.verified = 0
        self.is_verifying = False

    def add_read(self, nbytes: int) -> None:
        """Count bytes that are in memory."""
        with self._lock:
            self.read += nbytes

    def add_verified(self, nbytes: int) -> None:
        """Count bytes that were hashed where they lie."""
        with self._lock:
            self.verified += nbytes


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """What to load and where; the checkpoint and the shared slabs stay the caller's."""

    ref: VersionRef
    checkpoint: Checkpoint
    seal: Seal | None
    placement: Placement
    shared_slabs: tuple[Slab, ...]  # in the order of placement.shared_slabs
    device: DeviceId


@dataclass(frozen=True, slots=True)
class Loaded:
    """A verified version; the caller owns `new_slabs`, the version borrows the others too."""

    version: ResidentVersion
    new_slabs: tuple[Slab, ...]
    load_s: float
    verify_s: float


def load_and_verify(
    request: LoadRequest, backend: MemoryBackend, progress: LoadProgress, cancelled: threading.Event
) -> Loaded:
    """Fill new slabs, seal them, and hash every byte where it will be served from.

    Blocking.  On any error nothing stays allocated.  Raises OutOfMemory, CheckpointError where a
    file ends early or changed, DigestMismatch where bytes are not those of the seal or changed
    between reading and residing, Superseded once `cancelled` is set.
    """
    started = time.perf_counter()
    with ExitStack() as undo:
        crcs, new_slabs = _fill(request, backend, progress, cancelled, undo)
        loaded = time.perf_counter()
        progress.is_verifying = True
        slabs = (*new_slabs, *request.shared_slabs)
        layout = _verify(request, slabs, crcs, progress, cancelled)
        verified = time.perf_counter()
        digest = content_digest(layout, request.checkpoint.assets)
        version = ResidentVersion(
            VersionTag(request.ref, digest), layout, slabs, dict(request.checkpoint.assets)
        )
        undo.pop_all()
    return Loaded(version, tuple(new_slabs), loaded - started, verified - loaded)


# --- reading -------------------------------------------------------------------------------------


def _fill(
    request: LoadRequest,
    backend: MemoryBackend,
    progress: LoadProgress,
    cancelled: threading.Event,
    undo: ExitStack,
) -> tuple[dict[str, int], list[Slab]]:
    """Read every extent; returns the CRC32 of each tensor that was read, and the sealed slabs."""
    checkpoint = request.checkpoint
    with ExitStack() as writing:
        writable: list[WritableSlab] = []
        for nbytes in request.placement.slabs:
            slab = backend.create_slab(request.device, nbytes)
            writing.enter_context(slab)
            writable.append(slab)

        def read(extent: ReadExtent) -> int:
            _check_going(cancelled)
            slab = writable[extent.slab]
            try:
                crc = slab.read_file(
                    checkpoint.borrow_fd(extent.file), extent.file_offset, extent.slab_offset, extent.nbytes
                )
            except DriverError as error:
                reason = error.message if error.number else f"ends early: {error.message}"
                raise CheckpointError(
                    reason, file=extent.file, tensor=extent.tensor, byte=extent.file_offset
                ) from error
            progress.add_read(extent.nbytes)
            return crc

        crcs = _combine(request.placement.reads, _run_all(read, request.placement.reads, cancelled))
        checkpoint.verify_unchanged()
        sealed: list[Slab] = []
        for slab in writable:
            done = slab.seal()
            undo.callback(done.close)
            sealed.append(done)
    return crcs, sealed


def _combine(extents: tuple[ReadExtent, ...], crcs: list[int]) -> dict[str, int]:
    """CRC32 of each tensor from those of its extents, in file order."""
    combined: dict[str, int] = {}
    for extent, crc in zip(extents, crcs, strict=True):
        before = combined.get(extent.tensor)
        combined[extent.tensor] = crc if before is None else crc32_combine(before, crc, extent.nbytes)
    return combined


# --- verification --------------------------------------------------------------------------------


def _verify(
    request: LoadRequest,
    slabs: tuple[Slab, ...],
    crcs: Mapping[str, int],
    progress: LoadProgress,
    cancelled: threading.Event,
) -> Layout:
    """Hash every place once and return the layout; shared places were verified when they were loaded
    and are what the seal promises, by digest."""
    by_place: dict[Place, list[TensorSource]] = defaultdict(list)
    for source in request.checkpoint.tensors:
        spot = request.placement.places[source.name]
        by_place[spot.slab, spot.offset_bytes, source.nbytes].append(source)
    shared = {tensor.tensor: tensor.crc32 for tensor in request.placement.shared}
    known: dict[Place, tuple[int, Digest]] = {}
    unknown: list[Place] = []
    for place, sources in by_place.items():
        name = sources[0].name
        if place[2] == 0:
            known[place] = (0, tensor_digest(b""))
        elif request.seal is not None and name in shared:
            known[place] = (shared[name], request.seal.tensors[name].digest)
        else:
            unknown.append(place)

    def check(batch: list[Place]) -> dict[Place, tuple[int, Digest]]:
        _check_going(cancelled)
        found: dict[Place, tuple[int, Digest]] = {}
        for place, leaves in zip(batch, resident_leaves(batch, slabs), strict=True):
            found[place] = _check_resident(request, slabs, place, by_place[place], leaves, crcs)
            progress.add_verified(place[2])
        return found

    progress.add_verified(sum(place[2] for place in known))
    for found in _run_all(check, hash_batches(unknown, slabs), cancelled):
        known.update(found)
    tensors = [
        TensorEntry(source.name, source.dtype, source.shape, source.nbytes, *place[:2], *known[place])
        for place, sources in by_place.items()
        for source in sources
    ]
    entries = tuple(SlabEntry(slab.entry.slab_id, slab.entry.device, slab.entry.nbytes) for slab in slabs)
    return Layout(entries, tuple(sorted(tensors, key=lambda entry: entry.name)))


def _check_resident(
    request: LoadRequest,
    slabs: tuple[Slab, ...],
    place: Place,
    sources: list[TensorSource],
    leaves: bytes,
    crcs: Mapping[str, int],
) -> tuple[int, Digest]:
    """CRC32 and digest of a place that was read into; raises DigestMismatch unless they are what was
    read and what the seal says."""
    first = sources[0]
    slab, offset_bytes, nbytes = place
    crc = slabs[slab].crc32(offset_bytes, nbytes)
    # Of several tensors with one content, the plan had one read.
    read = next(crcs[source.name] for source in sources if source.name in crcs)
    if crc != read:
        raise DigestMismatch(
            f"CRC32 is {crc:08x} where it is resident, {read:08x} when it was read: damaged on the way",
            file=first.file,
            tensor=first.name,
            byte=first.file_offset,
        )
    if request.seal is not None:
        for source in sources:
            check_tensor(source, request.seal.tensors[source.name], leaves=leaves, crc32=crc)
    return crc, tensor_digest(leaves)


# --- workers -------------------------------------------------------------------------------------


def _run_all(
    work: Callable[[Item], Outcome], items: Sequence[Item], cancelled: threading.Event
) -> list[Outcome]:
    """Outcomes in order; the first error ends the others early and is raised."""
    failed = threading.Event()

    def guarded(item: Item) -> Outcome:
        _check_going(failed)
        try:
            return work(item)
        except BaseException:
            failed.set()
            raise

    with ThreadPoolExecutor(WORKERS, thread_name_prefix="load") as workers:
        futures = [workers.submit(guarded, item) for item in items]
        wait(futures, return_when=FIRST_EXCEPTION)
    _check_going(cancelled)
    causes = [error for error in map(Future.exception, futures) if error is not None]
    if causes:
        # Those that were only told to stop are not the cause.
        raise next((error for error in causes if not isinstance(error, Superseded)), causes[0])
    return [future.result() for future in futures]


def _check_going(stop: threading.Event) -> None:
    if stop.is_set():
        raise Superseded("the load was ended")
