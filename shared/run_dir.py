"""The run directory: socket paths, and the lock that makes a daemon the only one of its name."""

from __future__ import annotations

import fcntl
import os
import shlex
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from shared.accounts import FORBIDDEN, group_text, user_text
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
        """Raise ConfigError, with what to do about it, if the directory is missing or this process may not
        write to it, or a socket path in it would be too long."""
        try:
            status = self.path.stat()
        except (FileNotFoundError, NotADirectoryError) as error:
            raise ConfigError(f"run directory {self.path} does not exist; make it: {self._maker}") from error
        except OSError as error:
            who = user_text(os.geteuid())
            raise ConfigError(
                f"run directory {self.path} cannot be used by {who}: {error.strerror}"
            ) from error
        if not stat.S_ISDIR(status.st_mode):
            raise ConfigError(f"run directory {self.path} is no directory; set run_dir to another")
        longest = self.inferd_health("x" * 32)
        if len(os.fsencode(longest)) > PATH_BYTES:
            raise ConfigError(f"run directory {self.path} is too long for Unix socket paths")
        if os.statvfs(self.path).f_flag & os.ST_RDONLY:
            raise ConfigError(
                f"run directory {self.path} is on a read-only file system; set run_dir to another"
            )
        if not os.access(self.path, os.R_OK | os.W_OK | os.X_OK, effective_ids=True):
            raise ConfigError(
                f"run directory {self.path} cannot be written by {user_text(os.geteuid())}: it belongs to "
                f"{user_text(status.st_uid)} and group {group_text(status.st_gid)}, mode "
                f"{stat.S_IMODE(status.st_mode):04o}; set it right: {self._maker}"
            )

    @property
    def _maker(self) -> str:
        """The command that makes the directory, and gives one that is there its owners and mode."""
        if self.path == DEFAULT_RUN_DIR:
            return "systemd-tmpfiles --create changeover.conf"
        return f"install -d -m 1775 -o changeover -g changeover-inferd {shlex.quote(str(self.path))}"

    @contextmanager
    def only_daemon(self, name: str) -> Iterator[None]:
        """Hold the lock of daemon `name`; raises ResourceError if another process has it, ConfigError as
        `check` does and if the lock's file is another user's.

        Whoever holds it may replace the daemon's socket files: they can only be left-overs.
        """
        self.check()
        fd = _open_lock(self.path / f"{name}.lock", name)
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


def _open_lock(path: Path, name: str) -> int:
    """The lock's file, which the caller owns."""
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        if error.errno in FORBIDDEN and path.exists():
            raise ConfigError(
                f"{_of(path)} and cannot be opened by {user_text(os.geteuid())}: {error.strerror}; "
                f"if no other {name} runs here: rm {shlex.quote(str(path))}"
            ) from error
        kind = ConfigError if error.errno in FORBIDDEN else ResourceError
        raise kind(cannot_make(path, error)) from error


def cannot_make(path: Path, error: OSError) -> str:
    """What is said where the kernel lets this process make no file at `path`."""
    return f"{path} cannot be made by {user_text(os.geteuid())}: {error.strerror}"


def remove_left_over(path: Path) -> None:
    """Remove the socket file that a daemon which has ended left at `path`, if there is one.

    Raises ConfigError if it is another user's, which a sticky directory has only that user remove.
    """
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{_of(path)} and cannot be removed by {user_text(os.geteuid())}: {error.strerror}; "
            f"if no other daemon runs here: rm {shlex.quote(str(path))}"
        ) from error


def _of(path: Path) -> str:
    return f"{path} belongs to {user_text(path.lstat().st_uid)}"


def listen_seqpacket(path: Path, mode: int) -> socket.socket:
    """A listening SEQPACKET socket at `path`, replacing a left-over file.  The caller holds the
    daemon's lock, and owns the socket."""
    remove_left_over(path)
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
