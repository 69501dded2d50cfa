"""Swaps of a large model through both daemons: load, verify, flip, attach, and what is left behind.

    python -m tests.bench.swap --backend cuda --folder /dev/shm/bench --json out.json
    python -m tests.bench.swap --backend host --layers 2 --hidden 512 …         a small one, anywhere

Makes two checkpoints of Llama-3-8B's shape (16 GB; smaller with --layers and --hidden), unsealed, so that
every push reads every byte.  Times are loaderd's and inferd's own, memory is the driver's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

from tests.support.serving_host import MODEL, ServingHost, serving_host
from tests.support.tiny_models import make_tokenizer
from tests.support.traffic import Traffic

Result = dict[str, Any]
PROMPTS = ("the first prompt", "another one", "and a third", "a fourth prompt to go on with")


def llama_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all tensors of a Llama."""
    hidden, inter = config.hidden_size, config.intermediate_size
    kv = config.num_key_value_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer in range(config.num_hidden_layers):
        at = f"model.layers.{layer}."
        shapes |= {
            at + "self_attn.q_proj.weight": (hidden, hidden),
            at + "self_attn.k_proj.weight": (kv, hidden),
            at + "self_attn.v_proj.weight": (kv, hidden),
            at + "self_attn.o_proj.weight": (hidden, hidden),
            at + "mlp.gate_proj.weight": (inter, hidden),
            at + "mlp.up_proj.weight": (inter, hidden),
            at + "mlp.down_proj.weight": (hidden, inter),
            at + "input_layernorm.weight": (hidden,),
            at + "post_attention_layernorm.weight": (hidden,),
        }
    return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (config.vocab_size, hidden)}


def make_checkpoints(root: Path, config: LlamaConfig, device: str, shards: int = 4) -> int:
    """Two versions below `root`; v2 differs from v1 in its last shard.  Returns the bytes of one."""
    shapes = list(llama_shapes(config).items())
    per_shard = -(-len(shapes) // shards)
    total = 0
    for version, seed in (("v1", 1), ("v2", 2)):
        folder = root / f"{MODEL}-{version}"
        folder.mkdir(parents=True)
        weight_map = {}
        for number in range(shards):
            file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
            part = shapes[number * per_shard : (number + 1) * per_shard]
            weight_map |= {name: file for name, _ in part}
            if version == "v2" and number < shards - 1:
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
    """What the driver says is free on the first GPU; 0 without one."""
    command = ["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    try:
        text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError):
        return 0
    return int(text.split()[0]) << 20


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

    frees = []
    host.push("v1" if host.active() and str(host.active()).startswith("v2") else "v2")
    frees.append(free_gpu_bytes())
    for turn in range(swaps):
        host.push(("v1", "v2")[turn % 2])
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
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    config = LlamaConfig(
        vocab_size=128_256,
        hidden_size=options.hidden,
        intermediate_size=options.hidden * 7 // 2,
        num_hidden_layers=options.layers,
        num_attention_heads=options.hidden // 128,
        num_key_value_heads=max(1, options.hidden // 512),
        head_dim=128,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
        dtype=torch.bfloat16,
    )
    began = time.perf_counter()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    nbytes = make_checkpoints(options.folder, config, device)
    torch.cuda.empty_cache() if device == "cuda" else None
    print(f"made two versions of {nbytes / 1e9:.2f} GB in {time.perf_counter() - began:.1f} s", flush=True)
    free_at_start = free_gpu_bytes()
    quiet = f'backend = "{options.backend}"\nlog_level = "warning"'
    with serving_host(options.folder, quiet) as host:
        host.start_loaderd()
        result = measure(host, nbytes, options.swaps, options.rollbacks, options.backend)
    result["free_at_start"], result["free_at_end"] = free_at_start, free_gpu_bytes()
    for key, value in result.items():
        print(f"{key:18} {json.dumps(value)}")
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
