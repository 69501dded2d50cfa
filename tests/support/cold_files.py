"""Files whose bytes are not in the page cache."""

from __future__ import annotations

import os
import tempfile
from functools import cache
from pathlib import Path

from shared.errors import ReadFailed
from shared.ids import HOST_DEVICE
from shared.memory.host import HostBackend


def make_cold(path: Path) -> None:
    """Write a file's pages to the disk and let go of them; on a tmpfs this does nothing."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


@cache
def warm_up_cold_reads() -> None:
    """Let this thread's reader make now what it makes for its first cold read and keeps."""
    with tempfile.TemporaryFile() as file, HostBackend().create_slab(HOST_DEVICE, 1) as slab:
        try:
            slab.read_file(file.fileno(), 0, 0, 1)
        except ReadFailed:
            return
    raise AssertionError("an empty file was read")
