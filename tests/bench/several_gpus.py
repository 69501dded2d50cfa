"""Pushes of a large model to all GPUs of a host through loaderd: bytes read, bytes replicated, and how fast.

    python -m tests.bench.several_gpus --folder /dev/shm/bench --json out.json
    python -m tests.bench.several_gpus --backend host --layers 2 --hidden 512 …     one device, anywhere

Versions of Llama-3-8B's shape (16 GB; smaller with --layers and --hidden), unsealed, so that every push
reads every byte.  Times are loaderd's own, the bytes that it read are the kernel's (/proc/PID/io), memory is
NVML's.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from loaderd.nvml import open_nvml
from shared.control import Verify, VerifyReport
from tests.bench.swap import VERSIONS, llama_config, make_checkpoints
from tests.support.gpu import visible_gpus
from tests.support.serving_host import MODEL, ServingHost, serving_host

Result = dict[str, Any]


def free_bytes() -> dict[str, int]:
    """What NVML says is free on each GPU."""
    nvml = open_nvml()
    if nvml is None:
        return {}
    try:
        return {device: nvml.read(device).free_bytes or 0 for device in visible_gpus()}
    finally:
        nvml.close()


def read_chars(pid: int) -> int:
    """Bytes that a process has asked the kernel to read, from files and sockets alike."""
    for line in Path(f"/proc/{pid}/io").read_text().splitlines():
        if line.startswith("rchar:"):
            return int(line.split()[1])
    raise ValueError(f"/proc/{pid}/io has no rchar")


def push(host: ServingHost, version: str, file_bytes: int) -> Result:
    """One push, as loaderd and the kernel saw it."""
    before, began = read_chars(host.loaderd.pid), time.perf_counter()
    report = host.push(version)
    wall_s = time.perf_counter() - began
    read = read_chars(host.loaderd.pid) - before
    return {
        "version": version,
        "wall_s": wall_s,
        "load_s": report.load_s,
        "load_gb_s": report.bytes_read / report.load_s / 1e9,
        "verify_s": report.verify_s,
        "bytes_read": report.bytes_read,
        "rchar_bytes": read,
        "rchar_per_file_byte": read / file_bytes,
        "bytes_replicated": report.bytes_replicated,
        "replicate_s": report.replicate_s,
        "replicate_gb_s": report.bytes_replicated / report.replicate_s / 1e9 if report.replicate_s else None,
    }


def measure(host: ServingHost, root: Path, pushes: int) -> Result:
    """Pushes one after the other; the first makes contexts and pinned slots."""
    names = [VERSIONS[turn % len(VERSIONS)] for turn in range(pushes)]
    sizes = {
        name: sum(path.stat().st_size for path in (root / f"{MODEL}-{name}").glob("*.safetensors"))
        for name in VERSIONS
    }
    result: Result = {"pushes": [push(host, name, sizes[name]) for name in names]}
    status = host.status()
    result["used_bytes"] = {memory.device: memory.used_bytes for memory in status.memory}
    result["copies"] = {version.tag.version: version.devices for version in status.versions}
    verified = host.control.ask(Verify(name=names[-1]), VerifyReport, 120.0)
    result["verify"] = {
        "devices": verified.devices,
        "damaged": verified.damaged,
        "gb_s": verified.nbytes / verified.seconds / 1e9,
    }
    return result


def main() -> None:
    """Measure, print a short table and write the JSON."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.several_gpus")
    parser.add_argument("--backend", choices=("host", "cuda"), default="cuda")
    parser.add_argument("--folder", type=Path, required=True, help="where the checkpoints go (tmpfs)")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--pushes", type=int, default=6)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    config = llama_config(options.layers, options.hidden)
    nbytes = make_checkpoints(options.folder, config, "cuda" if torch.cuda.is_available() else "cpu")
    print(f"made {len(VERSIONS)} versions of {nbytes / 1e9:.2f} GB", flush=True)
    result: Result = {"bytes": nbytes, "free_at_start": free_bytes()}
    for devices in ("first", "all"):
        chosen = json.dumps(visible_gpus()[:1]) if devices == "first" and visible_gpus() else '"all"'
        text = f'backend = "{options.backend}"\nlog_level = "warning"\n[models.{MODEL}]\ndevices = {chosen}'
        with serving_host(options.folder, text) as host:
            host.start_loaderd()
            result[devices] = measure(host, options.folder, options.pushes)
    result["free_at_end"] = free_bytes()
    if torch.cuda.is_available():
        result["device"] = torch.cuda.get_device_name(0)
        result["torch"] = torch.__version__
    for devices in ("first", "all"):
        for each in result[devices]["pushes"]:
            rate = each["replicate_gb_s"]
            print(
                f"{devices:6} {each['version']}  wall {each['wall_s']:.2f} s, "
                f"read {each['load_gb_s']:.1f} GB/s, "
                f"{each['rchar_per_file_byte']:.4f} bytes read per byte of the files, "
                f"replicated {each['bytes_replicated'] / 1e9:.2f} GB"
                + (f" at {rate:.0f} GB/s" if rate else "")
            )
        print(f"{devices:6} verify {result[devices]['verify']}")
    print(f"free at start {result['free_at_start']}, at the end {result['free_at_end']}")
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
