"""A listening AF_UNIX stream socket at a path, claimed from the dead but never from the living."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shared.accounts import FORBIDDEN
from shared.closing import Closing
from shared.errors import ConfigError, DriverError, ResourceError
from shared.fdpass import PeerCredentials
from shared.run_dir import PATH_BYTES, cannot_make, remove_left_over

CLAIM_TIMEOUT_S = 2.0
"""Longest wait for another process that claims a path in the same directory."""

_STREAM = socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK


class UnixListener(Closing):
    """Owns a bound, listening, non-blocking socket and its file.

    A socket file that nobody listens on is replaced.  One that a process listens on, or a file that
    is no socket, raises ResourceError.  Probe, removal and bind happen under a lock of the
    directory, so that of two daemons that start at once exactly one gets the path.
    """

    def __init__(self, path: Path, *, mode: int, backlog: int = 128) -> None:
        """Blocks up to CLAIM_TIMEOUT_S; raises ConfigError where this process may not make the
        file, DriverError where the kernel refuses the socket otherwise."""
        if len(os.fsencode(path)) > PATH_BYTES:
            raise ResourceError(f"{path}: longer than {PATH_BYTES} bytes, the kernel's limit", path=str(path))
        self.path = path
        with _locked_directory(path.parent):
            _remove_stale(path)
            self.socket = socket.socket(socket.AF_UNIX, _STREAM)
            try:
                # The file is created with the socket's own mode, so that it is never wider than asked;
                # chmod then adds what the umask took.
                os.fchmod(self.socket.fileno(), mode)
                self.socket.bind(os.fspath(path))
                path.chmod(mode)
                self.socket.listen(backlog)
                self._identity = _identity(path)
            except OSError as error:
                self.socket.close()
                if error.errno in FORBIDDEN:
                    raise ConfigError(cannot_make(path, error)) from error
                raise DriverError(f"bind({path})", error.errno or 0, error.strerror or str(error)) from error

    def close(self) -> None:
        """Close the socket and remove the file, unless another process has replaced it."""
        self.socket.close()
        with _locked_directory(self.path.parent):
            try:
                if _identity(self.path) == self._identity:
                    self.path.unlink()
            except FileNotFoundError:
                pass


def _identity(path: Path) -> tuple[int, int]:
    status = path.lstat()
    return status.st_dev, status.st_ino


@contextmanager
def _locked_directory(directory: Path) -> Iterator[None]:
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise ResourceError(f"{directory}: {error.strerror}", path=str(directory)) from error
    try:
        deadline_s = time.monotonic() + CLAIM_TIMEOUT_S
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                # Bounded: whoever may read the directory could hold its lock for ever.
                if time.monotonic() > deadline_s:
                    raise ResourceError(
                        f"{directory}: locked by another process for {CLAIM_TIMEOUT_S} s",
                        path=str(directory),
                    ) from None
                time.sleep(0.01)
        yield
    finally:
        os.close(fd)  # ends the lock


def _remove_stale(path: Path) -> None:
    try:
        status = path.lstat()
    except FileNotFoundError:
        return
    except OSError as error:
        raise ResourceError(f"{path}: {error.strerror}", path=str(path)) from error
    if not stat.S_ISSOCK(status.st_mode):
        raise ResourceError(f"{path}: exists and is no socket; it is not removed", path=str(path))
    with socket.socket(socket.AF_UNIX, _STREAM) as probe:
        number = probe.connect_ex(os.fspath(path))
        if number == errno.ECONNREFUSED:
            remove_left_over(path)
            return
        if number == errno.ENOENT:
            return
        owner = f"pid {PeerCredentials.of(probe).pid}" if number == 0 else os.strerror(number)
    # A full backlog (EAGAIN), another kind of socket (EPROTOTYPE) and no permission (EACCES) are not
    # signs of death.
    raise ResourceError(f"{path}: another process listens there ({owner})", path=str(path), owner=owner)
