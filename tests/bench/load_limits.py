"""What the machine can do at most: copies into the memory that serves, and reads of files."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from threading import Barrier

import torch

from tests.bench.load_report import COPY, DIRECT, PLAIN_COPY, PREAD

_CALL_BYTES = 16 << 20
"""What one call of preadv reads at least, into two buffers in turn: so much that Python's part of it does
not count."""

_ALIGNMENT_BYTES = 4096
"""Of direct reads; what is left at the end of a file is not read."""


@dataclass(frozen=True, slots=True)
class Limit:
    """One way to move bytes, measured several times."""

    what: str
    nbytes: int
    seconds: tuple[float, ...]
    shape: dict[str, int] = field(default_factory=dict)

    @property
    def gb_s(self) -> float:
        """Of all passes together."""
        return self.nbytes * len(self.seconds) / sum(self.seconds) / 1e9


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


def direct_limit(paths: Sequence[Path], shape: Mapping[str, int], part: tuple[int, int] = (0, 1)) -> Limit:
    """One pass of reads past the page cache, each thread with one read under way, over `part` of each file
    (number and count).

    The time is that of the reads alone: threads and memory are there before, in huge pages where the kernel
    has them."""
    threads, slot_bytes = shape["threads"], shape["slot_bytes"]
    with (
        _Reading(paths, os.O_RDONLY | os.O_DIRECT, part) as reading,
        mmap.mmap(-1, threads * slot_bytes) as memory,
        ThreadPoolExecutor(threads) as pool,
        memoryview(memory) as view,
    ):
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
        for at in range(0, len(view), mmap.PAGESIZE):
            view[at] = 1
        all_there = Barrier(threads)
        for _ in pool.map(lambda _: all_there.wait(), range(threads)):
            pass
        slots = [view[at : at + slot_bytes] for at in range(0, threads * slot_bytes, slot_bytes)]
        start = time.perf_counter()
        for _ in pool.map(lambda thread: reading.read(thread, threads, [slots[thread]]), range(threads)):
            pass
        seconds = time.perf_counter() - start
        for slot in slots:
            slot.release()
        return Limit(DIRECT, reading.nbytes, (seconds,), dict(shape))


def direct_shapes(paths: Sequence[Path], cores: int) -> list[Limit]:
    """Direct reads with some numbers of threads and sizes, each measured twice.

    All together read every byte of the files once, so that none finds in a cache below this machine what
    another brought there.  The second time they come in reverse: what drifts evenly drifts for all."""
    shapes = [
        {"threads": threads, "slot_bytes": slot_bytes}
        for threads, slot_bytes in product(sorted({4, 16, 64, 2 * cores}), (1 << 20, 4 << 20))
    ]
    order = [*shapes, *reversed(shapes)]
    passes = [direct_limit(paths, shape, (number, len(order))) for number, shape in enumerate(order)]
    return [
        # Parts differ by less than a block; the second counts as if it were as large as the first.
        replace(one, seconds=(*one.seconds, other.seconds[0] * one.nbytes / other.nbytes))
        for one, other in zip(passes, reversed(passes[len(shapes) :]), strict=False)
    ]


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

    def __init__(self, paths: Sequence[Path], flags: int, part: tuple[int, int] = (0, 1)) -> None:
        """Of each file only the part of this number, of so many; direct reads leave out the end."""
        self._fds: list[int] = []
        self._ranges: list[range] = []
        number, count = part
        unit = _ALIGNMENT_BYTES if flags & os.O_DIRECT else 1
        for path in paths:
            self._fds.append(os.open(path, flags))
            units = os.fstat(self._fds[-1]).st_size // unit
            self._ranges.append(range(units * number // count * unit, units * (number + 1) // count * unit))

    @property
    def nbytes(self) -> int:
        """What all threads together read."""
        return sum(map(len, self._ranges))

    def read(self, thread: int, threads: int, buffers: list[memoryview]) -> None:
        """The thread's share: every `threads`th part of each file, a part being all buffers full."""
        part = sum(len(buffer) for buffer in buffers)
        for fd, there in zip(self._fds, self._ranges, strict=True):
            for at in there[thread * part :: threads * part]:
                wanted = min(part, there.stop - at)
                got = os.preadv(fd, buffers if wanted == part else _first(buffers, wanted), at)
                # The kernel reads less for no file of a local disk.
                if got < wanted:
                    raise OSError(0, f"read {got} of {wanted} bytes at {at}")

    def __enter__(self) -> _Reading:
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self._fds:
            os.close(fd)


def _first(buffers: list[memoryview], nbytes: int) -> list[memoryview]:
    """So much of the buffers, from the first on."""
    first = []
    for buffer in buffers:
        first.append(buffer[:nbytes])
        nbytes -= len(first[-1])
        if nbytes == 0:
            break
    return first
