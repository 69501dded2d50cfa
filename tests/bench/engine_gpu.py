"""How fast the built-in engine decodes on a GPU, and what preparing the other slot costs meanwhile.

Run as `python -m tests.bench.engine_gpu [--json FILE]` where there is a CUDA device.  The weights are
random and of the shape of Llama 3 8B, made on the device; `floor` is the time to read them once at the
rate of a large copy, measured first.  A step that decodes is timed from its start to its tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from time import perf_counter

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from inferd.engine.decode_attention import GatheredDecodes, KernelDecodes
from inferd.engine.kv_cache import KvCache, KvGeometry
from inferd.engine.protocol import SamplingParams
from inferd.engine.scheduler import StepPlan
from inferd.engine.transformers_engine import EngineSettings, TransformersEngine
from shared.ids import Digest, VersionRef, VersionTag
from tests.bench.engine import prompts_of, time_engine
from tests.unit.engine.checkpoints import make_tokenizer

DEVICE = torch.device("cuda", 0)


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the engine, on the host's clock."""

    started: float
    ended: float
    decodes: int  # 0 where prompts were in it

    @property
    def ms(self) -> float:
        """How long it took."""
        return (self.ended - self.started) * 1e3


@dataclass(frozen=True, slots=True)
class Spread:
    """How long steps took, in milliseconds."""

    steps: int
    median_ms: float
    p99_ms: float
    max_ms: float

    @classmethod
    def of(cls, times_ms: list[float]) -> Spread:
        """Of at least one."""
        ordered = sorted(times_ms)
        place = min(len(ordered) - 1, int(len(ordered) * 0.99))
        return cls(len(ordered), statistics.median(ordered), ordered[place], ordered[-1])


class StepClock:
    """Times every step of an engine that has not been started yet."""

    def __init__(self, engine: TransformersEngine) -> None:
        self.steps: list[Step] = []
        loop = engine._loop
        inner: Callable[[StepPlan], None] = loop._step

        def timed(plan: StepPlan) -> None:
            is_pure = all(batch.decodes == len(batch.chunks) for batch in plan.batches)
            started = perf_counter()
            inner(plan)
            ended = perf_counter()
            self.steps.append(Step(started, ended, sum(b.decodes for b in plan.batches) if is_pure else 0))

        loop._step = timed  # type: ignore[method-assign]


def make_version(folder: Path, layers: int, seed: int) -> dict[str, torch.Tensor]:
    """Random weights on the device; config and tokenizer in `folder`."""
    config = LlamaConfig(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=0,
        dtype=torch.bfloat16,
    )
    config.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    with torch.device("meta"):
        shapes = {name: value.shape for name, value in LlamaForCausalLM(config).state_dict().items()}
    generator = torch.Generator(DEVICE).manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in shapes.items():
        tensor = torch.empty(shape, dtype=torch.bfloat16, device=DEVICE)
        tensors[name] = tensor.fill_(1) if len(shape) == 1 else tensor.normal_(0, 0.02, generator=generator)
    return tensors


def time_on_device(work: Callable[[], object], repeats: int = 20) -> float:
    """Median seconds of `work`, by events."""
    for _ in range(3):
        work()
    times: list[float] = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def copy_rate() -> float:
    """Bytes read and written per second by a large copy on the device."""
    source = torch.empty(4 << 30, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.nbytes / time_on_device(lambda: target.copy_(source))


def time_attention(decodes: KernelDecodes | GatheredDecodes, cache: KvCache, query: torch.Tensor) -> float:
    """Seconds for one of four layers, whose caches together are more than fits in L2 where it matters."""

    def layers() -> None:
        for layer in range(4):
            decodes.attend(cache, layer, query, 0.088)

    layers()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layers()
    return time_on_device(graph.replay) / 4


def measure_kernel(rate: float) -> list[dict[str, float]]:
    """The decode kernel against reading the context once, and against gathering it for torch's own."""
    rows: list[dict[str, float]] = []
    for sequences, context in ((1, 1024), (1, 8192), (8, 1024), (8, 8192), (32, 512), (32, 4096)):
        blocks = context // 16
        geometry = KvGeometry(4, 8, 128, torch.bfloat16, DEVICE)
        cache = KvCache(geometry, sequences * blocks, 16)
        for layer in range(4):
            for part in cache.layer(layer):
                part.normal_()
        tables = torch.randperm(cache.blocks, device=DEVICE).view(sequences, blocks)
        query = torch.randn(sequences, 32, 128, dtype=torch.bfloat16, device=DEVICE)
        ends = torch.full((sequences,), context, device=DEVICE)
        kernel = KernelDecodes.over(cache, tables.t(), ends, 32)
        mask = torch.zeros(sequences, 1, 1, context, dtype=torch.bfloat16, device=DEVICE)
        gathered = GatheredDecodes(sequences, tables.flatten(), mask)
        seconds = [time_attention(decodes, cache, query) for decodes in (kernel, gathered)]
        floor = sequences * context * geometry.bytes_per_token / 4 / rate
        rows.append(
            {
                "sequences": sequences,
                "context": context,
                "kernel_us": seconds[0] * 1e6,
                "gather_us": seconds[1] * 1e6,
                "floor_us": floor * 1e6,
            }
        )
    return rows


def profile_steps(engine: TransformersEngine, sequences: int) -> list[tuple[str, float, int]]:
    """Kernels of a decoding step: name, microseconds, launches."""
    from torch.profiler import ProfilerActivity, profile

    prompts = prompts_of(sequences, 64, 200)
    before = engine.load().steps
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        time_engine(engine, prompts, 24)
    steps = engine.load().steps - before
    events = [event for event in found.key_averages() if event.self_device_time_total]
    events.sort(key=lambda event: -event.self_device_time_total)
    return [(e.key[:80], e.self_device_time_total / steps, e.count // steps) for e in events[:16]]


def measure(layers: int, sizes: list[int], tokens: int) -> dict[str, object]:
    """Everything; see `main`."""
    rate = copy_rate()
    torch.cuda.empty_cache()
    report: dict[str, object] = {
        "device": torch.cuda.get_device_name(DEVICE),
        "torch": torch.__version__,
        "copy_bytes_s": rate,
        "kernel": measure_kernel(rate),
    }
    torch.cuda.empty_cache()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        first, second = (make_version(folder, layers, seed) for seed in (1, 2))
        weights = sum(tensor.nbytes for name, tensor in first.items() if "embed_tokens" not in name)
        report |= {"weight_bytes": weights, "floor_ms": weights / rate * 1e3}
        tags = [VersionTag(VersionRef("bench", f"v{n}"), Digest("sha256:" + str(n) * 64)) for n in (1, 2)]
        settings = EngineSettings(kv_cache_bytes=16 << 30, max_sequences=max(sizes), max_model_len=8192)
        rows: list[dict[str, object]] = []
        for graphs in (False, True):
            engine = TransformersEngine(replace(settings, cuda_graphs=graphs))
            clock = StepClock(engine)
            engine.start()
            started = perf_counter()
            engine.build(0, tags[0], first, folder)
            built = perf_counter()
            engine.warm(0)
            report[f"prepare_s_{'graphs' if graphs else 'eager'}"] = [
                built - started,
                perf_counter() - built,
            ]
            for size in sizes:
                time_engine(engine, prompts_of(size, 64, 200), 4)
                clock.steps.clear()
                time_engine(engine, prompts_of(size, 128, 200), tokens)
                steps = [step for step in clock.steps if step.decodes == size]
                rows.append(
                    {
                        "graphs": graphs,
                        "sequences": size,
                        "tokens_s": size * len(steps) / (steps[-1].ended - steps[0].started),
                        **asdict(Spread.of([step.ms for step in steps])),
                    }
                )
            if not graphs:
                engine.stop()
                del engine
                torch.cuda.empty_cache()
        report["rows"] = rows
        report["profile"] = profile_steps(engine, 8)
        report["beside"] = [
            measure_beside(engine, clock, size, lambda: prepare(engine, tags[1], second, folder))
            for size in sizes[-2:]
        ]
        engine.stop()
    return report


def prepare(
    engine: TransformersEngine, tag: VersionTag, tensors: dict[str, torch.Tensor], folder: Path
) -> list[tuple[str, float]]:
    """Fill slot 1, empty it again, and say when each part ended."""
    marks = [("start", perf_counter())]
    engine.build(1, tag, tensors, folder)
    marks.append(("build", perf_counter()))
    engine.warm(1)
    marks.append(("warm", perf_counter()))
    engine.retire(1)
    marks.append(("retire", perf_counter()))
    return marks


def measure_beside(
    engine: TransformersEngine, clock: StepClock, size: int, work: Callable[[], list[tuple[str, float]]]
) -> dict[str, object]:
    """How the steps of `size` sequences go before and while `work` runs on another thread."""
    params = SamplingParams(7000, temperature=0, ignore_eos=True)
    clock.steps.clear()
    is_under_way = threading.Event()
    for number, prompt in enumerate(prompts_of(size, 64, 200)):
        engine.submit(number, 0, prompt, params, lambda output: is_under_way.set())
    is_under_way.wait()
    while sum(step.decodes == size for step in clock.steps) < 200:
        is_under_way.wait(0.01)
        threading.Event().wait(0.01)
    alone = [step.ms for step in clock.steps if step.decodes == size]
    marks = work()
    steps = [step for step in clock.steps if step.decodes == size]
    for number in range(size):
        engine.cancel(number)
    while engine.load().running:
        threading.Event().wait(0.01)
    parts: dict[str, object] = {"sequences": size, "alone": asdict(Spread.of(alone))}
    for (_, begin), (name, end) in pairwise(marks):
        # From the end of one step to the end of the next: a wait for the GIL between them counts.
        gaps = [
            (after.ended - before.ended) * 1e3
            for before, after in pairwise(steps)
            if after.ended > begin and before.ended < end
        ]
        parts[name] = {"seconds": end - begin} | (asdict(Spread.of(gaps)) if gaps else {})
    return parts


def main() -> None:
    """Measure, print a table, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--new-tokens", type=int, default=128)
    options = parser.parse_args()
    report = measure(options.layers, options.sizes, options.new_tokens)
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    for key, value in report.items():
        if isinstance(value, list) and value and not isinstance(value[0], float):
            print(f"{key}:")
            for row in value:
                print("   ", _short(row))
        else:
            print(f"{key}: {_short(value)}")


def _short(value: object) -> str:
    if isinstance(value, dict):
        return "  ".join(f"{key}={_short(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return " ".join(map(_short, value))
    return f"{value:.4g}" if isinstance(value, float) and value < 1e6 else str(value)


if __name__ == "__main__":
    main()
