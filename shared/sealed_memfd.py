"""Immutable bytes behind an fd: how tables larger than a frame travel between the daemons."""

from __future__ import annotations

import fcntl
import os

from shared.errors import DriverError, ProtocolError

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


def sealed_memfd(data: bytes, name: str) -> int:
    """A new memfd that holds `data` and that nobody can change or resize; the caller owns the fd.

    Raises DriverError with the call that failed.
    """
    try:
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise DriverError("memfd_create", error.errno or 0, error.strerror or "") from error
    is_complete = False
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        is_complete = True
    except OSError as error:
        raise DriverError("write to a memfd", error.errno or 0, error.strerror or "") from error
    finally:
        if not is_complete:
            os.close(fd)
    return fd


def read_sealed_memfd(take_fd: int, limit_bytes: int) -> bytes:
    """All bytes of a received sealed memfd; consumes the fd, on every path.

    Raises ProtocolError, before anything is allocated, if the fd is no memfd, lacks a seal, or
    holds more than `limit_bytes`.
    """
    try:
        try:
            seals = fcntl.fcntl(take_fd, fcntl.F_GET_SEALS)
        except OSError as error:
            raise ProtocolError(f"received fd is not a memfd: {error.strerror}") from error
        if seals & _SEALS != _SEALS:
            raise ProtocolError(f"received memfd has seals {seals:#x}, needs {_SEALS:#x}")
        size = os.fstat(take_fd).st_size
        if size > limit_bytes:
            raise ProtocolError(f"received memfd holds {size} bytes, at most {limit_bytes} are allowed")
        # The seals promise that the size and the bytes can no longer change.
        return _read_exactly(take_fd, size)
    finally:
        os.close(take_fd)


def _read_exactly(fd: int, size: int) -> bytes:
    data = bytearray(size)
    view = memoryview(data)
    done = 0
    while done < size:
        try:
            count = os.preadv(fd, [view[done:]], done)
        except OSError as error:
            raise DriverError("preadv", error.errno or 0, error.strerror or "") from error
        if count == 0:
            raise ProtocolError(f"received memfd ends at {done}, expected {size} bytes")
        done += count
    view.release()
    return bytes(data)
