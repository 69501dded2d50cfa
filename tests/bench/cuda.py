"""Measure the CUDA backend: slabs, loading, digests, remapping and replicas, beside plain copies.

    python -m tests.bench.cuda [--gib N] [--file-gib N] [--repeats N] [--only-replicas] [--json FILE]

Each figure is the median of the repeats after one that does not count.  Rates are in GB/s of weights;
`of the bus` relates a load to the pinned copy of the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile

import torch

from shared import _native
from shared.memory.cuda import CudaBackend, CudaSlab, WritableCudaSlab
from shared.memory.remapped_region import RemappedRegion
from tests.support.replica import replica_of

GIB = 1 << 30
EXTENT_BYTES = 16 << 20
"""What one call of `read_file` reads, as a loader would cut a tensor."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured duration; with bytes, a rate."""

    what: str
    median_s: float
    nbytes: int = 0

    def text(self) -> str:
        if self.nbytes:
            return f"{self.nbytes / self.median_s / 1e9:8.1f} GB/s"
        return f"{self.median_s * 1e6:8.0f} µs"


def measure(what: str, repeats: int, work: Callable[[], object], nbytes: int = 0) -> Figure:
    """The median duration of `work` after one run to warm up."""
    work()
    durations = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        durations.append(time.perf_counter() - start)
    return Figure(what, statistics.median(durations), nbytes)


@contextmanager
def file_with(folder: str, nbytes: int) -> Iterator[int]:
    """An fd of a file of random bytes that lies in memory."""
    block = os.urandom(64 << 20)
    with TemporaryFile(dir=folder) as file:
        for _ in range(nbytes // len(block)):
            file.write(block)
        file.flush()
        yield file.fileno()


def filled(backend: CudaBackend, fd: int, file_bytes: int, nbytes: int, threads: int) -> CudaSlab:
    """A sealed slab of the file's bytes, over and over."""
    device = backend.devices()[0]
    with backend.create_slab(device, nbytes) as slab, ThreadPoolExecutor(threads) as pool:
        extents = [(at % file_bytes, at) for at in range(0, nbytes, EXTENT_BYTES)]
        for _ in pool.map(lambda extent: slab.read_file(fd, *extent, EXTENT_BYTES), extents):
            pass
        return slab.seal()


def bus(repeats: int) -> Figure:
    host = torch.empty(GIB, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(GIB, dtype=torch.uint8, device="cuda")

    def copy() -> None:
        device.copy_(host, non_blocking=True)
        torch.cuda.synchronize()

    return measure("pinned copy, 1 GiB", repeats, copy, GIB)


def slabs(backend: CudaBackend, nbytes: int, repeats: int) -> Iterator[Figure]:
    device = backend.devices()[0]
    what = f"{nbytes >> 20} MiB"
    created = []
    yield measure(
        f"create slab, {what}", repeats, lambda: created.append(backend.create_slab(device, nbytes))
    )
    slab = created.pop().seal()
    yield measure(f"close slab, {what}", len(created) - 1, lambda: created.pop().close())
    imported = []
    yield measure(
        f"import and map slab, {what}",
        repeats,
        lambda: imported.append(backend.import_slab(slab.entry, os.dup(slab.borrow_fd()))),
    )
    yield measure(f"unmap slab, {what}", len(imported) - 1, lambda: imported.pop().close())
    slab.close()


def loads(backend: CudaBackend, fd: int, nbytes: int, threads: int, repeats: int, what: str) -> Figure:
    """Read into one slab again and again; the bus and the files are measured, not the allocation."""
    device = backend.devices()[0]
    extents = range(0, nbytes, EXTENT_BYTES)
    with backend.create_slab(device, nbytes) as slab, ThreadPoolExecutor(threads) as pool:

        def load() -> None:
            for _ in pool.map(lambda at: slab.read_file(fd, at, at, EXTENT_BYTES), extents):
                pass

        figure = measure(what, repeats, load, nbytes)
        slab.seal().close()
    return figure


def digests(slab: CudaSlab, repeats: int) -> Iterator[Figure]:
    nbytes = slab.entry.nbytes
    yield measure("crc32", repeats, lambda: slab.crc32(0, nbytes), nbytes)
    for leaf in (4 << 10, 64 << 10, 256 << 10, 1 << 20):
        what = f"sha256, {leaf >> 10} KiB leaves"
        yield measure(what, repeats, lambda leaf=leaf: slab.sha256_leaves(0, nbytes, leaf), nbytes)
    part = 64 << 20
    ranges = [(at, part) for at in range(0, nbytes, part)]
    yield measure(
        "sha256, 64 MiB tensors, one call",
        repeats,
        lambda: slab.sha256_leaves_of(ranges, 256 << 10),
        nbytes,
    )
    # What a load waits for after the last byte of its last slab.
    last = ranges[: max(1, min(len(ranges), GIB // part))]
    yield measure(
        "crc32 and sha256 of one slab's tensors",
        repeats,
        lambda: slab.digests_of(last, 256 << 10),
        part * len(last),
    )
    for threads in (1, 8):
        with ThreadPoolExecutor(threads) as pool:

            def by_tensor(pool: ThreadPoolExecutor = pool) -> None:
                for _ in pool.map(lambda at: slab.sha256_leaves(at, part, 256 << 10), range(0, nbytes, part)):
                    pass

            what = f"sha256, 64 MiB tensors, {threads} threads"
            yield measure(what, repeats, by_tensor, nbytes)


def remaps(backend: CudaBackend, nbytes: int, repeats: int) -> Iterator[Figure]:
    device = backend.devices()[0]
    for count in (1, 16):
        with ExitStack() as kept:
            versions = [
                [
                    kept.enter_context(backend.create_slab(device, nbytes // count).seal())
                    for _ in range(count)
                ]
                for _ in range(2)
            ]
            region = kept.enter_context(RemappedRegion(device, nbytes))

            def flip(versions: list[list[CudaSlab]] = versions, region: RemappedRegion = region) -> None:
                versions.reverse()
                region.exchange(versions[0])

            yield measure(f"exchange {nbytes >> 30} GiB in {count} slabs", max(10, repeats), flip)


def plain_replica(here: torch.device, there: torch.device, nbytes: int, repeats: int) -> Figure:
    source = torch.empty(nbytes, dtype=torch.uint8, device=here)
    target = torch.empty(nbytes, dtype=torch.uint8, device=there)

    def copy() -> None:
        target.copy_(source)
        torch.cuda.synchronize(here)
        torch.cuda.synchronize(there)

    return measure(f"torch copies {nbytes >> 30} GiB to another GPU", repeats, copy, nbytes)


def replicas(backend: CudaBackend, nbytes: int, repeats: int) -> Iterator[Figure]:
    """Copies of a slab on other GPUs; nothing where there is one GPU.  Rates count the bytes written."""
    first, *others = backend.devices()
    if not others:
        return
    here, there = (torch.device("cuda", _native.cuda_device_ordinal(each)) for each in (first, others[0]))
    what = f"{nbytes >> 30} GiB"
    yield plain_replica(here, there, nbytes, repeats)
    torch.cuda.empty_cache()  # or there may be no room for slabs
    with backend.create_slab(first, nbytes).seal() as slab:
        with backend.create_slab(others[0], nbytes) as writable:
            yield measure(
                f"copy a slab of {what} to another GPU", repeats, lambda: writable.copy_from(slab), nbytes
            )

            # Kernels that outlast the copy by far: if it waited for them it would take seconds.  Once, as
            # a first run would do all the waiting.
            for device in (here, there):
                with torch.cuda.device(device):
                    torch.cuda._sleep(5_000_000_000)  # type: ignore[no-untyped-call]
            start = time.perf_counter()
            writable.copy_from(slab)
            yield Figure(f"copy {what}, both GPUs busy, one run", time.perf_counter() - start, nbytes)
            for device in (here, there):
                torch.cuda.synchronize(device)
        yield measure(
            f"replicate {what}, allocate and free",
            repeats,
            lambda: replica_of(slab, backend, others[0]).close(),
            nbytes,
        )
        with ThreadPoolExecutor(len(others)) as pool:

            def to_all() -> None:
                for replica in list(pool.map(lambda device: replica_of(slab, backend, device), others)):
                    replica.close()

            yield measure(
                f"replicate {what} to {len(others)} GPUs at once", repeats, to_all, nbytes * len(others)
            )
    yield from slab_by_slab(backend, nbytes, repeats)


def slab_by_slab(backend: CudaBackend, nbytes: int, repeats: int) -> Iterator[Figure]:
    """The same bytes in slabs of 1 GiB, as a push has them: one after the other, and by several threads."""
    first, second, *_ = backend.devices()
    with ExitStack() as closing:
        pairs = [
            (
                closing.enter_context(backend.create_slab(first, 1 << 30).seal()),
                closing.enter_context(backend.create_slab(second, 1 << 30)),
            )
            for _ in range(nbytes >> 30)
        ]

        def copy(pair: tuple[CudaSlab, WritableCudaSlab]) -> None:
            source, target = pair
            target.copy_from(source)

        def copy_all(pool: ThreadPoolExecutor) -> None:
            list(pool.map(copy, pairs))

        for threads in (1, 4):
            what = f"copy {len(pairs)} slabs of 1 GiB to another GPU, {threads} at a time"
            with ThreadPoolExecutor(threads) as pool:
                yield measure(what, repeats, partial(copy_all, pool), nbytes)


def one_gpu(backend: CudaBackend, nbytes: int, file_bytes: int, repeats: int) -> Iterator[Figure]:
    cores = os.cpu_count() or 1
    yield bus(repeats)
    for size in (2 << 20, GIB, nbytes):
        yield from slabs(backend, size, min(repeats, 3))
    for place, folder in (("tmpfs", "/dev/shm"), ("page cache", "/var/tmp")):
        with file_with(folder, file_bytes) as fd:
            for threads in sorted({1, 4, 8, cores, 2 * cores}):
                yield loads(backend, fd, file_bytes, threads, repeats, f"load, {place}, {threads} threads")
            if place == "tmpfs":
                for mib, slots in ((1, 2), (1, 4), (2, 2), (2, 3), (8, 2)):
                    shaped = CudaBackend(slot_bytes=mib << 20, slots_per_thread=slots)
                    what = f"load, tmpfs, {cores} threads, {slots} slots of {mib} MiB"
                    yield loads(shaped, fd, file_bytes, cores, repeats, what)
                with filled(backend, fd, file_bytes, nbytes, cores) as slab:
                    yield from digests(slab, min(repeats, 3))
    yield from remaps(backend, nbytes, repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--gib", type=int, default=16, help="of the slabs that are hashed and exchanged")
    parser.add_argument("--file-gib", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only-replicas", action="store_true", help="what needs several GPUs")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    nbytes, file_bytes, repeats = arguments.gib * GIB, arguments.file_gib * GIB, arguments.repeats

    figures: list[Figure] = []

    def note(figure: Figure) -> None:
        figures.append(figure)
        print(f"{figure.what:44} {figure.text()}")

    backend = CudaBackend()
    if not arguments.only_replicas:
        for figure in one_gpu(backend, nbytes, file_bytes, repeats):
            note(figure)
    for figure in replicas(backend, nbytes, repeats):
        note(figure)

    if arguments.json is not None:
        report = {
            "device": torch.cuda.get_device_name(0),
            "driver": _native.cuda_driver_version(),
            "torch": torch.__version__,
            "kernel": platform.release(),
            "cpus": os.cpu_count(),
            "repeats": repeats,
            "figures": [asdict(figure) for figure in figures],
        }
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
