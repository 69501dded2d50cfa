"""`HostBackend`: slabs in host memory, for machines and tests without a GPU.

A slab is a sealed memfd; native/host_slab.hpp lists what that guarantees.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, final
from uuid import uuid4

from shared import _native
from shared.errors import DriverError, InvariantError, OutOfMemory, ProtocolError
from shared.ids import HOST_DEVICE, DeviceId, SlabId
from shared.layout import SlabEntry
from shared.memory.backend import Slab
from shared.memory.host_capacity import available_bytes
from shared.memory.native_slab import FillableSlab, ReadableSlab
from shared.memory.ranges import check_same_size
from shared.memory.usage import DeviceUsage

if TYPE_CHECKING:
    pass

_NO_MEMORY = frozenset((errno.ENOMEM, errno.ENOSPC))
_LARGEST_SLAB_BYTES = 2**63 - 1  # off_t


@final
class HostSlab(ReadableSlab[_native.HostSlab]):
    """A readable slab in host memory (`backend.Slab`)."""

    __slots__ = ()

    @property
    def batch_bytes(self) -> int:
        return 0

    def sha256_leaves_of(self, ranges: Sequence[tuple[int, int]], leaf_bytes: int) -> list[bytes]:
        return [self.sha256_leaves(offset, nbytes, leaf_bytes) for offset, nbytes in ranges]


@final
class WritableHostSlab(FillableSlab[_native.WritableHostSlab]):
    """A slab in host memory that its creator fills (`backend.WritableSlab`)."""

    __slots__ = ()

    def copy_from(self, slab: Slab) -> None:
        check_same_size(self._entry, slab.entry)
        self.read_file(slab.borrow_fd(), 0, 0, slab.entry.nbytes)

    def seal(self) -> HostSlab:
        return HostSlab(self._entry, self._native.seal())


@final
class HostBackend:
    """Slabs as sealed memfds; device `host` (`backend.MemoryBackend`).

    With `limit_bytes`, the slabs that this process created or imported may take that much
    together.  Thread-safe.
    """

    __slots__ = ("_budget", "_creating")

    def __init__(self, limit_bytes: int | None = None) -> None:
        self._budget = _native.Budget(limit_bytes)
        self._creating = threading.Lock()

    @property
    def name(self) -> str:
        return "host"

    @property
    def used_bytes(self) -> int:
        """Bytes of all slabs that this process holds, through tensors too; each slab counts once."""
        return self._budget.used_bytes

    def devices(self) -> tuple[DeviceId, ...]:
        return (HOST_DEVICE,)

    def free_bytes(self, device: DeviceId) -> int:
        if device != HOST_DEVICE:
            raise InvariantError(f"the host backend has no device {device!r}")
        return min(available_bytes(), self._budget.free_bytes)

    def usage(self, device: DeviceId) -> DeviceUsage:
        free_bytes = self.free_bytes(device)
        return DeviceUsage(free_bytes, largest_free_bytes=free_bytes)

    def create_slab(self, device: DeviceId, nbytes: int) -> WritableHostSlab:
        """Allocate every page now.  Blocking (0.3 to 1 s per GiB, by the machine), without the GIL."""
        if nbytes <= 0:
            raise InvariantError(f"a slab cannot have {nbytes} bytes")
        entry = SlabEntry(SlabId(uuid4().hex), device, nbytes)
        # One at a time: what is free must still be free when the pages are taken, because the
        # kernel answers an excess with its OOM killer far more often than with an error.
        with self._creating:
            free = self.free_bytes(device)
            if nbytes > free:
                raise OutOfMemory(
                    what="a slab in host memory", needed_bytes=nbytes, free_bytes=free, device=device
                )
            try:
                native = _native.create_host_slab(self._budget, entry.slab_id, nbytes)
            except DriverError as error:
                if error.number not in _NO_MEMORY:
                    raise
                raise OutOfMemory(
                    what=f"a slab in host memory ({error.call})",
                    needed_bytes=nbytes,
                    free_bytes=self.free_bytes(device),
                    device=device,
                ) from error
        return WritableHostSlab(entry, native)

    def replicate(self, slab: Slab, device: DeviceId) -> HostSlab:
        """As `backend.MemoryBackend`; there is one device, so this is a second copy in host memory."""
        with self.create_slab(device, slab.entry.nbytes) as replica:
            replica.copy_from(slab)
            return replica.seal()

    def import_slab(self, entry: SlabEntry, take_fd: int) -> HostSlab:
        if entry.device != HOST_DEVICE or not 0 < entry.nbytes <= _LARGEST_SLAB_BYTES:
            os.close(take_fd)
            raise ProtocolError(f"slab {entry.slab_id} is not one of host memory: {entry}")
        native = _native.import_host_slab(self._budget, entry.slab_id, entry.nbytes, take_fd)
        return HostSlab(entry, native)
