"""`HostBackend`: slabs in host memory, for machines and tests without a GPU.

A slab is a sealed memfd; native/host_slab.hpp lists what that guarantees.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import final
from uuid import uuid4

from shared import _native
from shared.errors import DriverError, InvariantError, OutOfMemory, ProtocolError, ReadFailed
from shared.ids import HOST_DEVICE, DeviceId, SlabId
from shared.layout import SlabEntry
from shared.memory.backend import Slab
from shared.memory.host_capacity import available_bytes
from shared.memory.native_slab import FillableSlab, ReadableSlab
from shared.memory.ranges import check_same_size
from shared.memory.usage import DeviceUsage

SLAB_BYTES = 256 << 20
"""To map one costs next to nothing here."""

BATCH_BYTES = 32 << 20
"""Hashed in one call: some milliseconds, so that threads end together, and enough leaves for every lane."""

MOST_READERS = 16
"""More wait for memory, not for a disk."""

_NO_MEMORY = frozenset((errno.ENOMEM, errno.ENOSPC))
_LARGEST_SLAB_BYTES = 2**63 - 1  # off_t


@final
class HostSlab(ReadableSlab[_native.HostSlab]):
    """A readable slab in host memory (`backend.Slab`)."""

    __slots__ = ()

    @property
    def batch_bytes(self) -> int:
        return BATCH_BYTES


class Promises:
    """Memory that slabs which are being filled were promised and have not taken yet."""

    __slots__ = ("_lock", "_slabs")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._slabs: dict[SlabId, _native.WritableHostSlab] = {}

    @property
    def nbytes(self) -> int:
        """What is still to be taken."""
        with self._lock:
            return sum(slab.missing_bytes for slab in self._slabs.values())

    def add(self, slab_id: SlabId, slab: _native.WritableHostSlab) -> None:
        """From now on."""
        with self._lock:
            self._slabs[slab_id] = slab

    def end(self, slab_id: SlabId) -> None:
        """The slab has all its pages, or gave up what it had."""
        with self._lock:
            self._slabs.pop(slab_id, None)


@final
class WritableHostSlab(FillableSlab[_native.WritableHostSlab]):
    """A slab in host memory that its creator fills (`backend.WritableSlab`)."""

    __slots__ = ("_promises",)

    def __init__(self, entry: SlabEntry, take_native: _native.WritableHostSlab, promises: Promises) -> None:
        super().__init__(entry, take_native)
        self._promises = promises

    def read_file(self, fd: int, file_offset: int, offset_bytes: int, nbytes: int) -> int:
        with self._taking(nbytes):
            return super().read_file(fd, file_offset, offset_bytes, nbytes)

    def read_pieces(self, fd: int, file_offset: int, pieces: Sequence[tuple[int, int]]) -> list[int]:
        with self._taking(sum(nbytes for _, nbytes in pieces)):
            return super().read_pieces(fd, file_offset, pieces)

    def copy_from(self, slab: Slab) -> None:
        """As `backend.WritableSlab`; there is one device, so this makes a second copy in host memory."""
        check_same_size(self._entry, slab.entry)
        self.read_file(slab.borrow_fd(), 0, 0, slab.entry.nbytes)

    def seal(self) -> HostSlab:
        with self._taking(self._native.missing_bytes):
            sealed = HostSlab(self._entry, self._native.seal())
        self._promises.end(self._entry.slab_id)
        return sealed

    def close(self) -> None:
        super().close()
        self._promises.end(self._entry.slab_id)

    @contextmanager
    def _taking(self, nbytes: int) -> Iterator[None]:
        """Turn the kernel's lack of pages into OutOfMemory."""
        try:
            yield
        except DriverError as error:
            if error.number not in _NO_MEMORY or isinstance(error, ReadFailed):
                raise
            raise OutOfMemory(
                what=f"host memory for a slab ({error.call})",
                needed_bytes=nbytes,
                free_bytes=available_bytes(),
                device=self._entry.device,
            ) from error


@final
class HostBackend:
    """Slabs as sealed memfds; device `host` (`backend.MemoryBackend`).

    With `limit_bytes`, the slabs that this process created or imported may take that much
    together.  Thread-safe.
    """

    __slots__ = ("_budget", "_creating", "_promises")

    def __init__(self, limit_bytes: int | None = None) -> None:
        self._budget = _native.Budget(limit_bytes)
        self._creating = threading.Lock()
        self._promises = Promises()

    @property
    def name(self) -> str:
        return "host"

    @property
    def slab_bytes(self) -> int:
        return SLAB_BYTES

    @property
    def slabs_at_once(self) -> int:
        return os.cpu_count() or 1

    @property
    def readers(self) -> int:
        return min(MOST_READERS, os.cpu_count() or 1)

    def stay_near(self, device: DeviceId) -> None:
        """Files and slabs may be on any node."""

    @property
    def hashers_per_device(self) -> int:
        return os.cpu_count() or 1

    @property
    def used_bytes(self) -> int:
        """Bytes of all slabs that this process holds, through tensors too; each slab counts once."""
        return self._budget.used_bytes

    def devices(self) -> tuple[DeviceId, ...]:
        return (HOST_DEVICE,)

    def free_bytes(self, device: DeviceId) -> int:
        if device != HOST_DEVICE:
            raise InvariantError(f"the host backend has no device {device!r}")
        unpromised = max(0, available_bytes() - self._promises.nbytes)
        return min(unpromised, self._budget.free_bytes)

    def usage(self, device: DeviceId) -> DeviceUsage:
        free_bytes = self.free_bytes(device)
        return DeviceUsage(free_bytes, largest_free_bytes=free_bytes)

    def create_slab(self, device: DeviceId, nbytes: int) -> WritableHostSlab:
        """Promise memory for every page; `free_bytes` counts it from now on.  Pages are taken as the slab is
        filled, by the threads that fill it."""
        if nbytes <= 0:
            raise InvariantError(f"a slab cannot have {nbytes} bytes")
        entry = SlabEntry(SlabId(uuid4().hex), device, nbytes)
        # One at a time: what is free must still be free when it is promised, because the kernel answers
        # an excess with its OOM killer far more often than with an error.
        with self._creating:
            free = self.free_bytes(device)
            if nbytes > free:
                raise OutOfMemory(
                    what="a slab in host memory", needed_bytes=nbytes, free_bytes=free, device=device
                )
            native = _native.create_host_slab(self._budget, entry.slab_id, nbytes)
            self._promises.add(entry.slab_id, native)
        return WritableHostSlab(entry, native, self._promises)

    def import_slab(self, entry: SlabEntry, take_fd: int) -> HostSlab:
        if entry.device != HOST_DEVICE or not 0 < entry.nbytes <= _LARGEST_SLAB_BYTES:
            os.close(take_fd)
            raise ProtocolError(f"slab {entry.slab_id} is not one of host memory: {entry}")
        native = _native.import_host_slab(self._budget, entry.slab_id, entry.nbytes, take_fd)
        return HostSlab(entry, native)
