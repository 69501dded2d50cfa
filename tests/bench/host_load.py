"""Measure a verified load on the host beside `safetensors.load_file` and `hashlib.sha256` of the same bytes.

    python -m tests.bench.host_load [--gb N] [--rounds N] [--folder DIR] [--json FILE]

Both in turn, in one process, from files in the page cache; medians.  The reference maps the files and
hashes every tensor where it lies, one after the other: it allocates nothing, copies nothing, and holds the
bytes against nothing.  A load opens the folder, plans, reads into slabs with CRC32 on the way, seals them,
and computes CRC32 and SHA-256 over the resident bytes.

While the reference runs, a hypervisor may take back the memory that the last load freed (free page
reporting), and the next load pays for its return: that load is a line of its own.
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
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file

from shared import _native
from tests.bench import load_changeover
from tests.bench.load_model import Model, write_model

TARGET = 2.5
"""How many times as fast as the reference a verified load is to be on two cores."""


@dataclass(frozen=True, slots=True)
class Series:
    """One way to load, measured round after round; processor seconds are those of all threads."""

    what: str
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)

    def measure(self, work: Callable[[], Callable[[], None]]) -> None:
        """Time `work`; what it returns frees what it loaded and does not count."""
        began, began_cpu = time.perf_counter(), time.process_time()
        free = work()
        self.seconds.append(time.perf_counter() - began)
        self.cpu_seconds.append(time.process_time() - began_cpu)
        free()

    @property
    def median_s(self) -> float:
        """Of all rounds."""
        return statistics.median(self.seconds)


def load(folder: Path, device: str, *, verified: bool) -> Callable[[], None]:
    """One load by changeover into new slabs; call what it returns to free them."""
    return load_changeover.load(folder, device, {"verify": "digest" if verified else "none"}).close


def reference(folder: Path) -> Callable[[], None]:
    """safetensors' own loading, and the digest of every tensor."""
    kept = []
    for path in sorted(folder.glob("*.safetensors")):
        tensors = load_file(path)
        for tensor in tensors.values():
            hashlib.sha256(tensor.view(torch.uint8).reshape(-1).numpy().data).digest()
        kept.append(tensors)
    return kept.clear


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, default=Path("/var/tmp"))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    model = Model(options.gb, shards=2)
    series = {
        what: Series(what)
        for what in (
            "safetensors.load_file + hashlib.sha256",
            "load, not verified, into idle memory",
            "load, verified",
            "load, not verified",
        )
    }
    ways: tuple[Callable[[Path], Callable[[], None]], ...] = (
        reference,
        lambda folder: load(folder, "host", verified=False),
        lambda folder: load(folder, "host", verified=True),
        lambda folder: load(folder, "host", verified=False),
    )
    with tempfile.TemporaryDirectory(dir=options.folder) as parent:
        folder = Path(parent) / "model"
        write_model(folder, model)
        for way in ways:
            way(folder)()  # once to warm up: the files' pages, the threads' buffers
        for _ in range(options.rounds):
            for one, way in zip(series.values(), ways, strict=True):
                one.measure(lambda way=way: way(folder))

    base = next(iter(series.values())).median_s
    print(f"{model.nbytes / 1e9:.2f} GB, {os.cpu_count()} cores, {options.rounds} rounds, medians")
    for one in series.values():
        cpu = statistics.median(one.cpu_seconds)
        rate = model.nbytes / one.median_s / 1e9
        print(
            f"  {one.what:40} {one.median_s:6.3f} s  {rate:5.2f} GB/s  {cpu:6.3f} s of processor  "
            f"{base / one.median_s:4.2f}x"
        )
    ratio = base / series["load, verified"].median_s
    print(f"a verified load is {ratio:.2f} times as fast; the target on two cores is {TARGET}")
    if options.json is not None:
        report = {
            "command": "python -m tests.bench.host_load",
            "kernel": platform.release(),
            "cpus": os.cpu_count(),
            "bytes": model.nbytes,
            "sha256_isas": _native.sha256_isas(),
            "load_average": os.getloadavg(),
            "ratio": ratio,
            "series": [asdict(one) for one in series.values()],
        }
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
