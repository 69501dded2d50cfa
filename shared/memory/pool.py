"""`Pool`: keeps the slabs of a device and a reserve beside them at a constant size together.

A slab is never carved out of the reserve: pieces of it are given up and the slab is allocated as any
other.  So a slab has an allocation, an fd and a size of its own, and memory that was handed to a reader
is never written for another version (docs/adr/0006-gpu-memory-pool.md).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from shared.errors import InvariantError, OutOfMemory

PIECE_BYTES = 64 << 20
"""What the reserve grows and shrinks by, and so the most that rounding leaves out of it."""

Slab = TypeVar("Slab")


class Reserve(Protocol):
    """Memory that is kept from everyone, in equal pieces."""

    @property
    def pieces(self) -> int:
        """How many are held."""
        ...

    def resize(self, pieces: int) -> int:
        """Hold so many, or as many as there is memory for; how many."""
        ...


class Pool:
    """The accounts of one device.  Not thread-safe: its owner lets in one caller at a time."""

    __slots__ = ("_piece_bytes", "_reserve", "pool_bytes")

    def __init__(self, reserve: Reserve, pool_bytes: int, piece_bytes: int = PIECE_BYTES) -> None:
        if piece_bytes <= 0 or pool_bytes < piece_bytes:
            raise InvariantError(f"a pool of {pool_bytes} bytes has no piece of {piece_bytes}")
        self._reserve = reserve
        self._piece_bytes = piece_bytes
        self.pool_bytes = pool_bytes

    @property
    def reserved_bytes(self) -> int:
        """What slabs could take of the reserve."""
        return self._reserve.pieces * self._piece_bytes

    def wanted_bytes(self, used_bytes: int) -> int:
        """What the reserve should hold beside slabs of `used_bytes`: whole pieces, never more than is left
        of the pool."""
        return max(0, self.pool_bytes - used_bytes) // self._piece_bytes * self._piece_bytes

    def keep(self, used_bytes: int) -> int:
        """Bring the reserve to its size beside slabs of `used_bytes`; the bytes that it is short of, because
        others hold them (a reader that still maps what was freed, another process)."""
        wanted = self.wanted_bytes(used_bytes)
        if wanted != self.reserved_bytes:
            self._reserve.resize(wanted // self._piece_bytes)
        return wanted - self.reserved_bytes

    def allocate(self, nbytes: int, create: Callable[[], Slab]) -> Slab:
        """What `create` gives; while that raises OutOfMemory, the pieces that are missing are given up for
        it, and no more.  `keep` is to follow, whatever comes of it."""
        while True:
            try:
                return create()
            except OutOfMemory as error:
                held = self._reserve.pieces
                if held == 0:
                    raise
                missing = nbytes - int(error.facts["free_bytes"])
                # One at least: what is free may be too little for reasons of the driver's own.
                pieces = max(1, -(-missing // self._piece_bytes))
                self._reserve.resize(max(0, held - pieces))
