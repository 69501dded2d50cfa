"""Load and verify: from an open checkpoint and a placement to sealed, hashed, resident slabs.

Runs on worker threads; nothing here touches the daemon's state.
"""

from __future__ import annotations

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
from shared.digest import LEAF_BYTES, tensor_digest
from shared.errors import CheckpointError, DigestMismatch, DriverError, Superseded
from shared.ids import DeviceId, Digest, VersionRef, VersionTag
from shared.layout import Layout, SlabEntry, TensorEntry
from shared.memory.backend import MemoryBackend, Slab, WritableSlab
from shared.resident import ResidentVersion, content_digest

Item = TypeVar("Item")
Outcome = TypeVar("Outcome")

WORKERS = 2
"""Threads that read, and then threads that hash; both hold no GIL while they do."""


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
    places = request.placement.places
    shared = {tensor.tensor: tensor.crc32 for tensor in request.placement.shared}
    by_place: dict[tuple[int, int, int], list[TensorSource]] = defaultdict(list)
    for source in request.checkpoint.tensors:
        place = places[source.name]
        by_place[(place.slab, place.offset_bytes, source.nbytes)].append(source)

    def check(sources: list[TensorSource]) -> list[TensorEntry]:
        _check_going(cancelled)
        first = sources[0]
        place = places[first.name]
        if request.seal is not None and first.name in shared:
            crc, digest = shared[first.name], request.seal.tensors[first.name].digest
        else:
            crc, digest = _hash_resident(request, slabs, sources, crcs)
        progress.add_verified(first.nbytes)
        return [
            TensorEntry(s.name, s.dtype, s.shape, s.nbytes, place.slab, place.offset_bytes, crc, digest)
            for s in sources
        ]

    checked = _run_all(check, tuple(by_place.values()), cancelled)
    entries = tuple(SlabEntry(slab.entry.slab_id, slab.entry.device, slab.entry.nbytes) for slab in slabs)
    tensors = sorted((entry for group in checked for entry in group), key=lambda entry: entry.name)
    return Layout(entries, tuple(tensors))


def _hash_resident(
    request: LoadRequest, slabs: tuple[Slab, ...], sources: list[TensorSource], crcs: Mapping[str, int]
) -> tuple[int, Digest]:
    first = sources[0]
    place = request.placement.places[first.name]
    if first.nbytes == 0:
        return 0, tensor_digest(b"")
    slab = slabs[place.slab]
    crc = slab.crc32(place.offset_bytes, first.nbytes)
    # Of several tensors with one content, the plan had one read.
    read = next(crcs[source.name] for source in sources if source.name in crcs)
    if crc != read:
        raise DigestMismatch(
            f"CRC32 is {crc:08x} where it is resident, {read:08x} when it was read: damaged on the way",
            file=first.file,
            tensor=first.name,
            byte=first.file_offset,
        )
    leaves = slab.sha256_leaves(place.offset_bytes, first.nbytes, LEAF_BYTES)
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
