"""One file of a checkpoint, read with pread and never mapped, and what shows that it changed."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Self

from loaderd.checkpoint.folder import Folder
from loaderd.checkpoint.names import SEAL_FILE, SIGNATURE_FILE
from shared.closing import Closing
from shared.errors import CheckpointError, DriverError, InvariantError

_AGAIN = "try again when nothing writes to the folder"


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """What stat says about a file's content; equal before and after means nobody wrote to it."""

    device: int
    inode: int
    nbytes: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, fd: int) -> Self:
        """The identity now."""
        info = os.fstat(fd)
        return cls(info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns)

    def difference(self, other: Self) -> str:
        """How a file that had this identity and has the other now has changed, in words."""
        if self.nbytes != other.nbytes:
            return f"it had {self.nbytes} bytes and has {other.nbytes}"
        if (self.device, self.inode) != (other.device, other.inode):
            return "another file has its name"
        if self.mtime_ns != other.mtime_ns:
            return "it was written to"
        return "it was written to, or its name, owner or mode changed"

    def verify_name(self, folder: Folder, name: str) -> None:
        """Raise CheckpointError if `name` in `folder` now means a file with another identity."""
        fd = folder.open_file(name)
        try:
            now = FileIdentity.of(fd)
        finally:
            os.close(fd)
        if now == self:
            return
        if name in (SEAL_FILE, SIGNATURE_FILE):
            reason = "was replaced while the folder was read: the folder is being sealed or copied over"
            raise CheckpointError(f"{reason}; {_AGAIN}", file=name)
        raise CheckpointError(f"was replaced while it was read: {self.difference(now)}; {_AGAIN}", file=name)


class SourceFile(Closing):
    """A regular file open for reading.  Owns its fd."""

    def __init__(self, name: str, take_fd: int) -> None:
        self.name = name
        self._fd = take_fd
        self.identity = FileIdentity.of(take_fd)

    @classmethod
    def open(cls, folder: Folder, name: str) -> Self:
        """Open a file of a folder; raises CheckpointError as `Folder.open_file` does."""
        return cls(name, folder.open_file(name))

    @property
    def nbytes(self) -> int:
        """Size when the file was opened."""
        return self.identity.nbytes

    def borrow_fd(self) -> int:
        """The fd; it stays owned by this object."""
        if self._fd < 0:
            raise InvariantError(f"file {self.name!r} is closed")
        return self._fd

    def read(self, offset: int, nbytes: int) -> bytes:
        """Exactly `nbytes` at `offset`, or fewer at the end of the file.  Raises DriverError.  Blocking."""
        parts: list[bytes] = []
        while nbytes > 0:
            try:
                part = os.pread(self.borrow_fd(), nbytes, offset)
            except OSError as error:
                raise DriverError(
                    "pread", error.errno or 0, f"{self.name} at {offset}: {error.strerror}"
                ) from error
            if not part:
                break
            parts.append(part)
            offset += len(part)
            nbytes -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def read_all(self, limit_bytes: int) -> bytes:
        """The whole file; raises CheckpointError if it exceeds the limit or changes meanwhile.  Blocking."""
        if self.nbytes > limit_bytes:
            raise CheckpointError(f"has {self.nbytes} bytes, {limit_bytes} are allowed", file=self.name)
        data = self.read(0, self.nbytes)
        if len(data) != self.nbytes or FileIdentity.of(self.borrow_fd()) != self.identity:
            raise CheckpointError(f"changed while it was read; {_AGAIN}", file=self.name, byte=len(data))
        return data

    def verify_unchanged(self) -> None:
        """Raise CheckpointError if the file was written or resized since it was opened."""
        now = FileIdentity.of(self.borrow_fd())
        if now != self.identity:
            raise CheckpointError(
                f"changed while it was read: {self.identity.difference(now)}; {_AGAIN}", file=self.name
            )

    def close(self) -> None:
        """Close the fd; closing again does nothing."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)
