"""What the slabs of every native backend do alike: check ranges, hand on to the extension, close once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from shared.digest import SHA256_BYTES
from shared.errors import InvalidRequest, InvariantError
from shared.layout import SlabEntry
from shared.memory.native_owner import Closable, Native, NativeOwner
from shared.memory.ranges import check_range
from shared.tensor_size import tensor_nbytes

if TYPE_CHECKING:
    import torch


class _Readable(Closable, Protocol):
    def borrow_fd(self) -> int: ...

    def crc32(self, offset_bytes: int, nbytes: int) -> int: ...

    def sha256_leaves_of(self, ranges: list[tuple[int, int]], leaf_bytes: int, spread_ns: int) -> bytes: ...

    def digests_of(
        self, ranges: list[tuple[int, int]], leaf_bytes: int, spread_ns: int
    ) -> tuple[list[int], bytes]: ...

    def view(self, offset_bytes: int, nbytes: int) -> Any: ...


class _Writable(Closable, Protocol):
    def read_file(self, borrow_fd: int, file_offset: int, offset_bytes: int, nbytes: int) -> int: ...

    def read_pieces(self, borrow_fd: int, file_offset: int, pieces: list[tuple[int, int]]) -> list[int]: ...


Readable = TypeVar("Readable", bound=_Readable)
Writable = TypeVar("Writable", bound=_Writable)


class SlabOwner(NativeOwner[Native]):
    """Owns one native slab, and knows what it is."""

    __slots__ = ("_entry",)

    def __init__(self, entry: SlabEntry, take_native: Native) -> None:
        super().__init__(take_native)
        self._entry = entry

    @property
    def entry(self) -> SlabEntry:
        return self._entry


class ReadableSlab(SlabOwner[Readable]):
    """The common part of `backend.Slab`."""

    __slots__ = ()

    def borrow_fd(self) -> int:
        return self._native.borrow_fd()

    def crc32(self, offset_bytes: int, nbytes: int) -> int:
        check_range(self._entry, offset_bytes, nbytes)
        return self._native.crc32(offset_bytes, nbytes)

    def sha256_leaves(self, offset_bytes: int, nbytes: int, leaf_bytes: int) -> bytes:
        return self.sha256_leaves_of([(offset_bytes, nbytes)], leaf_bytes)[0]

    def sha256_leaves_of(
        self, ranges: Sequence[tuple[int, int]], leaf_bytes: int, spread_s: float = 0.0
    ) -> list[bytes]:
        self._check_ranges(ranges, leaf_bytes)
        leaves = self._native.sha256_leaves_of(list(ranges), leaf_bytes, round(spread_s * 1e9))
        return _cut(leaves, ranges, leaf_bytes)

    def digests_of(
        self, ranges: Sequence[tuple[int, int]], leaf_bytes: int, spread_s: float = 0.0
    ) -> list[tuple[int, bytes]]:
        self._check_ranges(ranges, leaf_bytes)
        crcs, leaves = self._native.digests_of(list(ranges), leaf_bytes, round(spread_s * 1e9))
        return list(zip(crcs, _cut(leaves, ranges, leaf_bytes), strict=True))

    def tensor(self, offset_bytes: int, dtype: str, shape: Sequence[int]) -> torch.Tensor:
        # Here, not above: loaderd moves weights and never looks at them, so it needs no torch.
        from torch.utils.dlpack import from_dlpack

        from shared.memory.typed_view import typed_view

        try:
            nbytes = tensor_nbytes(dtype, shape)
        except ValueError as error:
            raise InvalidRequest(str(error), dtype=dtype) from error
        check_range(self._entry, offset_bytes, nbytes)
        return typed_view(from_dlpack(self._native.view(offset_bytes, nbytes)), dtype, shape)

    def _check_ranges(self, ranges: Sequence[tuple[int, int]], leaf_bytes: int) -> None:
        if leaf_bytes <= 0:
            raise InvariantError(f"a leaf cannot have {leaf_bytes} bytes")
        for offset_bytes, nbytes in ranges:
            check_range(self._entry, offset_bytes, nbytes)


class FillableSlab(SlabOwner[Writable]):
    """The common part of `backend.WritableSlab`."""

    __slots__ = ()

    def read_file(self, fd: int, file_offset: int, offset_bytes: int, nbytes: int) -> int:
        """A copy to a device may be under way when it returns; `seal` waits for it."""
        self._check_read(file_offset, [(offset_bytes, nbytes)])
        return self._native.read_file(fd, file_offset, offset_bytes, nbytes)

    def read_pieces(self, fd: int, file_offset: int, pieces: Sequence[tuple[int, int]]) -> list[int]:
        """As `read_file`."""
        self._check_read(file_offset, pieces)
        return self._native.read_pieces(fd, file_offset, list(pieces))

    def _check_read(self, file_offset: int, pieces: Sequence[tuple[int, int]]) -> None:
        if file_offset < 0:
            raise InvariantError(f"a file has no byte {file_offset}")
        for offset_bytes, nbytes in pieces:
            check_range(self._entry, offset_bytes, nbytes)


def _cut(leaves: bytes, ranges: Sequence[tuple[int, int]], leaf_bytes: int) -> list[bytes]:
    """The leaves of each range, of those of all ranges in a row."""
    joined = memoryview(leaves)
    cut = []
    at = 0
    for _, nbytes in ranges:
        size = -(-nbytes // leaf_bytes) * SHA256_BYTES
        cut.append(bytes(joined[at : at + size]))
        at += size
    return cut
