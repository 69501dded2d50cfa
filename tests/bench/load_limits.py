"""What the machine can do at most: copies into the memory that serves, and reads of files."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import torch

from tests.bench.load_report import COPY, DIRECT, PLAIN_COPY, PREAD

_CALL_BYTES = 16 << 20
"""What one call of preadv reads at least, into two buffers in turn: so much that Python's part of it does
not count."""

_ALIGNMENT_BYTES = 1 << 20
"""Of direct reads; what is left at the end of a file is not read."""


@dataclass(frozen=True, slots=True)
class Limit:
    """One way to move bytes, measured several times."""

    what: str
    nbytes: int
    seconds: tuple[float, ...]
    shape: dict[str, int] = field(default_factory=dict)


def copy_limit(device: str, cores: int, repeats: int) -> Limit:
    """Pinned memory to the GPU, or plain memory to plain memory with all cores."""
    if device == "cuda":
        nbytes = 2 << 30
        host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        there = torch.empty(nbytes, dtype=torch.uint8, device="cuda")

        def to_gpu() -> None:
            there.copy_(host, non_blocking=True)
            torch.cuda.synchronize()

        return Limit(COPY, nbytes, _samples(repeats, to_gpu))
    part = (512 << 20) // cores
    pairs = [(torch.ones(part, dtype=torch.uint8), torch.ones(part, dtype=torch.uint8)) for _ in range(cores)]
    torch.set_num_threads(1)
    with ThreadPoolExecutor(cores) as pool:

        def copy() -> None:
            for _ in pool.map(lambda pair: pair[0].copy_(pair[1]), pairs):
                pass

        return Limit(PLAIN_COPY, part * cores, _samples(repeats, copy))


def pread_limits(paths: Sequence[Path], device: str, cores: int, repeats: int) -> Iterator[Limit]:
    """Reads of the whole files by all cores into buffers that are used again and again.

    Into pinned ones for a GPU, as a loader may copy on from there: small ones stay in the cores' caches,
    large ones do not.  Where the bytes are to stay in host memory only what leaves the caches counts.
    """
    sizes = (512 << 10, 2 << 20, 8 << 20) if device == "cuda" else (32 << 20,)
    for threads, slot_bytes in product((cores, 2 * cores), sizes):
        shape = {"threads": threads, "slot_bytes": slot_bytes}
        slots = torch.empty(threads * 2 * slot_bytes, dtype=torch.uint8, pin_memory=device == "cuda")
        views = slots.numpy().data
        with _Reading(paths, os.O_RDONLY) as reading, ThreadPoolExecutor(threads) as pool:

            def read(
                threads: int = threads,
                slot_bytes: int = slot_bytes,
                views: memoryview = views,
                reading: _Reading = reading,
                pool: ThreadPoolExecutor = pool,
            ) -> None:
                def work(thread: int) -> None:
                    at = thread * 2 * slot_bytes
                    pair = [views[at : at + slot_bytes], views[at + slot_bytes : at + 2 * slot_bytes]]
                    reading.read(thread, threads, pair * -(-_CALL_BYTES // (2 * slot_bytes)))

                for _ in pool.map(work, range(threads)):
                    pass

            yield Limit(PREAD, reading.nbytes, _samples(repeats, read), shape)


def direct_limit(paths: Sequence[Path], shape: dict[str, int], limit_bytes: int | None = None) -> Limit:
    """One pass of reads past the page cache, over the whole files or what comes first in each."""
    threads, slot_bytes = shape["threads"], shape["slot_bytes"]
    with (
        _Reading(paths, os.O_RDONLY | os.O_DIRECT, limit_bytes) as reading,
        mmap.mmap(-1, threads * slot_bytes) as memory,
        ThreadPoolExecutor(threads) as pool,
        memoryview(memory) as view,
    ):
        slots = [view[at : at + slot_bytes] for at in range(0, threads * slot_bytes, slot_bytes)]
        start = time.perf_counter()
        for _ in pool.map(lambda thread: reading.read(thread, threads, [slots[thread]]), range(threads)):
            pass
        seconds = time.perf_counter() - start
        for slot in slots:
            slot.release()
        return Limit(DIRECT, reading.nbytes, (seconds,), shape)


def best_direct_shape(paths: Sequence[Path], cores: int, sample_bytes: int) -> dict[str, int]:
    """How many threads, reading how much at a time, get most of the disk, by reads of a part."""
    shapes = [
        {"threads": threads, "slot_bytes": slot_bytes}
        for threads, slot_bytes in product((4, max(4, cores), max(8, 2 * cores)), (1 << 20, 4 << 20))
    ]
    return max(shapes, key=lambda shape: _rate(direct_limit(paths, shape, sample_bytes)))


def _rate(limit: Limit) -> float:
    return limit.nbytes / min(limit.seconds)


def _samples(repeats: int, work: Callable[[], object]) -> tuple[float, ...]:
    """Durations after one run that does not count."""
    work()
    samples = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        samples.append(time.perf_counter() - start)
    return tuple(samples)


class _Reading:
    """Open files, and their bytes shared out to threads."""

    def __init__(self, paths: Sequence[Path], flags: int, limit_bytes: int | None = None) -> None:
        self._fds: list[int] = []
        self._sizes: list[int] = []
        self._is_direct = bool(flags & os.O_DIRECT)
        for path in paths:
            self._fds.append(os.open(path, flags))
            size = os.fstat(self._fds[-1]).st_size
            if limit_bytes is not None:
                size = min(size, limit_bytes // len(paths))
            self._sizes.append(size // _ALIGNMENT_BYTES * _ALIGNMENT_BYTES if self._is_direct else size)

    @property
    def nbytes(self) -> int:
        """What all threads together read."""
        return sum(self._sizes)

    def read(self, thread: int, threads: int, buffers: list[memoryview]) -> None:
        """The thread's share: every `threads`th part of each file, a part being all buffers full."""
        part = sum(len(buffer) for buffer in buffers)
        for fd, size in zip(self._fds, self._sizes, strict=True):
            for at in range(thread * part, size, threads * part):
                wanted = min(part, size - at)
                got = os.preadv(fd, buffers, at)
                # At a file's end there may be more than is to be read; elsewhere less is a short read, which
                # the kernel gives for no file of a local disk.
                if got < wanted:
                    raise OSError(0, f"read {got} of {wanted} bytes at {at}")

    def __enter__(self) -> _Reading:
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self._fds:
            os.close(fd)
