"""Measure the native core: checksums, digests and file reads, beside the standard library.

    python tests/bench/native.py [--bytes N] [--repeats N] [--json FILE]

Each figure is the median of the repeats after one that does not count.  Figures depend on the machine
and on what else it does: compare them with each other, not with a threshold.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from shared import _native
from shared.ids import HOST_DEVICE
from shared.memory.host import HostBackend

LEAF_BYTES = 256 << 10


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured rate."""

    what: str
    nbytes: int
    median_s: float

    @property
    def gb_per_s(self) -> float:
        return self.nbytes / self.median_s / 1e9


def measure(what: str, nbytes: int, repeats: int, work: Callable[[], object]) -> Figure:
    """The median duration of `work` after one run to warm up."""
    work()
    durations = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        durations.append(time.perf_counter() - start)
    return Figure(what, nbytes, statistics.median(durations))


@contextmanager
def file_in_page_cache(data: bytes) -> Iterator[int]:
    with tempfile.TemporaryFile(dir="/var/tmp") as file:
        file.write(data)
        file.flush()
        yield file.fileno()


def digests(data: bytes, repeats: int) -> Iterator[Figure]:
    n = len(data)
    for isa in _native.crc32_isas():
        yield measure(f"crc32, {isa}", n, repeats, partial(_native.crc32, data, isa=isa))
    hot = data[: 256 << 10]
    yield measure(
        "crc32, 256 KiB in cache", 1000 * len(hot), repeats, lambda: [_native.crc32(hot) for _ in range(1000)]
    )
    yield measure("crc32, zlib", n, repeats, lambda: zlib.crc32(data))
    for isa in _native.sha256_isas():
        yield measure(
            f"sha256 leaves, {isa}",
            n,
            repeats,
            partial(_native.sha256_leaves, data, LEAF_BYTES, isa=isa),
        )
    yield measure("sha256 of the whole, native", n, repeats, lambda: _native.sha256(data))
    yield measure("sha256 of the whole, hashlib", n, repeats, lambda: hashlib.sha256(data).digest())


def reads(data: bytes, repeats: int, threads: int) -> Iterator[Figure]:
    n = len(data)
    backend = HostBackend()

    def fill_new_slab(fd: int) -> None:
        with backend.create_slab(HOST_DEVICE, n) as slab:
            slab.read_file(fd, 0, 0, n)

    with file_in_page_cache(data) as fd:
        yield measure("create slab", n, repeats, lambda: backend.create_slab(HOST_DEVICE, n).close())
        yield measure("create slab + read_file", n, repeats, lambda: fill_new_slab(fd))
        with backend.create_slab(HOST_DEVICE, n) as slab, ThreadPoolExecutor(threads) as pool:
            yield measure("read_file, 1 thread", n, repeats, lambda: slab.read_file(fd, 0, 0, n))
            part = n // threads

            def read_in_parts() -> None:
                jobs = [pool.submit(slab.read_file, fd, i * part, i * part, part) for i in range(threads)]
                for job in jobs:
                    job.result()

            yield measure(f"read_file, {threads} threads", part * threads, repeats, read_in_parts)
        buffer = bytearray(n)
        yield measure("preadv without a checksum", n, repeats, lambda: os.preadv(fd, [buffer], 0))


def slots(repeats: int) -> Iterator[tuple[str, float]]:
    slot = _native.VersionSlot()
    slot.open(0)
    slot.open(1)
    slot.publish(0)
    calls = 100_000

    def acquire_and_release() -> None:
        for _ in range(calls):
            slot.acquire()
            slot.release(0)

    def turn() -> None:
        for _ in range(calls // 2):
            slot.publish(1)
            slot.publish(0)

    for what, work in (("acquire + release", acquire_and_release), ("publish", turn)):
        yield what, measure(what, calls, repeats, work).median_s / calls * 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--bytes", type=int, default=256 << 20)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()

    data = os.urandom(arguments.bytes)
    figures = [*digests(data, arguments.repeats), *reads(data, arguments.repeats, arguments.threads)]
    calls = dict(slots(arguments.repeats))
    for figure in figures:
        print(f"{figure.what:32} {figure.gb_per_s:8.2f} GB/s")
    for what, nanoseconds in calls.items():
        print(f"{'slot: ' + what:32} {nanoseconds:8.0f} ns (from Python)")
    if arguments.json is not None:
        report = {
            "machine": platform.machine(),
            "kernel": platform.release(),
            "python": platform.python_version(),
            "cpus": os.cpu_count(),
            "bytes": arguments.bytes,
            "repeats": arguments.repeats,
            "crc32_isas": _native.crc32_isas(),
            "sha256_isas": _native.sha256_isas(),
            "figures": [asdict(figure) | {"gb_per_s": figure.gb_per_s} for figure in figures],
            "slot_ns": calls,
        }
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
