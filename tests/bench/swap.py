"""Swaps of a large model through both daemons: load, verify, flip, attach, and what is left behind.

    python -m tests.bench.swap --backend cuda --folder /dev/shm/bench --json out.json
    python -m tests.bench.swap --backend cuda --folder /dev/shm/bench --only-swaps 100 --within-s 240
    python -m tests.bench.swap --backend host --layers 2 --hidden 512 …         a small one, anywhere

Makes three checkpoints of Llama-3-8B's shape (16 GB; smaller with --layers and --hidden), unsealed, so that
every push reads every byte; three, since a version that is still retained would only be committed again.
Times are loaderd's and inferd's own, memory is the driver's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

from loaderd.nvml import open_nvml
from shared.control import OperationReport
from tests.bench.llama import Shapes, llama_shapes
from tests.support.gpu import visible_gpus
from tests.support.serving_host import MODEL, ServingHost, serving_host
from tests.support.tiny_models import make_tokenizer
from tests.support.traffic import Traffic

Result = dict[str, Any]
PROMPTS = ("the first prompt", "another one", "and a third", "a fourth prompt to go on with")


def llama_config(layers: int, hidden: int, words: int = 128_256) -> LlamaConfig:
    """Of Llama 3's shape: 32 layers of 4096 are 16 GB in bfloat16."""
    return LlamaConfig(
        vocab_size=words,
        hidden_size=hidden,
        intermediate_size=hidden * 7 // 2,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 128,
        num_key_value_heads=max(1, hidden // 512),
        head_dim=128,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
        dtype=torch.bfloat16,
    )


def kv_bytes_per_token(config: LlamaConfig) -> int:
    """Of keys and values of all layers, in bfloat16."""
    return config.num_hidden_layers * 2 * config.num_key_value_heads * config.head_dim * 2


def shapes_of(config: LlamaConfig) -> Shapes:
    """Names and shapes of all tensors of a Llama."""
    return llama_shapes(
        layers=config.num_hidden_layers,
        width=config.hidden_size,
        inner=config.intermediate_size,
        kv=config.num_key_value_heads * config.head_dim,
        words=config.vocab_size,
    )


VERSIONS = ("v1", "v2", "v3")


def make_checkpoints(root: Path, config: LlamaConfig, device: str, shards: int = 4) -> int:
    """The versions below `root`; they differ in their last shard.  Returns the bytes of one."""
    shapes = list(shapes_of(config).items())
    per_shard = -(-len(shapes) // shards)
    total = 0
    for seed, version in enumerate(VERSIONS, start=1):
        folder = root / f"{MODEL}-{version}"
        folder.mkdir(parents=True)
        weight_map = {}
        for number in range(shards):
            file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
            part = shapes[number * per_shard : (number + 1) * per_shard]
            weight_map |= {name: file for name, _ in part}
            if version != "v1" and number < shards - 1:
                (folder / file).hardlink_to(root / f"{MODEL}-v1" / file)
                continue
            generator = torch.Generator(device).manual_seed(seed * 100 + number)
            tensors = {
                name: torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
                .mul_(0.02)
                .cpu()
                if len(shape) > 1
                else torch.ones(shape, dtype=torch.bfloat16)
                for name, shape in part
            }
            if version == "v1":
                total += sum(tensor.nbytes for tensor in tensors.values())
            save_file(tensors, folder / file, metadata={"format": "pt"})
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        config.save_pretrained(folder)
        make_tokenizer().save_pretrained(folder)
    return total


def spread(samples: Sequence[float]) -> Result:
    """Count, median, p99 and maximum."""
    ordered = sorted(samples)
    return {
        "count": len(ordered),
        "p50": statistics.median(ordered),
        "p99": ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))],
        "max": ordered[-1],
    }


def free_gpu_bytes() -> int:
    """What NVML says is free on the first GPU; 0 without one."""
    nvml = open_nvml()
    if nvml is None:
        return 0
    try:
        return nvml.read(visible_gpus()[0]).free_bytes or 0
    finally:
        nvml.close()


def measure_swaps(
    host: ServingHost, nbytes: int, swaps: int, within_s: float, more: str, engine: str
) -> Result:
    """Push after push while requests run; each reads and verifies every byte and frees what its slot held.
    What is free after the first pair is held against what is free after the last.  Ends early, and says how
    many it were, where `within_s` does not suffice."""
    host.start_inferd("a", more=more, engine=engine)
    order = cycle(VERSIONS)
    host.push(next(order))
    with Traffic(host.api_socket(), MODEL, PROMPTS, 24, clients=2) as before:
        before.await_answers(str(host.active()), 4)
    for _ in range(2):
        host.push(next(order))
    first = free_gpu_bytes()
    reports: list[OperationReport] = []
    free_under_way: list[int] = []
    end = time.monotonic() + within_s
    with Traffic(host.api_socket(), MODEL, PROMPTS, 24, clients=2) as traffic:
        while len(reports) < swaps - 2 and time.monotonic() < end:
            reports.append(host.push(next(order)))
            if len(reports) % 10 == 0:
                free_under_way.append(free_gpu_bytes())
                print(f"{len(reports)} swaps, {free_under_way[-1]} bytes free", flush=True)
        traffic.await_answers(str(host.active()), 2)
    # Without traffic, as the first pair was: what steps keep for the next ones is not what swaps leave.
    reports += [host.push(next(order)) for _ in range(2)]
    last = free_gpu_bytes()
    return {
        "bytes": nbytes,
        "swaps": {
            "asked": swaps,
            "count": len(reports),
            "free_after_the_first_pair": first,
            "free_at_the_end": last,
            "is_equal": first == last,
            "free_under_way": free_under_way,
        },
        "load_s": spread([report.load_s for report in reports]),
        "verify_s": spread([report.verify_s for report in reports]),
        "prepare_s": spread([report.prepare_s for report in reports]),
        "flip_us": spread([flip / 1e3 for report in reports for flip in report.flip_ns]),
        "bytes_read": sum(report.bytes_read for report in reports),
        "traffic": {"answers": len(traffic.answers), "failures": len(traffic.failures)},
        "mixed": sum(answer.fingerprints != {answer.version} for answer in traffic.answers),
    }


def measure(host: ServingHost, nbytes: int, swaps: int, rollbacks: int, backend: str) -> Result:
    """Run the whole sequence on running daemons."""
    result: Result = {"bytes": nbytes}
    more = f'backend = "{backend}"\nlog_level = "warning"'
    host.start_inferd("a", more=more)
    for version in ("v1", "v2"):
        report = host.push(version)
        result[f"push_{version}"] = {
            "load_gb_s": report.bytes_read / report.load_s / 1e9,
            "verify_gb_s": report.bytes_verified / report.verify_s / 1e9,
            "prepare_s": report.prepare_s,
            "flip_us": [flip / 1e3 for flip in report.flip_ns],
        }
    flips = []
    with Traffic(host.api_socket(), MODEL, PROMPTS, 24, clients=4) as traffic:
        for _ in range(rollbacks):
            flips += [flip / 1e3 for flip in host.rollback().flip_ns]
        traffic.await_answers(str(host.active()), 8)
    result["rollback_flip_us"] = spread(flips)
    result["traffic"] = {"answers": len(traffic.answers), "failures": len(traffic.failures)}
    result["mixed"] = sum(answer.fingerprints != {answer.version} for answer in traffic.answers)

    before = free_gpu_bytes()
    host.start_inferd("b", more=more)
    serving = host.active()
    assert serving is not None
    host.await_serving(serving.ref.version, "b")
    host.awaited(lambda: all(s.tag for i in host.status().inferds for s in i.slots), "b to map both")
    attached = [entry for entry in host.history(1000) if entry.kind == "inferd.reconciled"]
    result["attach"] = dict(attached[-1].data)
    result["attach_adds_bytes"] = before - free_gpu_bytes()
    host.inferds.pop("b").terminate()

    order = cycle(VERSIONS)
    while next(order) != str(host.active()).partition("@")[0].removeprefix(f"{MODEL}-"):
        pass
    frees = []
    for turn in range(swaps + 2):
        host.push(next(order))
        if turn in (1, swaps + 1):
            frees.append(free_gpu_bytes())
    result["swaps"] = {"count": swaps, "free_before": frees[0], "free_after": frees[1]}

    answer_before = ask(host)
    began = time.perf_counter()
    host.kill_loaderd()
    answer_without = ask(host)
    host.start_loaderd()
    host.awaited(lambda: host.active() is not None, "loaderd to adopt what serves")
    result["loaderd_killed"] = {
        "same_answer": answer_before == answer_without == ask(host),
        "adopted_after_s": time.perf_counter() - began,
    }
    return result


def ask(host: ServingHost) -> str:
    with host.client() as client:
        return client.ask(PROMPTS[0], 24).text


def main() -> None:
    """Measure, print a short table and write the JSON."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.swap")
    parser.add_argument("--backend", choices=("host", "cuda"), default="host")
    parser.add_argument("--folder", type=Path, required=True, help="where the checkpoints go (tmpfs)")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--swaps", type=int, default=20)
    parser.add_argument("--rollbacks", type=int, default=100)
    parser.add_argument("--only-swaps", type=int, default=0, help="this many full pushes, and nothing else")
    parser.add_argument("--within-s", type=float, default=240.0, help="stop pushing after this long")
    parser.add_argument("--max-sequences", type=int, default=64, help="of the engine: fewer capture less")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    config = llama_config(options.layers, options.hidden)
    began = time.perf_counter()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    nbytes = make_checkpoints(options.folder, config, device)
    torch.cuda.empty_cache() if device == "cuda" else None
    print(
        f"made {len(VERSIONS)} versions of {nbytes / 1e9:.2f} GB in {time.perf_counter() - began:.1f} s",
        flush=True,
    )
    free_at_start = free_gpu_bytes()
    quiet = f'backend = "{options.backend}"\nlog_level = "warning"'
    with serving_host(options.folder, quiet) as host:
        host.start_loaderd()
        if options.only_swaps:
            more = f'backend = "{options.backend}"\nlog_level = "warning"'
            engine = f"max_sequences = {options.max_sequences}"
            result = measure_swaps(host, nbytes, options.only_swaps, options.within_s, more, engine)
        else:
            result = measure(host, nbytes, options.swaps, options.rollbacks, options.backend)
    result["free_at_start"], result["free_at_end"] = free_at_start, free_gpu_bytes()
    for key, value in result.items():
        print(f"{key:18} {json.dumps(value)}")
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
