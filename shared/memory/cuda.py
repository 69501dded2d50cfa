"""`CudaBackend`: slabs in the memory of NVIDIA GPUs.

A slab is physical memory that travels as a POSIX fd, or, where that is not available or not wanted,
a block of legacy CUDA IPC; native/cuda_region.hpp and native/cuda_ipc_memory.hpp list what each
guarantees.  Sizes are multiples of the device's granularity (2 MiB): `create_slab` rounds up, and
`entry.nbytes` is what every reader maps.

Memory is unmapped only after the GPU work that may use it: when its last slab or tensor is gone, a
thread of the device records an event over all work submitted until then, waits for it and unmaps
(native/cuda_release.hpp).  `close` of the last owner waits for that; a tensor's end does not.  While a CUDA
graph is being captured in the same process, that would end the capture: `releases_held` puts it off.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import final
from uuid import uuid4

from shared import _native
from shared.errors import ConfigError, DriverError, InvariantError, OutOfMemory, ProtocolError
from shared.ids import DeviceId, SlabId
from shared.layout import SlabEntry
from shared.memory.backend import Slab
from shared.memory.native_slab import FillableSlab, ReadableSlab
from shared.memory.numa import near_processors
from shared.memory.nvrtc import nvrtc_libraries
from shared.memory.pool import PIECE_BYTES, Pool
from shared.memory.ranges import check_same_size
from shared.memory.usage import DeviceUsage


@contextmanager
def releases_held(device: DeviceId) -> Iterator[None]:
    """Unmap nothing of a device in this process inside the block, in which graphs may be captured; what ends
    meanwhile is unmapped after it.  Waits for what is being unmapped now.  Whoever closes the last owner of
    memory waits until the end of the block, so its own thread must not."""
    hold = _native.CudaReleaseHold(device)
    try:
        yield
    finally:
        hold.close()


SLOT_BYTES = 512 << 10
"""Of a pinned slot: small, so that all of a thread's stay near its processor's cache; copies are submitted in
batches, so that the bus does not mind (native/cuda_copy_queue.hpp)."""

SLOTS_PER_THREAD = 6
"""One is read into while others are copied from: a batch of copies may have several of them."""

MOST_READERS = 16
"""A dozen read as fast as the bus carries."""

HASHERS = 2
"""For each device: they wait for kernels, and hash a slab in half the time that reading it takes."""

SLAB_BYTES = 1 << 30
"""To import and map one takes some 0.2 ms, and it is read in 25 ms."""

BATCH_BYTES = 4 << 30
"""Hashed in one launch: enough leaves for every thread of the device, and a bound on what waits for it."""

CUDA_ERROR_OUT_OF_MEMORY = 2

_LARGEST_SLAB_BYTES = 2**63 - 1


@final
class CudaSlab(ReadableSlab[_native.CudaSlab]):
    """A readable slab in GPU memory (`backend.Slab`).

    Its digests are computed by kernels over the device's bytes, compiled at the first call (DriverMissing
    without NVRTC).  SHA-256 takes one thread per leaf: one call for many tensors (`sha256_leaves_of`) is
    far faster than a call for each.  A launch takes some 6 ms however few the leaves are, and processes take
    turns on a GPU: with `spread_s` there are many of some tenths of a millisecond with pauses between them.
    """

    __slots__ = ("_after_close",)

    def __init__(
        self, entry: SlabEntry, take_native: _native.CudaSlab, after_close: Callable[[], None]
    ) -> None:
        super().__init__(entry, take_native)
        self._after_close = after_close

    @property
    def native(self) -> _native.CudaSlab:
        """For `RemappedRegion` and copies; owned by this slab."""
        return self._native

    @property
    def batch_bytes(self) -> int:
        return BATCH_BYTES

    def close(self) -> None:
        """Give up the fd and this owner's reference; the last one waits for the GPU and the unmapping, and
        the device's pool takes the memory back as far as no reader keeps it."""
        super().close()
        self._after_close()


@final
class WritableCudaSlab(FillableSlab[_native.WritableCudaSlab]):
    """A slab in GPU memory that its creator fills (`backend.WritableSlab`)."""

    __slots__ = ("_after_close",)

    def __init__(
        self, entry: SlabEntry, take_native: _native.WritableCudaSlab, after_close: Callable[[], None]
    ) -> None:
        super().__init__(entry, take_native)
        self._after_close = after_close

    def copy_from(self, slab: Slab) -> None:
        """As `backend.WritableSlab`: over NVLink or PCIe where the GPUs reach each other's memory
        (native/cuda_copy.hpp), else as the driver finds a way."""
        if not isinstance(slab, CudaSlab):
            raise InvariantError(f"slab {slab.entry.slab_id} is not one of the cuda backend")
        check_same_size(self._entry, slab.entry)
        self._native.copy_from(slab.native)

    def seal(self) -> CudaSlab:
        return CudaSlab(self._entry, self._native.seal(), self._after_close)

    def close(self) -> None:
        super().close()
        self._after_close()


@final
class CudaBackend:
    """Slabs on the GPUs that this process sees (`backend.MemoryBackend`); thread-safe.

    Raises DriverMissing where there is no CUDA driver or an old one, DriverError where it finds no
    device.  With `limit_bytes`, the slabs that this process created or imported may take that much on each
    device.  Of a device with a pool (`reserve`), what slabs do not use of it is kept from everyone else.
    With `legacy_ipc`, or on a device without fds, new slabs are blocks of legacy CUDA IPC: readers can
    then write to them, and they end with this process.  Each thread that reads files takes
    `slots_per_thread` pinned slots of `slot_bytes`, once.
    """

    __slots__ = (
        *("_budgets", "_creating", "_devices", "_hashers_per_device", "_legacy_ipc", "_limit_bytes"),
        *("_near", "_pools", "_readers", "_slots", "_staging"),
    )

    def __init__(
        self,
        limit_bytes: int | None = None,
        *,
        legacy_ipc: bool = False,
        slot_bytes: int = SLOT_BYTES,
        slots_per_thread: int = SLOTS_PER_THREAD,
        readers: int | None = None,
        hashers_per_device: int = HASHERS,
    ) -> None:
        _native.cuda_set_nvrtc_libraries(nvrtc_libraries(_native.cuda_driver_version()))
        self._devices = tuple(DeviceId(uuid) for uuid in _native.cuda_devices())
        self._budgets = {device: _native.Budget() for device in self._devices}
        self._limit_bytes = limit_bytes
        self._pools: dict[DeviceId, Pool] = {}
        self._legacy_ipc = legacy_ipc
        self._slots = (slot_bytes, slots_per_thread)
        cores = os.cpu_count() or 1
        # An eighth of the cores is left to who hashes, submits copies and serves: reading takes all it gets.
        self._readers = readers or min(MOST_READERS, cores - cores // 8)
        self._hashers_per_device = hashers_per_device
        self._near = {device: near_processors(_native.cuda_numa_node(device)) for device in self._devices}
        self._staging: dict[DeviceId, _native.CudaStaging] = {}
        self._creating = threading.Lock()

    @property
    def name(self) -> str:
        return "cuda"

    @property
    def slab_bytes(self) -> int:
        return SLAB_BYTES

    @property
    def slabs_at_once(self) -> int:
        return 1

    @property
    def readers(self) -> int:
        return self._readers

    def stay_near(self, device: DeviceId) -> None:
        """Pinned slots are then on the device's side of the host too, for the thread that makes them touches
        them first.  Not where the node has fewer processors than there are readers: they are needed more."""
        near = self._near[device]
        if len(near) >= self._readers:
            with suppress(OSError):  # a hint: what the process may use can have changed meanwhile
                os.sched_setaffinity(0, near)  # of this thread

    @property
    def hashers_per_device(self) -> int:
        return self._hashers_per_device

    @property
    def used_bytes(self) -> int:
        """Bytes of all slabs that this process holds, through tensors too; each slab counts once."""
        return sum(budget.used_bytes for budget in self._budgets.values())

    def devices(self) -> tuple[DeviceId, ...]:
        return self._devices

    def reserve(self, device: DeviceId, pool_bytes: int) -> int:
        """Keep `pool_bytes` of a device for slabs from now on, those included that there are; the bytes that
        it is short of now, for others hold them.  It takes them as soon as they are free: when a slab is
        created or closed and when `free_bytes` or `usage` is asked.  Raises ConfigError where slabs are not
        allocations with an fd."""
        self._check_device(device)
        if self._legacy_ipc or not _native.cuda_has_posix_fds(device):
            raise ConfigError(f"a pool needs slabs with fds, which {device} or this configuration has not")
        with self._creating:
            if device in self._pools:
                raise InvariantError(f"{device} has a pool already")
            pool = Pool(_native.CudaReserve(device, PIECE_BYTES), pool_bytes)
            self._pools[device] = pool
            return pool.keep(self._budgets[device].used_bytes)

    def free_bytes(self, device: DeviceId) -> int:
        """What the driver has free and the pool reserves, in whole steps.  Waits for memory that is being
        given back."""
        self._check_device(device)
        with self._creating:
            self._keep_pool(device)
            return self._free_bytes(device)

    def usage(self, device: DeviceId) -> DeviceUsage:
        """As `free_bytes`.  One slab can take all that is free: its pages need not lie together."""
        free_bytes = self.free_bytes(device)
        _, total_bytes = _native.cuda_memory(device)
        pool = self._pools.get(device)
        if pool is None:
            return DeviceUsage(free_bytes, free_bytes, total_bytes)
        return DeviceUsage(free_bytes, free_bytes, total_bytes, pool.pool_bytes, pool.reserved_bytes)

    def create_slab(self, device: DeviceId, nbytes: int) -> WritableCudaSlab:
        """Allocate at least `nbytes`: rounded up to the device's granularity.  Blocking."""
        if nbytes <= 0:
            raise InvariantError(f"a slab cannot have {nbytes} bytes")
        self._check_device(device)
        step = _native.cuda_granularity(device)
        entry = SlabEntry(SlabId(uuid4().hex), device, -(-nbytes // step) * step)
        with self._creating:
            free = self._free_bytes(device)
            if entry.nbytes > free:
                raise OutOfMemory(
                    what=f"a slab on {device}", needed_bytes=nbytes, free_bytes=free, device=device
                )
            staging = self._staging.get(device)
            if staging is None:
                staging = self._staging[device] = _native.CudaStaging(device, *self._slots)
            native = self._allocate(entry, staging)
        return WritableCudaSlab(entry, native, partial(self._after_close, device))

    def _allocate(self, entry: SlabEntry, staging: _native.CudaStaging) -> _native.WritableCudaSlab:
        def create() -> _native.WritableCudaSlab:
            try:
                return _native.create_cuda_slab(
                    self._budgets[entry.device], staging, entry.slab_id, entry.nbytes, self._legacy_ipc
                )
            except DriverError as error:
                # A full device has no room for page tables either: mapping fails, not allocating.
                if error.number != CUDA_ERROR_OUT_OF_MEMORY:
                    raise
                free, _ = _native.cuda_memory(entry.device)
                raise OutOfMemory(
                    what=f"mapping a slab on {entry.device}",
                    needed_bytes=entry.nbytes,
                    free_bytes=free,
                    device=entry.device,
                ) from error

        pool = self._pools.get(entry.device)
        if pool is None:
            return create()
        try:
            return pool.allocate(entry.nbytes, create)
        finally:
            self._keep_pool(entry.device)

    def _free_bytes(self, device: DeviceId) -> int:
        free, _ = _native.cuda_memory(device)
        if device in self._pools:
            free += self._pools[device].reserved_bytes
        if self._limit_bytes is not None:
            free = min(free, max(0, self._limit_bytes - self._budgets[device].used_bytes))
        step = _native.cuda_granularity(device)
        return free // step * step

    def _keep_pool(self, device: DeviceId) -> None:
        if device in self._pools:
            self._pools[device].keep(self._budgets[device].used_bytes)

    def _after_close(self, device: DeviceId) -> None:
        if device in self._pools:
            with self._creating:
                self._keep_pool(device)

    def import_slab(self, entry: SlabEntry, take_fd: int) -> CudaSlab:
        """As `backend.MemoryBackend`.  A slab of legacy IPC can be imported in other processes only."""
        if entry.device not in self._devices or not 0 < entry.nbytes <= _LARGEST_SLAB_BYTES:
            os.close(take_fd)
            raise ProtocolError(f"slab {entry.slab_id} is not one of a device of this process: {entry}")
        budget = self._budgets[entry.device]
        native = _native.import_cuda_slab(budget, entry.device, entry.slab_id, entry.nbytes, take_fd)
        return CudaSlab(entry, native, partial(self._after_close, entry.device))

    def _check_device(self, device: DeviceId) -> None:
        if device not in self._devices:
            raise InvariantError(f"this process sees no device {device!r}")
