"""The run directory: socket paths, and the lock that makes a daemon the only one of its name."""

from __future__ import annotations

import fcntl
import os
import shlex
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from shared.errors import ConfigError, ResourceError

DEFAULT_RUN_DIR = Path("/run/changeover")
RUN_DIR_VARIABLE = "CHANGEOVER_RUN_DIR"

PATH_BYTES = 107
"""Longest path of a Unix socket: sizeof(sun_path) less the terminating zero, unix(7)."""


@dataclass(frozen=True, slots=True)
class RunDir:
    """Paths of all sockets below one run directory (see the protocol page)."""

    path: Path

    @property
    def control(self) -> Path:
        return self.path / "control.sock"

    @property
    def events(self) -> Path:
        return self.path / "events.sock"

    @property
    def handoff(self) -> Path:
        return self.path / "handoff.sock"

    @property
    def loaderd_health(self) -> Path:
        return self.path / "loaderd.health.sock"

    def inferd_health(self, name: str) -> Path:
        return self.path / f"inferd-{name}.health.sock"

    def check(self) -> None:
        """Raise ConfigError if the directory is missing or a socket path in it would be too long."""
        if not self.path.is_dir():
            made_by = (
                "systemd-tmpfiles --create changeover.conf"
                if self.path == DEFAULT_RUN_DIR
                else f"install -d -m 1775 -o changeover -g changeover-inferd {shlex.quote(str(self.path))}"
            )
            raise ConfigError(f"run directory {self.path} does not exist; make it: {made_by}")
        longest = self.inferd_health("x" * 32)
        if len(os.fsencode(longest)) > PATH_BYTES:
            raise ConfigError(f"run directory {self.path} is too long for Unix socket paths")

    @contextmanager
    def only_daemon(self, name: str) -> Iterator[None]:
        """Hold the lock of daemon `name`; raises ResourceError if another process has it.

        Whoever holds it may replace the daemon's socket files: they can only be left-overs.
        """
        self.check()
        fd = os.open(self.path / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                holder = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
                raise ResourceError(f"another {name} (pid {holder}) runs in {self.path}") from error
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
            yield
        finally:
            os.close(fd)


def listen_seqpacket(path: Path, mode: int) -> socket.socket:
    """A listening SEQPACKET socket at `path`, replacing a left-over file.  The caller holds the
    daemon's lock, and owns the socket."""
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        listener.setblocking(False)
        listener.bind(str(path))
        path.chmod(mode)
        listener.listen(64)
    except BaseException:
        listener.close()
        raise
    return listener
