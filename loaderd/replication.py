"""Copies of a version on several devices: read once, copied from device to device, and hashed where each
copy lies.

Runs on worker threads; nothing here touches the daemon's state.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace

from loaderd.checkpoint.checkpoint import Checkpoint
from loaderd.loading import LoadProgress, LoadRequest, load_and_verify
from loaderd.placement import Placement
from loaderd.seal.document import Seal
from shared.digest import LEAF_BYTES, tensor_digest
from shared.errors import DigestMismatch, InvariantError
from shared.ids import DeviceId, SlabId, VersionRef
from shared.memory.backend import MemoryBackend, Slab
from shared.resident import ResidentVersion, damaged_tensors


@dataclass(frozen=True, slots=True)
class Replicated:
    """A verified copy that was made from another; the caller owns `new_slabs`, the copy borrows the rest."""

    copy: ResidentVersion
    new_slabs: tuple[Slab, ...]
    copy_s: float  # of device to device copies alone

    @property
    def nbytes(self) -> int:
        """Bytes that were copied."""
        return sum(slab.entry.nbytes for slab in self.new_slabs)


def replicate(
    source: ResidentVersion, device: DeviceId, known: Mapping[SlabId, Slab], backend: MemoryBackend
) -> Replicated:
    """A copy of a resident version on another device, laid out alike, every new byte hashed there.

    `known` are replicas that the device has already, by the id of the source's slab; they stay the
    caller's.  Blocking.  On any error nothing stays allocated.  Raises OutOfMemory, DriverError,
    DigestMismatch with tensor and device.
    """
    with ExitStack() as undo:
        lacking = [slab for slab in source.slabs if slab.entry.slab_id not in known]
        # All before the first is filled: what does not fit is known at once.
        writable = [undo.enter_context(backend.create_slab(device, slab.entry.nbytes)) for slab in lacking]
        started = time.perf_counter()
        made: dict[SlabId, Slab] = {}
        for slab, target in zip(lacking, writable, strict=True):
            target.copy_from(slab)
            made[slab.entry.slab_id] = undo.enter_context(target.seal())
        copied = time.perf_counter()
        slabs = tuple(made.get(s.entry.slab_id) or known[s.entry.slab_id] for s in source.slabs)
        layout = replace(source.layout, slabs=tuple(slab.entry for slab in slabs))
        copy = ResidentVersion(source.tag, layout, slabs, source.assets)
        fresh = frozenset(index for index, slab in enumerate(source.slabs) if slab.entry.slab_id in made)
        damaged = damaged_tensors(copy, fresh)
        if damaged:
            raise _damaged(source.tag.ref, damaged[0], device)
        undo.pop_all()
    return Replicated(copy, tuple(made.values()), copied - started)


def _damaged(ref: VersionRef, tensor: str, device: DeviceId) -> DigestMismatch:
    return DigestMismatch(
        f"the copy on {device} is not what it was made from: damaged on the way", file=str(ref), tensor=tensor
    )


# --- loading to several devices ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CopiesRequest:
    """What to load and where; the checkpoint and the shared slabs stay the caller's."""

    ref: VersionRef
    checkpoint: Checkpoint
    seal: Seal | None
    placement: Placement
    shared: tuple[Mapping[DeviceId, Slab], ...]  # replicas, wherever they are, of each placement.shared_slabs
    devices: tuple[DeviceId, ...]  # files are read into the first


@dataclass(frozen=True, slots=True)
class LoadedCopies:
    """A verified version on each device; the caller owns `new_slabs`, the copies borrow the others too."""

    copies: Mapping[DeviceId, ResidentVersion]
    new_slabs: tuple[Slab, ...]
    load_s: float
    verify_s: float
    bytes_replicated: int
    replicate_s: float


def load_copies(
    request: CopiesRequest, backend: MemoryBackend, progress: LoadProgress, cancelled: threading.Event
) -> LoadedCopies:
    """Load and verify on the first device, each byte read once, and replicate to the others.

    Blocking.  On any error nothing stays allocated on any device.  Raises what `load_and_verify` and
    `replicate` raise.
    """
    first, *others = request.devices
    with ExitStack() as undo:
        brought = _bring_shared(request, first, backend)
        for slab in brought.values():
            undo.callback(slab.close)
        shared = tuple(brought.get(index) or replicas[first] for index, replicas in enumerate(request.shared))
        load = LoadRequest(
            request.ref, request.checkpoint, request.seal, request.placement, shared, device=first
        )
        loaded = load_and_verify(load, backend, progress, cancelled)
        for slab in loaded.new_slabs:
            undo.callback(slab.close)
        made = _replicate_to(others, loaded.version, shared, request.shared, backend)
        undo.pop_all()
    copies = {first: loaded.version, **{device: each.copy for device, each in made.items()}}
    new_slabs = (
        *brought.values(),
        *loaded.new_slabs,
        *(slab for each in made.values() for slab in each.new_slabs),
    )
    return LoadedCopies(
        copies,
        new_slabs,
        loaded.load_s,
        loaded.verify_s,
        sum(slab.entry.nbytes for slab in brought.values()) + sum(each.nbytes for each in made.values()),
        max((each.copy_s for each in made.values()), default=0.0),
    )


def _replicate_to(
    devices: Sequence[DeviceId],
    version: ResidentVersion,
    shared_here: Sequence[Slab],
    shared: Sequence[Mapping[DeviceId, Slab]],
    backend: MemoryBackend,
) -> dict[DeviceId, Replicated]:
    """A copy on each device, made side by side; where one fails, none stays."""
    if not devices:
        return {}

    def work(device: DeviceId) -> Replicated:
        known = {
            here.entry.slab_id: replicas[device]
            for here, replicas in zip(shared_here, shared, strict=True)
            if device in replicas
        }
        return replicate(version, device, known, backend)

    with ThreadPoolExecutor(len(devices), thread_name_prefix="replicate") as workers:
        futures = {device: workers.submit(work, device) for device in devices}
    errors = [error for error in (future.exception() for future in futures.values()) if error is not None]
    if errors:
        for future in futures.values():
            if future.exception() is None:
                for slab in future.result().new_slabs:
                    slab.close()
        raise errors[0]
    return {device: future.result() for device, future in futures.items()}


def _bring_shared(request: CopiesRequest, device: DeviceId, backend: MemoryBackend) -> dict[int, Slab]:
    """Replicas of the shared slabs that a device lacks, by index, each from a device that has it, and the
    tensors that are shared in them hashed there."""
    with ExitStack() as undo:
        brought: dict[int, Slab] = {}
        for index, replicas in enumerate(request.shared):
            if device not in replicas:
                brought[index] = undo.enter_context(backend.replicate(next(iter(replicas.values())), device))
        for tensor in request.placement.shared:
            slab = brought.get(request.placement.shared_slabs.index(tensor.slab_id))
            if slab is None:
                continue
            if request.seal is None:
                raise InvariantError(f"{tensor.tensor} is shared by a digest that no seal gives")
            leaves = slab.sha256_leaves(tensor.offset_bytes, tensor.nbytes, LEAF_BYTES)
            if tensor_digest(leaves) != request.seal.tensors[tensor.tensor].digest:
                raise _damaged(request.ref, tensor.tensor, device)
        undo.pop_all()
    return brought
