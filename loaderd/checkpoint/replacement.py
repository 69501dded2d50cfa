"""Writing a file of a folder in one step: whoever reads it meets the old one, the new one or none."""

from __future__ import annotations

import os
import secrets

from shared.errors import DriverError


def replace_file(folder_fd: int, name: str, data: bytes) -> None:
    """Give `name` in the folder this content, on the disk before it has the name.  Blocking.

    `folder_fd` may be O_PATH and stays the caller's.  Raises DriverError; then what was there before
    is there still.
    """
    temporary = f".{name}.{secrets.token_hex(8)}"
    try:
        fd = os.open(
            temporary,
            os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC,
            0o644,
            dir_fd=folder_fd,
        )
        try:
            try:
                view = memoryview(data)
                while view:
                    view = view[os.write(fd, view) :]
                os.fsync(fd)
            finally:
                os.close(fd)
            os.rename(temporary, name, src_dir_fd=folder_fd, dst_dir_fd=folder_fd)
        except BaseException:
            os.unlink(temporary, dir_fd=folder_fd)
            raise
        directory = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder_fd)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    except OSError as error:
        raise DriverError("write", error.errno or 0, f"{name}: {error.strerror}") from error
