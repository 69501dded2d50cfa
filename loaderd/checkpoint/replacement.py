"""Writing a file of a folder in one step: whoever reads it meets the old one, the new one or none."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from loaderd.checkpoint.names import SEAL_FILE, SIGNATURE_FILE
from shared.accounts import FORBIDDEN
from shared.errors import CheckpointError, DriverError

_TEMPORARY = re.compile(rf"\.({re.escape(SEAL_FILE)}|{re.escape(SIGNATURE_FILE)})\.[0-9a-f]{{16}}")


def is_temporary(name: str) -> bool:
    """Whether `replace_file` gives such names to a seal or a signature that is not finished."""
    return _TEMPORARY.fullmatch(name) is not None


def check_writable(folder_fd: int, name: str) -> None:
    """Raise what `replace_file` would before it writes anything.  Blocking.

    Only making a file tells: modes, ACLs, mounts and quotas all have a say.
    """
    with _translated(name):
        temporary, fd = _create(folder_fd, name)
        os.close(fd)
        with suppress(FileNotFoundError):  # another seal took it for what a killed one left
            os.unlink(temporary, dir_fd=folder_fd)


def replace_file(folder_fd: int, name: str, data: bytes) -> None:
    """Give `name` in the folder this content, on the disk before it has the name.  Blocking.

    `folder_fd` may be O_PATH and stays the caller's.  Raises CheckpointError where the caller may not
    write, else DriverError; then what was there before is there still.
    """
    with _translated(name):
        temporary, fd = _create(folder_fd, name)
        try:
            try:
                _lock(fd)  # until it is closed: tells `remove_temporaries` that the writer lives
                view = memoryview(data)
                while view:
                    view = view[os.write(fd, view) :]
                os.fsync(fd)
                os.rename(temporary, name, src_dir_fd=folder_fd, dst_dir_fd=folder_fd)
            finally:
                os.close(fd)
        except BaseException:
            os.unlink(temporary, dir_fd=folder_fd)
            raise
        directory = _open_to_list(folder_fd)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def _create(folder_fd: int, name: str) -> tuple[str, int]:
    """A new file to be renamed to `name`, and its fd, which the caller owns."""
    temporary = f".{name}.{secrets.token_hex(8)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return temporary, os.open(temporary, flags, 0o644, dir_fd=folder_fd)


@contextmanager
def _translated(name: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in FORBIDDEN:
            raise CheckpointError(
                f"cannot be written: {error.strerror}; sealing needs the right to create files in the folder",
                file=name,
            ) from error
        raise DriverError("write", error.errno or 0, f"{name}: {error.strerror}") from error


def remove_temporaries(folder_fd: int) -> None:
    """Remove the unfinished seals and signatures that killed processes left in the folder.  Blocking.

    Raises CheckpointError for one that a living process writes, DriverError for one that cannot be removed.
    """
    directory = _open_to_list(folder_fd)
    try:
        for name in filter(is_temporary, sorted(os.listdir(directory))):  # noqa: PTH208 - by fd
            _remove(directory, name)
    finally:
        os.close(directory)


def _remove(folder_fd: int, name: str) -> None:
    try:
        # For writing, which a lock over NFS takes.
        fd = os.open(name, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder_fd)
        try:
            if not _lock(fd):
                raise CheckpointError(
                    "is being written: another seal of this folder runs; try again when it has ended",
                    file=name,
                )
            os.unlink(name, dir_fd=folder_fd)
        finally:
            os.close(fd)
    except FileNotFoundError:
        return  # its writer has just ended
    except OSError as error:
        raise DriverError(
            "unlink", error.errno or 0, f"{name}, which a seal that was killed left: {error.strerror}"
        ) from error


def _lock(fd: int) -> bool:
    """Whether nobody else has the file locked.  Where the file system has no locks nobody can."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return not isinstance(error, BlockingIOError)
    return True


def _open_to_list(folder_fd: int) -> int:
    """The folder, which may be O_PATH, open for reading; the caller owns the fd."""
    return os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder_fd)
