"""Measure what a load gains by its threads and by the size and number of the readers' slots.

    python -m tests.bench.pipeline_gpu [--device cuda|host] [--gb N] [--folder DIR] [--rounds N]
        [--readers N,N] [--hashers N,N] [--slot-kib N,N] [--slots N,N] [--json FILE]

Each line is one configuration: medians of loads that are verified and that are not, in turn, from the
same files (in /dev/shm unless told otherwise), and what verification costs.  What the machine can do at
most is measured by `tests.bench.load`.  On the host there is nothing to choose.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

from shared.memory.backend import MemoryBackend
from shared.memory.cuda import CudaBackend
from shared.memory.host import HostBackend
from tests.bench.load_changeover import load_once
from tests.bench.load_model import Model, write_model


@dataclass(frozen=True, slots=True)
class Configuration:
    """One way to set up the pipeline."""

    readers: int
    hashers: int
    slot_bytes: int
    slots: int

    def backend(self, device: str) -> MemoryBackend:
        """A backend of its own, with its own pinned slots."""
        if device == "host":
            return HostBackend()
        return CudaBackend(
            slot_bytes=self.slot_bytes,
            slots_per_thread=self.slots,
            readers=self.readers,
            hashers_per_device=self.hashers,
        )


@dataclass(frozen=True, slots=True)
class Row:
    """What a configuration gave, in GB/s."""

    configuration: Configuration
    verified: float
    unverified: float

    def text(self, device: str) -> str:
        """One line of the table."""
        set_up = f"{self.configuration.readers:3} readers {self.configuration.hashers:3} hashers  "
        if device == "cuda":
            set_up += f"{self.configuration.slots} slots of {self.configuration.slot_bytes >> 10:4} KiB  "
        return set_up + (
            f"verified {self.verified:6.2f} GB/s  not verified {self.unverified:6.2f} GB/s  "
            f"verification costs {(self.unverified / self.verified - 1) * 100:5.1f} %"
        )


def measure(folder: Path, device: str, configuration: Configuration, rounds: int) -> Row:
    """Medians, after one load of each kind that does not count."""
    backend = configuration.backend(device)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    nbytes = 0
    for turn in range(rounds + 1):
        for verified, kept in seconds.items():
            taken, nbytes = load_once(folder, backend, verified=verified)
            if turn:
                kept.append(taken)
    return Row(
        configuration,
        nbytes / statistics.median(seconds[True]) / 1e9,
        nbytes / statistics.median(seconds[False]) / 1e9,
    )


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "host"), default="cuda")
    parser.add_argument("--gb", type=float, default=16.0)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--readers", type=_numbers, default=[cores, cores - cores // 8, cores - cores // 4])
    parser.add_argument("--hashers", type=_numbers, default=[1, 2, cores])
    parser.add_argument("--slot-kib", type=_numbers, default=[512, 1024, 4096])
    parser.add_argument("--slots", type=_numbers, default=[2, 4, 6])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.device == "host":
        options.slot_kib, options.slots = [0], [0]
        options.readers, options.hashers = [HostBackend().readers], [HostBackend().hashers_per_device]

    rows: list[Row] = []
    with tempfile.TemporaryDirectory(dir=options.folder) as parent:
        folder = Path(parent) / "model"
        write_model(folder, Model(options.gb))
        for chosen in product(options.readers, options.hashers, options.slot_kib, options.slots):
            readers, hashers, slot_kib, slots = chosen
            configuration = Configuration(readers, hashers, slot_kib << 10, slots)
            rows.append(measure(folder, options.device, configuration, options.rounds))
            print(rows[-1].text(options.device), flush=True)
    best = max(rows, key=lambda row: row.verified)
    print(f"best verified: {best.text(options.device)}")
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")


if __name__ == "__main__":
    main()
