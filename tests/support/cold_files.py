"""Files whose bytes are not in the page cache."""

from __future__ import annotations

import os
from pathlib import Path


def make_cold(path: Path) -> None:
    """Write a file's pages to the disk and let go of them; on a tmpfs this does nothing."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
