"""Slabs made from those of another device: copied device to device, and hashed where they lie then.

Runs on worker threads; nothing here touches the daemon's state.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

from shared.errors import DigestMismatch
from shared.gate import Pacer
from shared.ids import DeviceId, SlabId
from shared.memory.backend import MemoryBackend, Slab
from shared.resident import ResidentVersion, damaged_tensors

SlabPlace = tuple[int, DeviceId]
"""The index of a slab in a version's layout, and the device of the copy that it belongs to."""


class Replicas:
    """The slabs of one version that are made from those of other devices.

    Owns them: what is still open when `undo` unwinds is closed.  `make` may run on several threads."""

    def __init__(self, backend: MemoryBackend, sizes: Mapping[SlabPlace, int], undo: ExitStack) -> None:
        """Allocates all, so that what does not fit is known before anything is copied.  Blocking; raises
        OutOfMemory."""
        self._undo = undo
        self._writable = {
            (index, device): undo.enter_context(backend.create_slab(device, nbytes))
            for (index, device), nbytes in sizes.items()
        }
        self._lock = threading.Lock()  # of all that follows, and of undo
        self._under_way = 0
        self._since = 0.0
        self.made: dict[SlabPlace, Slab] = {}
        self.copy_s = 0.0  # while one copy at least was under way
        self.nbytes = 0  # copied

    def devices(self, index: int) -> tuple[DeviceId, ...]:
        """The devices that a slab is to be copied to."""
        return tuple(device for each, device in self._writable if each == index)

    def make(self, index: int, device: DeviceId, source: Slab) -> Slab:
        """Copy a sealed slab to a device and seal the copy; nothing is verified yet.  Blocking, without the
        GIL.  Raises DriverError."""
        target = self._writable[index, device]
        with self._timed():
            target.copy_from(source)
        slab = target.seal()
        with self._lock:
            self._undo.enter_context(slab)
            self.made[index, device] = slab
            self.nbytes += slab.entry.nbytes
        return slab

    @contextmanager
    def _timed(self) -> Iterator[None]:
        with self._lock:
            if self._under_way == 0:
                self._since = time.perf_counter()
            self._under_way += 1
        try:
            yield
        finally:
            with self._lock:
                self._under_way -= 1
                if self._under_way == 0:
                    self.copy_s += time.perf_counter() - self._since


@dataclass(frozen=True, slots=True)
class Replicated:
    """A verified copy that was made from another; the caller owns `new_slabs`, the copy borrows the rest."""

    copy: ResidentVersion
    new_slabs: tuple[Slab, ...]
    copy_s: float

    @property
    def nbytes(self) -> int:
        """Bytes that were copied."""
        return sum(slab.entry.nbytes for slab in self.new_slabs)


def replicate(
    source: ResidentVersion,
    device: DeviceId,
    known: Mapping[SlabId, Slab],
    backend: MemoryBackend,
    pacer: Pacer,
) -> Replicated:
    """A copy of a resident version on another device, laid out alike, every new byte hashed there, as fast as
    `pacer` lets it.

    `known` are replicas that the device has already, by the id of the source's slab; they stay the
    caller's.  Blocking.  On any error nothing stays allocated.  Raises OutOfMemory, DriverError,
    DigestMismatch with tensor and device.
    """
    with ExitStack() as undo:
        lacking = {index: slab for index, slab in enumerate(source.slabs) if slab.entry.slab_id not in known}
        sizes = {(index, device): slab.entry.nbytes for index, slab in lacking.items()}
        replicas = Replicas(backend, sizes, undo)
        new = {}
        for index, slab in lacking.items():
            pacer.admit(slab.entry.nbytes)
            new[index] = replicas.make(index, device, slab)
        slabs = tuple(
            new[index] if index in new else known[slab.entry.slab_id]
            for index, slab in enumerate(source.slabs)
        )
        layout = replace(source.layout, slabs=tuple(slab.entry for slab in slabs))
        copy = ResidentVersion(source.tag, layout, slabs, source.assets)
        # The others were hashed when they came to the device.
        tensors = tuple(tensor for tensor in layout.tensors if tensor.slab in new and tensor.nbytes)
        damaged = damaged_tensors(replace(copy, layout=replace(layout, tensors=tensors)), pacer)
        if damaged:
            raise DigestMismatch(
                f"the copy on {device} is not what it was made from: damaged on the way",
                file=str(source.tag.ref),
                tensor=damaged[0],
            )
        undo.pop_all()
    return Replicated(copy, tuple(new.values()), replicas.copy_s)
