"""The page cache of files: how much of them it holds, filling it, and emptying it."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

_PAGE_BYTES = mmap.PAGESIZE
_PART_BYTES = 64 << 20

WARM = 0.99
"""From this share on, files count as cached."""

COLD = 0.01
"""Up to this share, files count as not cached."""


@dataclass(frozen=True, slots=True)
class Residency:
    """How much of some files the page cache holds."""

    cached_bytes: int
    nbytes: int

    @property
    def share(self) -> float:
        """Of 1; files without bytes are cached."""
        return self.cached_bytes / self.nbytes if self.nbytes else 1.0

    @property
    def is_warm(self) -> bool:
        """Whether a read would come from memory."""
        return self.share >= WARM

    @property
    def is_cold(self) -> bool:
        """Whether a read would come from the disk."""
        return self.share <= COLD


def is_proven_cold(when_filled: Sequence[Residency], when_emptied: Sequence[Residency]) -> bool:
    """Whether the files were cold for sure, every time: where the kernel tells what it caches, it must have
    said that they were cached once.  One that always says no proves nothing."""
    return (
        bool(when_filled)
        and all(each.is_warm for each in when_filled)
        and all(each.is_cold for each in when_emptied)
    )


def residency(paths: Iterable[Path]) -> Residency:
    """What mincore(2) says; it tells the owner of a file, or one who may write it."""
    libc = ctypes.CDLL(None, use_errno=True)
    cached = total = 0
    for path in paths:
        nbytes = path.stat().st_size
        total += nbytes
        if nbytes == 0:
            continue
        with path.open("rb") as file, mmap.mmap(file.fileno(), nbytes, prot=mmap.PROT_READ) as mapped:
            view = np.frombuffer(mapped, dtype=np.uint8)
            pages = np.zeros(-(-nbytes // _PAGE_BYTES), dtype=np.uint8)
            failed = libc.mincore(
                ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(nbytes), ctypes.c_void_p(pages.ctypes.data)
            )
            del view  # or the mapping cannot be closed
            if failed:
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number), str(path))
        cached += min(nbytes, int(np.count_nonzero(pages & 1)) * _PAGE_BYTES)
    return Residency(cached, total)


def fill(paths: Sequence[Path]) -> Residency:
    """Read what is not cached; what is cached then."""

    def read(path: Path) -> None:
        buffer = bytearray(_PART_BYTES)
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass

    found = residency(paths)
    if found.is_warm:
        return found
    with ThreadPoolExecutor(len(paths)) as pool:
        for _ in pool.map(read, paths):
            pass
    return residency(paths)


def empty(paths: Sequence[Path]) -> Residency:
    """Write back and drop the files' pages; what is cached then.  Pages that someone maps stay."""
    for path in paths:
        with path.open("rb+") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return residency(paths)
