"""A device's memory in numbers, stricter than a driver: what is given up must have been taken, and the
reserve of a pool is all or nothing per piece."""

from __future__ import annotations

from dataclasses import dataclass, field

from shared.errors import OutOfMemory


@dataclass(slots=True)
class FakeDevice:
    """`capacity` bytes, taken by owners of any kind."""

    capacity: int
    taken: int = 0

    @property
    def free(self) -> int:
        return self.capacity - self.taken

    def take(self, nbytes: int) -> None:
        if nbytes > self.free:
            raise OutOfMemory(what="a fake device", needed_bytes=nbytes, free_bytes=self.free)
        self.taken += nbytes

    def give(self, nbytes: int) -> None:
        assert 0 <= nbytes <= self.taken, "more is given up than was taken"
        self.taken -= nbytes


@dataclass(slots=True)
class FakeReserve:
    """`pool.Reserve` on a fake device."""

    device: FakeDevice
    piece_bytes: int
    pieces: int = 0
    resizes: list[int] = field(default_factory=list)

    def resize(self, pieces: int) -> int:
        assert pieces >= 0
        self.resizes.append(pieces)
        while self.pieces > pieces:
            self.device.give(self.piece_bytes)
            self.pieces -= 1
        while self.pieces < pieces and self.device.free >= self.piece_bytes:
            self.device.take(self.piece_bytes)
            self.pieces += 1
        return self.pieces
