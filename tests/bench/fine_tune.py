"""What a push of a sealed fine-tune reads, allocates and takes, against the push of the model it comes from.

    python -m tests.bench.fine_tune --backend host --gb 1 --folder /var/tmp/bench [--rounds 3] [--json FILE]

A tenth of the bytes differ, spread over the layers.  Each round has a model of its own, which shares
nothing with the round before, and its fine-tune; all are sealed.  No inferd is attached: an engine builds and
warms the same whatever was read.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import statistics
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property
from pathlib import Path

import psutil

from loaderd.seal.create import seal_directory
from shared.control import Push, PushReply
from shared.ids import HOST_DEVICE
from tests.bench.load_model import Model, ModelTensor, write_model
from tests.support.serving_host import ServingHost, serving_host

_SHARE = 0.1
"""Of the bytes that differ in a fine-tune."""

_STRIDE = 37
"""Between one tensor that differs and the next, of all tensors in a ring: spread over layers and kinds."""


@cache
def changed(gb: float) -> frozenset[int]:
    """Numbers of the tensors that differ: of the layers, as many as have a tenth of the model's bytes."""
    tensors = [tensor for tensor in Model(gb).tensors if ".layers." in tensor.name]
    left = _SHARE * Model(gb).nbytes
    numbers = set()
    for turn in range(len(tensors)):
        tensor = tensors[turn * _STRIDE % len(tensors)]
        if tensor.nbytes <= left:
            left -= tensor.nbytes
            numbers.add(tensor.number)
    return frozenset(numbers)


@dataclass(frozen=True)
class Variant(Model):
    """A model with bytes of its own; a fine-tune where `is_tuned`."""

    round: int = 0
    is_tuned: bool = False

    @cached_property
    def tensors(self) -> tuple[ModelTensor, ...]:
        """As `Model.tensors`, with other bytes."""
        return tuple(replace(tensor, number=self._number(tensor)) for tensor in Model(self.gb).tensors)

    def _number(self, tensor: ModelTensor) -> int:
        is_changed = self.is_tuned and tensor.number in changed(self.gb)
        return tensor.number + 1000 * (2 * self.round + is_changed)


@dataclass(frozen=True, slots=True)
class Pushed:
    """One push."""

    version: str
    nbytes: int  # of the version
    wall_s: float  # of the operation, to its end
    processor_s: float  # of loaderd, outside the kernel
    load_s: float
    bytes_read: int
    bytes_allocated: int

    @property
    def beside_ms(self) -> float:
        """Of the operation, before the load and after its last byte: plan, last digests, commit."""
        return (self.wall_s - self.load_s) * 1e3

    def text(self) -> str:
        """One line of the table."""
        return (
            f"{self.version:8} {self.nbytes / 1e9:6.2f} GB  push {self.wall_s:.3f} s, "
            f"processor {self.processor_s:.2f} s, load {self.load_s:.3f} s and {self.beside_ms:.1f} ms  "
            f"read {self.bytes_read / self.nbytes:6.1%}  allocated {self.bytes_allocated / self.nbytes:6.1%}"
        )


def push(host: ServingHost, name: str, nbytes: int) -> Pushed:
    """Push a folder and wait for the end."""
    daemon = psutil.Process(host.loaderd.pid)
    processor_s = daemon.cpu_times().user
    reply = host.control.ask(Push(name=name), PushReply, 60.0)
    assert reply.operation is not None, reply.plan
    report = host.done(reply.operation)
    assert report.ended_ns is not None
    wall_s = (report.ended_ns - report.started_ns) / 1e9
    processor_s = daemon.cpu_times().user - processor_s
    return Pushed(
        name,
        nbytes,
        wall_s,
        processor_s,
        report.load_s,
        report.bytes_read,
        sum(device.bytes_to_allocate for device in reply.plan.devices),
    )


def fetch_memory(nbytes: int) -> None:
    """Have the next `nbytes` that are allocated at hand: where a hypervisor takes free memory back, the first
    touch of each page costs more than all else, by how long the page was free."""
    with mmap.mmap(-1, nbytes) as memory:
        for at in range(0, nbytes, mmap.PAGESIZE):
            memory[at] = 1


def measure(host: ServingHost, gb: float, rounds: int) -> list[tuple[Pushed, Pushed]]:
    """A model and its fine-tune, again and again; files go as soon as they were pushed."""
    found = []
    for turn in range(rounds):
        pair = []
        for is_tuned in (False, True):
            name = f"big-v{2 * turn + 1 + is_tuned}"
            model = Variant(gb, round=turn, is_tuned=is_tuned)
            folder = host.model_root / name
            write_model(folder, model)
            seal_directory(folder, jobs=os.cpu_count() or 1)
            if host.status().memory[0].device == HOST_DEVICE:
                fetch_memory(model.nbytes * 5 // 4)
            pair.append(push(host, name, model.nbytes))
            print(pair[-1].text(), flush=True)  # as it comes: what runs out of time has shown something
            shutil.rmtree(folder)
        found.append((pair[0], pair[1]))
    return found


def main() -> None:
    """Measure, print a short table and write the JSON."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.fine_tune")
    parser.add_argument("--backend", choices=("host", "cuda"), default="host")
    parser.add_argument("--folder", type=Path, required=True, help="where the checkpoints go")
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    with serving_host(options.folder, f'backend = "{options.backend}"\nlog_level = "warning"') as host:
        host.start_loaderd()
        pairs = measure(host, options.gb, options.rounds)
    wall = statistics.median(tuned.wall_s / base.wall_s for base, tuned in pairs)
    processor = statistics.median(tuned.processor_s / base.processor_s for base, tuned in pairs)
    print(f"a fine-tune takes {wall:.1%} of the full push, {processor:.1%} of its processor time (medians)")
    beside = [statistics.median(pair[which].beside_ms for pair in pairs) for which in (0, 1)]
    print(
        f"beside the load: {beside[0]:.1f} ms of the full push, {beside[1]:.1f} ms of the fine-tune (medians)"
    )
    if options.json is not None:
        rows = [[asdict(base), asdict(tuned)] for base, tuned in pairs]
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
