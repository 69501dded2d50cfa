"""A memory backend without memory mappings, stricter than a real one.

Slabs are byte arrays in a `FakeMemory`, which stands for the devices: backends of a writer and of
readers share it.  Closing twice, using a closed slab, leaving a range and sealing twice raise; writing
through a tensor is found when the slab is closed; slabs that nobody closed are listed.  The n-th call of
an operation can be told to fail, and a read can be held.
"""

from __future__ import annotations

import hashlib
import os
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self

from shared.errors import (
    ChangeoverError,
    InvalidRequest,
    InvariantError,
    OutOfMemory,
    ProtocolError,
    ReadFailed,
)
from shared.ids import HOST_DEVICE, DeviceId, SlabId
from shared.layout import SlabEntry
from shared.memory.backend import Slab
from shared.memory.usage import DeviceUsage
from shared.tensor_size import tensor_nbytes

if TYPE_CHECKING:
    import torch

Operation = Literal["create", "read", "copy", "seal", "import", "crc32", "sha256", "tensor"]

_FD_MAGIC = b"changeover fake slab "


@dataclass(slots=True)
class FakeMemory:
    """The memory of devices of `capacity_bytes` each: sealed slabs by id, and how many bytes are taken."""

    capacity_bytes: int = 1 << 30
    devices: tuple[DeviceId, ...] = (HOST_DEVICE,)
    used: Counter[DeviceId] = field(default_factory=Counter)
    sealed: dict[SlabId, bytearray] = field(default_factory=dict)
    entries: dict[SlabId, SlabEntry] = field(default_factory=dict)
    owners: Counter[SlabId] = field(default_factory=Counter)
    damaged: set[SlabId] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)  # loads use it from many threads
    _ids: count[int] = field(default_factory=count)

    @property
    def used_bytes(self) -> int:
        return self.used.total()

    def free_bytes(self, device: DeviceId) -> int:
        if device not in self.devices:
            raise InvariantError(f"the fake backend has no device {device!r}")
        return self.capacity_bytes - self.used[device]

    def take(self, device: DeviceId, nbytes: int) -> SlabEntry:
        free = self.free_bytes(device)
        if nbytes > free:
            raise OutOfMemory(
                what=f"a fake slab on {device}", needed_bytes=nbytes, free_bytes=free, device=device
            )
        entry = SlabEntry(SlabId(f"fake-{next(self._ids)}"), device, nbytes)
        with self.lock:
            self.used[device] += nbytes
        self.owners[entry.slab_id] = 1
        self.entries[entry.slab_id] = entry
        return entry

    def damage(self, slab_id: SlabId, offset_bytes: int) -> None:
        """Flip a bit of a sealed slab, as a failing device does."""
        self.damaged.add(slab_id)
        self.sealed[slab_id][offset_bytes] ^= 1

    def share(self, slab_id: SlabId) -> None:
        with self.lock:
            self.owners[slab_id] += 1

    def give_back(self, slab_id: SlabId) -> None:
        with self.lock:
            self.owners[slab_id] -= 1
            if self.owners[slab_id] == 0:
                del self.owners[slab_id]
                self.sealed.pop(slab_id, None)
                entry = self.entries.pop(slab_id)
                self.used[entry.device] -= entry.nbytes


class FakeSlab:
    """A readable fake slab."""

    def __init__(self, backend: FakeBackend, entry: SlabEntry) -> None:
        self._backend = backend
        self._entry = entry
        self._data = backend.memory.sealed[entry.slab_id]
        self._sealed_crc32 = zlib.crc32(self._data)
        self._fd = os.memfd_create("fake-slab", os.MFD_CLOEXEC)
        os.write(self._fd, _FD_MAGIC + entry.slab_id.encode())
        self._is_open = True
        backend.live.add(self)

    @property
    def entry(self) -> SlabEntry:
        return self._entry

    def borrow_fd(self) -> int:
        self._check_open()
        return self._fd

    def crc32(self, offset_bytes: int, nbytes: int) -> int:
        self._check_open()
        self._backend.count("crc32")
        return zlib.crc32(self._range(offset_bytes, nbytes))

    def sha256_leaves(self, offset_bytes: int, nbytes: int, leaf_bytes: int) -> bytes:
        self._check_open()
        self._backend.count("sha256")
        if leaf_bytes <= 0:
            raise InvariantError(f"a leaf cannot have {leaf_bytes} bytes")
        data = self._range(offset_bytes, nbytes)
        leaves = (data[at : at + leaf_bytes] for at in range(0, nbytes, leaf_bytes))
        return b"".join(hashlib.sha256(leaf).digest() for leaf in leaves)

    @property
    def batch_bytes(self) -> int:
        return self._backend.batch_bytes

    def sha256_leaves_of(
        self, ranges: Sequence[tuple[int, int]], leaf_bytes: int, spread_s: float = 0.0
    ) -> list[bytes]:
        del spread_s
        return [self.sha256_leaves(offset, nbytes, leaf_bytes) for offset, nbytes in ranges]

    def digests_of(
        self, ranges: Sequence[tuple[int, int]], leaf_bytes: int, spread_s: float = 0.0
    ) -> list[tuple[int, bytes]]:
        del spread_s
        return [
            (self.crc32(offset, nbytes), self.sha256_leaves(offset, nbytes, leaf_bytes))
            for offset, nbytes in ranges
        ]

    def tensor(self, offset_bytes: int, dtype: str, shape: Sequence[int]) -> torch.Tensor:
        import torch

        from shared.memory.typed_view import typed_view

        self._check_open()
        self._backend.count("tensor")
        try:
            nbytes = tensor_nbytes(dtype, shape)
        except ValueError as error:
            raise InvalidRequest(str(error), dtype=dtype) from error
        _check_range(self._entry, offset_bytes, nbytes)
        if nbytes == 0:
            return typed_view(torch.empty(0, dtype=torch.uint8), dtype, shape)
        raw = torch.frombuffer(self._data, dtype=torch.uint8, offset=offset_bytes, count=nbytes)
        return typed_view(raw, dtype, shape)

    def close(self) -> None:
        if not self._is_open:
            raise InvariantError(f"slab {self._entry.slab_id} is closed twice")
        self._is_open = False
        os.close(self._fd)
        self._backend.live.remove(self)
        self._backend.memory.give_back(self._entry.slab_id)
        is_failing = self._entry.slab_id in self._backend.memory.damaged
        if zlib.crc32(self._data) != self._sealed_crc32 and not is_failing:
            raise InvariantError(f"slab {self._entry.slab_id} was written to after it was sealed")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._is_open:
            self.close()

    def _check_open(self) -> None:
        if not self._is_open:
            raise InvariantError(f"use of slab {self._entry.slab_id}, which is closed")

    def _range(self, offset_bytes: int, nbytes: int) -> bytes:
        _check_range(self._entry, offset_bytes, nbytes)
        return bytes(self._data[offset_bytes : offset_bytes + nbytes])


class FakeWritableSlab:
    """A fake slab that is being filled; unread bytes are poison, not zeros."""

    def __init__(self, backend: FakeBackend, entry: SlabEntry) -> None:
        self._backend = backend
        self._entry = entry
        self._data = bytearray(b"\xa5") * entry.nbytes
        self._is_open = True
        backend.live.add(self)

    @property
    def entry(self) -> SlabEntry:
        return self._entry

    def read_file(self, fd: int, file_offset: int, offset_bytes: int, nbytes: int) -> int:
        self._check_open("read into")
        _check_range(self._entry, offset_bytes, nbytes)
        if file_offset < 0:
            raise InvariantError(f"a file has no byte {file_offset}")
        if self._backend.before_read is not None:
            self._backend.before_read(self._entry.slab_id)
        self._backend.count("read")
        try:
            data = os.pread(fd, nbytes, file_offset)
        except OSError as error:
            raise ReadFailed("pread", error.errno or 0, error.strerror or "", file_offset) from error
        if len(data) < nbytes:
            end = file_offset + len(data)
            raise ReadFailed("pread", 0, f"the file ends at byte {end}", end)
        self._data[offset_bytes : offset_bytes + nbytes] = data
        with self._backend.memory.lock:
            self._backend.read_bytes += nbytes
        return zlib.crc32(data)

    def read_pieces(self, fd: int, file_offset: int, pieces: Sequence[tuple[int, int]]) -> list[int]:
        crcs = []
        for offset_bytes, nbytes in pieces:
            crcs.append(self.read_file(fd, file_offset, offset_bytes, nbytes))
            file_offset += nbytes
        return crcs

    def copy_from(self, slab: Slab) -> None:
        self._check_open("copied into")
        self._backend.count("copy")
        data = self._backend.sealed_bytes(slab)
        if len(data) != len(self._data):
            raise InvariantError(f"{len(data)} bytes are copied into {len(self._data)}")
        self._data[:] = data

    def seal(self) -> FakeSlab:
        self._check_open("sealed")
        self._backend.count("seal")
        self._leave()
        self._backend.memory.sealed[self._entry.slab_id] = self._data
        return FakeSlab(self._backend, self._entry)

    def close(self) -> None:
        self._check_open("closed")
        self._leave()
        self._backend.memory.give_back(self._entry.slab_id)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._is_open:
            self.close()

    def _check_open(self, verb: str) -> None:
        if not self._is_open:
            raise InvariantError(f"slab {self._entry.slab_id}, sealed or closed, is {verb}")

    def _leave(self) -> None:
        self._is_open = False
        self._backend.live.remove(self)


class FakeBackend:
    """Slabs in a `FakeMemory`; a backend of another process is another instance over the same one."""

    def __init__(self, memory: FakeMemory | None = None) -> None:
        self.memory = memory if memory is not None else FakeMemory()
        self.live: set[FakeSlab | FakeWritableSlab] = set()
        self.calls: Counter[Operation] = Counter()
        self.before_read: Callable[[SlabId], None] | None = None
        self.batch_bytes = 0
        self.read_bytes = 0  # from files
        self.near: list[DeviceId] = []  # what each reading thread stays near
        self._failures: dict[tuple[Operation, int], ChangeoverError] = {}

    @property
    def name(self) -> str:
        return "host"

    @property
    def slab_bytes(self) -> int:
        return 1 << 20

    @property
    def slabs_at_once(self) -> int:
        return 1

    @property
    def readers(self) -> int:
        return 4

    def stay_near(self, device: DeviceId) -> None:
        self.near.append(device)

    @property
    def hashers_per_device(self) -> int:
        return 2

    def fail(self, operation: Operation, error: ChangeoverError, *, nth: int = 1) -> None:
        """Let the `nth` call of `operation` from now on raise `error` and do nothing else."""
        self._failures[operation, self.calls[operation] + nth] = error

    def count(self, operation: Operation) -> None:
        """Note a call, and raise where it was told to fail."""
        with self.memory.lock:
            self.calls[operation] += 1
            error = self._failures.pop((operation, self.calls[operation]), None)
        if error is not None:
            raise error

    def check_no_leaks(self) -> None:
        """Raise InvariantError if a slab is still open; for the end of a test."""
        if self.live:
            ids = sorted(slab.entry.slab_id for slab in self.live)
            raise InvariantError(f"slabs were not closed: {', '.join(ids)}")

    def devices(self) -> tuple[DeviceId, ...]:
        return self.memory.devices

    def free_bytes(self, device: DeviceId) -> int:
        return self.memory.free_bytes(device)

    def usage(self, device: DeviceId) -> DeviceUsage:
        free_bytes = self.free_bytes(device)
        return DeviceUsage(free_bytes, free_bytes, total_bytes=self.memory.capacity_bytes)

    def create_slab(self, device: DeviceId, nbytes: int) -> FakeWritableSlab:
        if nbytes <= 0:
            raise InvariantError(f"a slab cannot have {nbytes} bytes")
        self.free_bytes(device)
        self.count("create")
        return FakeWritableSlab(self, self.memory.take(device, nbytes))

    def import_slab(self, entry: SlabEntry, take_fd: int) -> FakeSlab:
        try:
            self.count("import")
            text = os.pread(take_fd, 256, 0)
        except OSError as error:
            raise ProtocolError(f"the fd cannot be read: {error}") from error
        finally:
            os.close(take_fd)
        if not text.startswith(_FD_MAGIC):
            raise ProtocolError("the fd is not a fake slab")
        slab_id = SlabId(text[len(_FD_MAGIC) :].decode())
        if slab_id not in self.memory.sealed or self.memory.entries[slab_id] != entry:
            raise ProtocolError(f"slab {slab_id} is not {entry}")
        self.memory.share(slab_id)
        return FakeSlab(self, entry)

    def sealed_bytes(self, slab: Slab) -> bytearray:
        slab.borrow_fd()  # raises where it is closed
        return self.memory.sealed[slab.entry.slab_id]


def _check_range(entry: SlabEntry, offset_bytes: int, nbytes: int) -> None:
    if offset_bytes < 0 or nbytes < 0 or offset_bytes + nbytes > entry.nbytes:
        raise InvariantError(
            f"bytes {offset_bytes} + {nbytes} are outside slab {entry.slab_id} of {entry.nbytes} bytes"
        )
