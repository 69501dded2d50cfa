"""What a prompt adds to the pace of sequences that decode beside it, for several `mixed_batch_tokens`.

Run as `python -m tests.bench.mixed_steps [--json FILE]` where there is a CUDA device.  Random weights of the
shape of Llama 3 8B; 8 sequences decode all the time while prompts of 1000 tokens come one after another.  A
gap is the time from the end of one step to the end of the next; "eager" is the engine without graphs.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from time import perf_counter

import torch

from inferd.engine.protocol import FinishReason, SamplingParams, SequenceOutput
from inferd.engine.transformers_engine import EngineSettings, TransformersEngine
from shared.ids import Digest, VersionRef, VersionTag
from tests.bench.engine import prompts_of
from tests.bench.engine_gpu import Spread, StepClock, make_version

Row = dict[str, object]
DECODING = SamplingParams(7000, temperature=0, ignore_eos=True)
ONE_TOKEN = SamplingParams(1, temperature=0, ignore_eos=True)
GAPS_ALONE = 200


def gaps(clock: StepClock, begin: float, end: float) -> list[float]:
    """Milliseconds between the ends of steps that ended from `begin` to `end`."""
    ends = [step.ended for step in clock.steps if begin <= step.ended <= end]
    return [(after - before) * 1e3 for before, after in pairwise(ends)]


def answer_time(engine: TransformersEngine, number: int, prompt: list[int]) -> float:
    """Milliseconds from the submit to the first token."""
    ended = threading.Event()

    def sink(output: SequenceOutput) -> None:
        if output.finish is FinishReason.ERROR:
            raise RuntimeError(output.error)
        if output.finish is not None:
            ended.set()

    began = perf_counter()
    engine.submit(number, 0, prompt, ONE_TOKEN, sink)
    if not ended.wait(60):
        raise TimeoutError("a prompt was not answered")
    return (perf_counter() - began) * 1e3


def measure(
    settings: EngineSettings,
    tensors: dict[str, torch.Tensor],
    folder: Path,
    *,
    decoding: int,
    prompts: int,
    prompt_tokens: int,
) -> Row:
    """One row: gaps without and with prompts, and how long those took to their first token."""
    engine = TransformersEngine(settings)
    clock = StepClock(engine)
    engine.start()
    try:
        engine.build(0, VersionTag(VersionRef("bench", "v1"), Digest("sha256:" + "1" * 64)), tensors, folder)
        warmed = engine.warm(0).seconds
        is_under_way = threading.Event()
        for number, prompt in enumerate(prompts_of(decoding, 64, 200)):
            engine.submit(number, 0, prompt, DECODING, lambda output: is_under_way.set())
        is_under_way.wait()
        lots = prompts_of(1000 + prompts, prompt_tokens, 200)[: prompts + 1]
        answer_time(engine, 1000, lots[prompts])  # what only the first one pays is not its pace
        began, alone_from = perf_counter(), len(clock.steps)
        while len(clock.steps) < alone_from + GAPS_ALONE and perf_counter() < began + 20:
            threading.Event().wait(0.02)
        alone = gaps(clock, began, perf_counter())
        began = perf_counter()
        first_token_ms = [answer_time(engine, 1001 + n, lots[n]) for n in range(prompts)]
        beside = gaps(clock, began, perf_counter())
    finally:
        engine.stop()
    return {
        "warm_s": warmed,
        "alone": asdict(Spread.of(alone)),
        "beside": asdict(Spread.of(beside)),
        "first_token_ms": sorted(first_token_ms)[len(first_token_ms) // 2],
    }


def main() -> None:
    """Measure, print a table, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128, 256, 512])
    parser.add_argument("--decoding", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--prompt-tokens", type=int, default=1000)
    options = parser.parse_args()
    base = {"kv_cache_bytes": 8 << 30, "max_sequences": 32, "max_model_len": 8192}
    rows: dict[str, Row] = {}
    with tempfile.TemporaryDirectory() as made:
        tensors = make_version(Path(made), options.layers, 1)
        wishes: dict[str, dict[str, int | bool]] = {
            "eager": {"mixed_batch_tokens": 512, "cuda_graphs": False}
        }
        wishes |= {str(width): {"mixed_batch_tokens": width} for width in options.widths}
        for name, wish in wishes.items():
            rows[name] = measure(
                EngineSettings(**base, **wish),  # type: ignore[arg-type]
                tensors,
                Path(made),
                decoding=options.decoding,
                prompts=options.prompts,
                prompt_tokens=options.prompt_tokens,
            )
            torch.cuda.empty_cache()
            if options.json:
                options.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    print(f"gaps in ms, {options.decoding} sequences decode, prompts of {options.prompt_tokens} tokens")
    head = ("width", "alone p50", "max", "beside p50", "p99", "max", "prompt")
    print(
        " ".join(f"{each:>{size}}" for each, size in zip(head, (6, 9, 6, 10, 6, 6, 7), strict=True)), "warm s"
    )
    for name, row in rows.items():
        alone, beside = row["alone"], row["beside"]
        assert isinstance(alone, dict)
        assert isinstance(beside, dict)
        print(
            f"{name:>6} {alone['median_ms']:9.1f} {alone['max_ms']:6.1f} {beside['median_ms']:10.1f} "
            f"{beside['p99_ms']:6.1f} {beside['max_ms']:6.1f} {row['first_token_ms']:7.1f} "
            f"{row['warm_s']:.2f}"
        )


if __name__ == "__main__":
    main()
