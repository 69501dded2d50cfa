"""How fast the built-in engine decodes, against `transformers`' own `generate` in batches of the same size.

Run as `python -m tests.bench.engine MODEL_FOLDER [--json FILE]`.  Numbers are of this machine and its
other load; read the ratios.  Both sides alternate, and the best of the rounds counts.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import json
import os
import platform
import pstats
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from inferd.engine.protocol import FinishReason, SamplingParams, SequenceOutput
from inferd.engine.transformers_engine import EngineSettings, TransformersEngine
from shared.ids import Digest, VersionRef, VersionTag


@dataclass(frozen=True, slots=True)
class Row:
    """Decoding `sequences` at once: tokens per second, both ways."""

    sequences: int
    engine_tokens_s: float
    generate_tokens_s: float
    engine_step_ms: float

    @property
    def ratio(self) -> float:
        """How many times the reference's rate the engine reaches."""
        return self.engine_tokens_s / self.generate_tokens_s


def prompts_of(count: int, length: int, vocabulary: int) -> list[list[int]]:
    """Prompts that share no prefix."""
    generator = torch.Generator().manual_seed(count)
    tokens = torch.randint(10, vocabulary, (count, length), generator=generator)
    rows: list[list[int]] = tokens.tolist()
    return rows


def time_engine(engine: TransformersEngine, prompts: list[list[int]], tokens: int) -> float:
    """Seconds from the submits to the last output."""
    ended = threading.Semaphore(0)
    failed: list[str] = []

    def sink(output: SequenceOutput) -> None:
        if output.finish is FinishReason.ERROR:
            failed.append(output.error)
        if output.finish is not None:
            ended.release()

    params = SamplingParams(tokens, temperature=0, ignore_eos=True)
    started = perf_counter()
    for number, prompt in enumerate(prompts):
        engine.submit(number, 0, prompt, params, sink)
    for _ in prompts:
        ended.acquire()
    if failed:
        raise RuntimeError(failed[0])
    return perf_counter() - started


def time_generate(model: torch.nn.Module, prompts: list[list[int]], tokens: int) -> float:
    """The same by `generate`, in one batch without padding."""
    ids = torch.tensor(prompts)
    started = perf_counter()
    with torch.inference_mode():
        model.generate(  # type: ignore[operator]
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=tokens,
            min_new_tokens=tokens,
        )
    return perf_counter() - started


def measure(folder: Path, sizes: list[int], length: int, tokens: int, rounds: int, threads: int) -> list[Row]:
    """A row for each batch size."""
    torch.set_num_threads(threads)
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors.update(load_file(path))
    settings = EngineSettings(kv_cache_bytes=1 << 28, torch_threads=threads)
    engine = TransformersEngine(settings)
    tag = VersionTag(VersionRef("bench", "v1"), Digest("sha256:" + "0" * 64))
    engine.build(0, tag, tensors, folder)
    engine.warm(0)
    engine.start()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    rows: list[Row] = []
    for size in sizes:
        ours: list[float] = []
        theirs: list[float] = []
        steps: list[float] = []
        for number in range(rounds):
            prompts = prompts_of(size * 100 + number, length, model.config.vocab_size)[:size]
            before = engine.load().steps
            ours.append(time_engine(engine, prompts, tokens))
            steps.append(ours[-1] / (engine.load().steps - before) * 1e3)
            theirs.append(time_generate(model, prompts, tokens))
        total = size * tokens
        rows.append(Row(size, total / min(ours), total / min(theirs), min(steps)))
    engine.stop()
    return rows


def profile(folder: Path, sequences: int, tokens: int, threads: int) -> str:
    """Where the time of decoding steps goes; they run on this thread."""
    torch.set_num_threads(threads)
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors.update(load_file(path))
    engine = TransformersEngine(EngineSettings(kv_cache_bytes=1 << 28))
    engine.build(0, VersionTag(VersionRef("bench", "v1"), Digest("sha256:" + "0" * 64)), tensors, folder)
    params = SamplingParams(tokens, temperature=0, ignore_eos=True)
    for number, prompt in enumerate(prompts_of(sequences, 32, 257)):
        engine.submit(number, 0, prompt, params, lambda output: None)
    profiler = cProfile.Profile()
    loop = engine._loop
    loop._run_once()
    profiler.enable()
    while engine.load().running:
        loop._run_once()
    profiler.disable()
    text = io.StringIO()
    pstats.Stats(profiler, stream=text).sort_stats("tottime").print_stats(18)
    return text.getvalue()


def main() -> None:
    """Measure, print a table, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--profile", action="store_true", help="print where the time of a step goes instead")
    options = parser.parse_args()
    if options.profile:
        print(profile(options.folder, max(options.sizes), options.new_tokens, options.threads))
        return
    rows = measure(
        options.folder,
        options.sizes,
        options.prompt_tokens,
        options.new_tokens,
        options.rounds,
        options.threads,
    )
    print(f"{'sequences':>9} {'engine tok/s':>13} {'generate tok/s':>15} {'ratio':>6} {'ms/step':>8}")
    for row in rows:
        print(
            f"{row.sequences:>9} {row.engine_tokens_s:>13.1f} {row.generate_tokens_s:>15.1f} "
            f"{row.ratio:>6.2f} {row.engine_step_ms:>8.1f}"
        )
    if options.json:
        report = {
            "model": options.folder.name,
            "machine": platform.machine(),
            "torch": torch.__version__,
            "threads": options.threads,
            "prompt_tokens": options.prompt_tokens,
            "new_tokens": options.new_tokens,
            "rows": [asdict(row) | {"ratio": row.ratio} for row in rows],
        }
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
