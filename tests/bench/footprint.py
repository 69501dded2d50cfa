"""Where the GPU memory of one more inferd goes: context, mapped weights, cache, graphs and scratch.

    python -m tests.bench.footprint --json out.json
    python -m tests.bench.footprint --layers 4 --sequences 8 …         a small one

One process owns 16 GB of weights (Llama 3 8B's shape) as loaderd does; another maps them and does what an
inferd does, step by step.  Before and after each step NVML says how much of the device is used, and torch how
much of that is its own; what is left is the driver's: code, and the graphs themselves.  Needs a device that
nobody else uses.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig

from inferd.engine.transformers_engine import EngineSettings, TransformersEngine
from inferd.main import CUBLAS_WORKSPACES
from loaderd.nvml import Nvml, open_nvml
from shared.digest import LEAF_BYTES
from shared.ids import DeviceId, Digest, VersionRef, VersionTag
from shared.memory.cuda import CudaBackend, CudaSlab
from tests.bench.engine import prompts_of, time_engine
from tests.bench.swap import llama_config, shapes_of
from tests.gpu.slabs import ROOT, decode, encode
from tests.support.tiny_models import make_tokenizer

MIB = 1 << 20
ALIGNMENT = 256
BLOCK_BYTES = 64 << 20
CHILD_TIMEOUT_S = 90
_SMALL = {"CUBLAS_WORKSPACE_CONFIG": CUBLAS_WORKSPACES}
VARIANTS: dict[str, tuple[dict[str, str], dict[str, int | bool]]] = {
    "as inferd runs": (_SMALL, {}),
    "as inferd runs, 16 sequences": (_SMALL, {"max_sequences": 16}),
    "cuBLAS's own workspaces": ({}, {}),
    "those, no graphs": ({}, {"cuda_graphs": False}),
}
"""Name → environment and engine settings of the process that maps."""

Report = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Options:
    """What both processes agree on."""

    layers: int
    hidden: int
    sequences: int
    kv_bytes: int

    def config(self) -> LlamaConfig:
        """The model's."""
        return llama_config(self.layers, self.hidden)


@dataclass(frozen=True, slots=True)
class Reading:
    """The device and torch at one moment, in bytes."""

    used: int  # of the device, by everyone
    reserved: int  # by torch, in this process
    allocated: int
    private: int  # of `reserved`: pools of graphs
    large_blocks: tuple[tuple[str, int], ...]  # that torch gave out: pool and stream, bytes; 1 MiB or more

    @classmethod
    def now(cls, nvml: Nvml, device: DeviceId) -> Reading:
        """Read; waits for the device."""
        reserved = allocated = private = 0
        large: list[tuple[str, int]] = []
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
            reserved, allocated = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
            for segment in torch.cuda.memory_snapshot():
                is_private = tuple(segment["segment_pool_id"]) != (0, 0)
                private += segment["total_size"] if is_private else 0
                where = f"{'graphs' if is_private else 'ordinary'} @{segment['stream'] & 0xFFFFFF:x}"
                large += [
                    (where, block["size"])
                    for block in segment["blocks"]
                    if block["state"] == "active_allocated" and block["size"] >= MIB
                ]
        reading = nvml.read(device)
        if reading.total_bytes is None or reading.free_bytes is None:
            raise SystemExit("NVML does not tell the device's memory")
        used = reading.total_bytes - reading.free_bytes
        return cls(used, reserved, allocated, private, tuple(sorted(large, key=lambda block: -block[1])))


def offsets_of(shapes: dict[str, tuple[int, ...]]) -> tuple[dict[str, int], int]:
    """Where each bfloat16 tensor lies in one slab, and the slab's bytes."""
    offsets, end = {}, 0
    for name, shape in shapes.items():
        offsets[name] = end
        end += -(-2 * prod(shape) // ALIGNMENT) * ALIGNMENT
    return offsets, end


def filled_slab(backend: CudaBackend, nbytes: int) -> CudaSlab:
    """A sealed slab of small random bfloat16 numbers, the same block over and over."""
    block = torch.randn(BLOCK_BYTES // 2).mul_(0.02).to(torch.bfloat16).view(torch.uint8).numpy()
    device = backend.devices()[0]
    with tempfile.TemporaryFile(dir="/dev/shm") as file, backend.create_slab(device, nbytes) as slab:
        file.write(block.data)
        file.flush()
        with ThreadPoolExecutor(8) as pool:
            parts = [(at, min(BLOCK_BYTES, nbytes - at)) for at in range(0, nbytes, BLOCK_BYTES)]
            for _ in pool.map(lambda part: slab.read_file(file.fileno(), 0, *part), parts):
                pass
        return slab.seal()


# --- the process that maps -------------------------------------------------------------------------


class Stages:
    """Readings, one for each step that was named."""

    def __init__(self, nvml: Nvml, device: DeviceId) -> None:
        self._read: Callable[[], Reading] = lambda: Reading.now(nvml, device)
        self.readings: dict[str, Reading] = {"start": self._read()}

    def done(self, name: str) -> None:
        """Take a reading after the step `name`."""
        self.readings[name] = self._read()


def run_child(connection: socket.socket, options: Options, engine_settings: dict[str, int | bool]) -> Report:
    """Do what an inferd does with one version, then with another, then serve."""
    nvml = open_nvml()
    if nvml is None:
        raise SystemExit("no NVML")
    message, (fd,), _, _ = socket.recv_fds(connection, 65536, 1)
    entry = decode(message)
    stages = Stages(nvml, entry.device)
    backend = CudaBackend()
    backend.free_bytes(entry.device)  # as inferd.daemon does at start
    torch.zeros(1, device="cuda")
    stages.done("context")
    wishes = {"kv_cache_bytes": options.kv_bytes, "max_sequences": options.sequences} | engine_settings
    settings = EngineSettings(**wishes)  # type: ignore[arg-type]
    engine = TransformersEngine(settings)
    engine.start()
    report: Report = {"prepare_s": []}
    with tempfile.TemporaryDirectory() as made:
        assets = Path(made)
        options.config().save_pretrained(assets)
        make_tokenizer().save_pretrained(assets)
        for slot in range(2):
            slab = backend.import_slab(entry, os.dup(fd))
            tensors = tensors_of(slab, options)
            stages.done(f"slot {slot}: attach")
            slab.sha256_leaves(0, entry.nbytes, LEAF_BYTES)
            slab.close()  # the tensors keep the mapping
            stages.done(f"slot {slot}: verify")
            tag = VersionTag(VersionRef("bench", f"v{slot}"), Digest("sha256:" + str(slot) * 64))
            engine.build(slot, tag, tensors, assets)
            stages.done(f"slot {slot}: build, cache")
            report["prepare_s"].append(engine.warm(slot).seconds)
            stages.done(f"slot {slot}: warm, graphs")
    cache = engine._cache
    assert cache is not None
    report["kv_bytes"] = cache._data.nbytes
    report["decode_ms"] = decode_times(engine, [n for n in (1, 8, 32, 64) if n <= settings.max_sequences])
    stages.done("served")
    engine.stop()
    report["stages"] = {name: asdict(reading) for name, reading in stages.readings.items()}
    return report


def tensors_of(slab: CudaSlab, options: Options) -> dict[str, torch.Tensor]:
    """All tensors of the model, over the slab."""
    shapes = shapes_of(options.config())
    offsets, _ = offsets_of(shapes)
    return {name: slab.tensor(offsets[name], "BF16", shape) for name, shape in shapes.items()}


def decode_times(engine: TransformersEngine, sizes: Sequence[int], tokens: int = 64) -> dict[int, float]:
    """Milliseconds a step for each number of sequences, prompts left out."""
    times: dict[int, float] = {}
    for size in sizes:
        first, second = (prompts_of(size * 10 + turn, 32, 250)[:size] for turn in range(2))
        time_engine(engine, first, 2)
        short = time_engine(engine, second, 2)
        third = prompts_of(size * 10 + 2, 32, 250)[:size]
        times[size] = (time_engine(engine, third, tokens + 2) - short) / tokens * 1e3
    return times


# --- the process that owns ---------------------------------------------------------------------------


def measure_variant(slab: CudaSlab, options: Options, name: str) -> Report:
    """Start the other process as `name` says and return its report."""
    environ, settings = VARIANTS[name]
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs, tempfile.NamedTemporaryFile(suffix=".json") as out:
        arguments = [str(theirs.fileno()), out.name, json.dumps(asdict(options)), json.dumps(settings)]
        socket.send_fds(ours, [encode(slab.entry)], [slab.borrow_fd()])
        subprocess.run(
            [sys.executable, "-m", "tests.bench.footprint", "child", *arguments],
            pass_fds=(theirs.fileno(),),
            cwd=ROOT,
            env={**os.environ, **environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            timeout=CHILD_TIMEOUT_S,
            check=True,
        )
        return summed_up(json.loads(Path(out.name).read_text()))


def summed_up(report: Report) -> Report:
    """Add what each step took, and what is neither context nor cache."""
    stages = list(report["stages"].items())
    report["steps"] = []
    for (_, before), (name, after) in pairwise(stages):
        row = {key: after[key] - before[key] for key in ("used", "reserved", "allocated", "private")}
        row["driver"] = row["used"] - row["reserved"]
        report["steps"].append({"step": name, **row})
    first, context = report["stages"]["start"], report["stages"]["context"]
    report["context_bytes"] = context["used"] - first["used"]
    for key, stage in (
        ("one_version", "slot 0: warm, graphs"),
        ("two_versions", "slot 1: warm, graphs"),
        ("served", "served"),
    ):
        beyond = report["stages"][stage]["used"] - context["used"] - report["kv_bytes"]
        torch_part = report["stages"][stage]["reserved"] - context["reserved"] - report["kv_bytes"]
        report[f"beyond_{key}_bytes"] = beyond
        report[f"beyond_{key}_of_torch_bytes"] = torch_part
    return report


def show(name: str, report: Report) -> None:
    """Print a variant's table, in MiB."""
    prepared = [round(seconds, 2) for seconds in report["prepare_s"]]
    print(f"\n{name}: prepare {prepared} s, milliseconds a decoding step {report['decode_ms']}")
    print(f"{'step':24} {'device':>9} {'torch':>9} {'in use':>9} {'graphs':>9} {'driver':>9}   (MiB added)")
    for row in report["steps"]:
        cells = [row[key] / MIB for key in ("used", "reserved", "allocated", "private", "driver")]
        print(f"{row['step']:24} " + " ".join(f"{cell:9.1f}" for cell in cells))
    blocks = report["stages"]["served"]["large_blocks"]
    print("torch's blocks:", "  ".join(f"{size / MIB:.1f} {where}" for where, size in blocks[:24]))
    for key in ("context", "kv"):
        print(f"{key:32} {report[f'{key}_bytes'] / MIB:9.1f} MiB")
    for key in ("one_version", "two_versions", "served"):
        beyond, own = report[f"beyond_{key}_bytes"] / MIB, report[f"beyond_{key}_of_torch_bytes"] / MIB
        print(f"beyond context and cache, {key:14} {beyond:7.1f} MiB, of which torch {own:.1f}")


def main() -> None:
    """Measure, print tables and write the JSON."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.footprint")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--kv-bytes", type=int, default=1 << 30)
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    options = Options(chosen.layers, chosen.hidden, chosen.sequences, chosen.kv_bytes)
    _, nbytes = offsets_of(shapes_of(options.config()))
    backend = CudaBackend()
    reports: dict[str, Report] = {"options": asdict(options), "weights": {"bytes": nbytes}}
    with filled_slab(backend, nbytes) as slab:
        for name in chosen.variants:
            reports[name] = measure_variant(slab, options, name)
            if chosen.json is not None:  # what there is, should a later one fail
                chosen.json.write_text(json.dumps(reports, indent=2) + "\n", encoding="utf-8")
    for name in chosen.variants:
        show(name, reports[name])


def main_of_child() -> None:
    """`child FD FILE OPTIONS SETTINGS`: see `measure_variant`."""
    fd, file, options, settings = sys.argv[2:]
    with socket.socket(fileno=int(fd)) as connection:
        report = run_child(connection, Options(**json.loads(options)), json.loads(settings))
    Path(file).write_text(json.dumps(report), encoding="utf-8")


if __name__ == "__main__":
    main_of_child() if sys.argv[1:2] == ["child"] else main()
