"""`MemoryBackend`: the one interface between the daemons and the memory that holds weights.

The writer (loaderd) creates a slab, fills it, seals it and borrows its fd to send it.  A reader
(inferd, or a restarted loaderd) imports the fd and gets a mapping it cannot write through.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from shared.ids import DeviceId
from shared.layout import SlabEntry
from shared.memory.usage import DeviceUsage

if TYPE_CHECKING:
    import torch


class Slab(Protocol):
    """A readable slab.  Owns its fd and its mapping; closing twice raises InvariantError."""

    @property
    def entry(self) -> SlabEntry:
        """Id, device and size in bytes."""
        ...

    def borrow_fd(self) -> int:
        """The fd to send to a reader; it stays owned by the slab."""
        ...

    def crc32(self, offset_bytes: int, nbytes: int) -> int:
        """IEEE CRC32 (as zlib) of the resident bytes.  Blocking, without the GIL."""
        ...

    def sha256_leaves(self, offset_bytes: int, nbytes: int, leaf_bytes: int) -> bytes:
        """SHA-256 of each leaf of the resident bytes, concatenated: 32 bytes per leaf, the last
        leaf may be short, no leaf for `nbytes == 0`.  Blocking, without the GIL."""
        ...

    @property
    def batch_bytes(self) -> int:
        """How many bytes are best hashed in one call of `sha256_leaves_of` or `digests_of`."""
        ...

    def sha256_leaves_of(
        self, ranges: Sequence[tuple[int, int]], leaf_bytes: int, spread_s: float = 0.0
    ) -> list[bytes]:
        """`sha256_leaves` of each range (offset, bytes), in one go where that is faster; where others would
        wait for the device meanwhile, spread over `spread_s`."""
        ...

    def digests_of(
        self, ranges: Sequence[tuple[int, int]], leaf_bytes: int, spread_s: float = 0.0
    ) -> list[tuple[int, bytes]]:
        """`crc32` and `sha256_leaves` of each range (offset, bytes), from one look at the bytes where that
        is faster; `spread_s` as above."""
        ...

    def tensor(self, offset_bytes: int, dtype: str, shape: Sequence[int]) -> torch.Tensor:
        """A tensor over the resident bytes, no copy, on the slab's device; it keeps the mapping
        alive after `close`.  Reads only: the mapping is not writable.  `dtype` as in TensorEntry."""
        ...

    def close(self) -> None:
        """Give up the fd and this owner's reference to the mapping."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


class WritableSlab(Protocol):
    """A slab being filled by its only writer; `seal` consumes it.  Not sent to anyone."""

    @property
    def entry(self) -> SlabEntry:
        """Id, device and size in bytes."""
        ...

    def read_file(self, fd: int, file_offset: int, offset_bytes: int, nbytes: int) -> int:
        """Read `nbytes` from `fd` at `file_offset` into the slab; return the IEEE CRC32 of the bytes
        as they were read.  What is in the page cache is read from it, the rest past it.  Retries short
        reads and EINTR.  Raises ReadFailed on EIO and, with number 0, where the file ends early;
        OutOfMemory where the slab's pages are only allocated now and cannot be.  Blocking, without the
        GIL; safe to call from several threads for disjoint ranges."""
        ...

    def read_pieces(self, fd: int, file_offset: int, pieces: Sequence[tuple[int, int]]) -> list[int]:
        """Read bytes that follow each other in the file from `file_offset` on into several places of the
        slab (offset, bytes); the CRC32 of each.  As `read_file`."""
        ...

    def copy_from(self, slab: Slab) -> None:
        """Fill all of it from a sealed slab of the same size on any device of the backend, device to device.

        Verifies nothing.  Raises InvariantError where the sizes differ, DriverError where the copy fails.
        Blocking, without the GIL; copies into several slabs run at once."""
        ...

    def seal(self) -> Slab:
        """End writing for good and return the slab for reading."""
        ...

    def close(self) -> None:
        """Free the memory of a slab that was not sealed."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


class MemoryBackend(Protocol):
    """Creates slabs for a writer and imports them for a reader."""

    @property
    def name(self) -> str:
        """`host` or `cuda`; both ends of a handoff must agree on it."""
        ...

    @property
    def slab_bytes(self) -> int:
        """A good size for slabs: large enough that a reader maps few, small enough that the first is verified
        while others are read."""
        ...

    @property
    def slabs_at_once(self) -> int:
        """How many slabs are best filled side by side: more than one where threads that read into one slab
        wait for each other."""
        ...

    @property
    def readers(self) -> int:
        """How many threads read the files of a load: no more than bring anything."""
        ...

    def stay_near(self, device: DeviceId) -> None:
        """Keep the calling thread, for as long as it lives, to the processors that are nearest to `device`,
        where that makes a difference."""
        ...

    @property
    def hashers_per_device(self) -> int:
        """How many threads hash and copy what a load has read: enough to keep up, for more only get in the
        way of those that read."""
        ...

    def devices(self) -> tuple[DeviceId, ...]:
        """Devices this process can use."""
        ...

    def free_bytes(self, device: DeviceId) -> int:
        """Bytes that `create_slab` could still get on `device`."""
        ...

    def usage(self, device: DeviceId) -> DeviceUsage:
        """How the memory of `device` is used now."""
        ...

    def create_slab(self, device: DeviceId, nbytes: int) -> WritableSlab:
        """Allocate a slab with a new id.  Raises OutOfMemory with what was needed and free."""
        ...

    def import_slab(self, entry: SlabEntry, take_fd: int) -> Slab:
        """Map a received slab for reading.  Consumes the fd, on every path.  Raises ProtocolError if
        the fd is not a slab of this backend, is not sealed against writing and resizing, or has
        another size than `entry`; DriverError if mapping fails."""
        ...
