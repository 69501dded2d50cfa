"""The decode kernel computes what plain torch does, and a graph computes what its step does."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from inferd.engine.blocks import PrefixKey
from inferd.engine.decode_attention import GatheredDecodes, KernelDecodes
from inferd.engine.forward import run_forward
from inferd.engine.fused_norms import FusedNorm, fuse_norms
from inferd.engine.kv_cache import KvCache, KvGeometry
from inferd.engine.lanes import Lanes
from inferd.engine.model import build_model
from inferd.engine.scheduler import Chunk, Sequence, SlotBatch
from inferd.engine.step_graphs import StepGraphs, graph_sizes
from shared.memory.cuda import CudaBackend
from tests.gpu.slabs import sealed
from tests.unit.engine.checkpoints import make_checkpoint, tag_of
from tests.unit.engine.sessions import EngineSession

from .engine_cases import DEVICE, answers_of, generated, needs_cuda, opened, prompts_of, serve, versions

pytestmark = needs_cuda


@pytest.fixture
def session() -> Iterator[EngineSession]:
    with opened() as made:
        yield made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_tokens", "lengths"),
    [
        (6, 2, 8, 4, [1, 4, 5, 200]),
        (32, 8, 128, 16, [1, 63, 64, 65, 2000]),
        (9, 3, 64, 16, [333]),
        (4, 4, 80, 16, [17] * 70),
        (32, 1, 64, 1, [40, 1000]),
    ],
)
def test_the_kernel_agrees_with_plain_torch(
    dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, block_tokens: int, lengths: list[int]
) -> None:
    generator = torch.Generator(DEVICE).manual_seed(1)
    width = -(-max(lengths) // block_tokens)
    cache = KvCache(KvGeometry(2, kv_heads, head_dim, dtype, DEVICE), width * len(lengths), block_tokens)
    for part in cache.layer(1):
        part.normal_(generator=generator)
    order = torch.randperm(cache.blocks, generator=generator, device=DEVICE)
    tables = order.view(len(lengths), width)
    query = torch.randn(heads, len(lengths), head_dim, generator=generator, device=DEVICE, dtype=dtype)
    query = query.transpose(0, 1)
    ends = torch.tensor(lengths, device=DEVICE)
    beyond = torch.arange(width * block_tokens, device=DEVICE)[None] >= ends[:, None]
    mask = torch.zeros(beyond.shape, device=DEVICE, dtype=torch.float64)
    exact = KvCache(KvGeometry(2, kv_heads, head_dim, torch.float64, DEVICE), cache.blocks, block_tokens)
    for mine, theirs in zip(exact.layer(1), cache.layer(1), strict=True):
        mine.copy_(theirs)
    reference = GatheredDecodes(
        len(lengths), tables.flatten(), mask.masked_fill_(beyond, float("-inf"))[:, None, None]
    ).attend(exact, 1, query.double(), head_dim**-0.5)
    # What lies beyond a context, and in the padding, may be anything.
    for part in cache.layer(1):
        part.view(cache.blocks + 1, -1)[cache.padding_block] = float("nan")
    found = KernelDecodes.over(cache, tables.t(), ends, heads).attend(cache, 1, query, head_dim**-0.5)
    error = float((found.double() - reference).norm() / reference.norm())
    assert error < (2e-6 if dtype == torch.float32 else 8e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "kv_heads", "head_dim"), [(1, 2, 8), (37, 8, 128), (5, 3, 80)])
def test_what_is_stored_is_what_plain_torch_stores(
    dtype: torch.dtype, tokens: int, kv_heads: int, head_dim: int
) -> None:
    cache = KvCache(KvGeometry(2, kv_heads, head_dim, dtype, DEVICE), 12, 4)
    key, value = torch.randn(2, kv_heads, tokens, head_dim, device=DEVICE).to(dtype).transpose(1, 2)
    rows = torch.randperm(48, device=DEVICE)[:tokens]
    cache.write(1, rows, key, value)
    for part, written in zip(cache.layer(1), (key, value), strict=True):
        expected = torch.zeros_like(part)
        expected[rows] = written
        assert torch.equal(part, expected)
    assert not any(part.any() for part in cache.layer(0))


class ShiftedNorm(LlamaRMSNorm):
    """As some models have it: looks like the norm that is fused, and is another."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        plain = super().forward(hidden_states)
        return plain + plain / self.weight


@pytest.mark.parametrize("width", [48, 576, 4096])
def test_norms_are_fused_where_they_answer_alike(width: int) -> None:
    norms = {
        "plain": LlamaRMSNorm(width, 1e-5),
        "tight": LlamaRMSNorm(width, 1e-6),
        "shifted": ShiftedNorm(width, 1e-5),
        "exact": LlamaRMSNorm(width, 1e-5),
    }
    model = torch.nn.ModuleDict(norms)
    for norm in norms.values():
        torch.nn.init.normal_(norm.weight, 1.0, 0.2)
        norm.requires_grad_(False)
    model.to(DEVICE, torch.bfloat16)
    norms["exact"].float()
    assert fuse_norms(model) == 2
    assert {name for name, norm in norms.items() if isinstance(norm.forward, FusedNorm)} == {"plain", "tight"}
    rows = torch.randn(3, 5, width, device=DEVICE, dtype=torch.bfloat16)
    for name in ("plain", "tight"):
        wanted = LlamaRMSNorm.forward(norms[name], rows)
        torch.testing.assert_close(norms[name](rows), wanted, rtol=2e-2, atol=1e-3)
        assert torch.equal(norms[name](rows[:, 1]), norms[name](rows[:, 1].contiguous()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_graph_computes_what_its_step_does(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = make_checkpoint(tmp_path, dtype=dtype)
    (tensors,) = versions(folder, 1)
    lanes = Lanes(DEVICE)
    with lanes.preparing() as captures:
        assert captures is not None
        model = build_model(tag_of("v1"), tensors, folder)
        cache = KvCache(model.geometry, 70, 4)
        graphs = StepGraphs.capture(model, cache, captures, sequences=6, widest=24, longest=60)
    assert graphs is not None
    root = PrefixKey.root(model.tag.digest)
    prompts = prompts_of(6, shortest=2, longest=30)
    sequences = [
        Sequence(n, 0, root, prompt, 9, blocks=list(range(n * 10, n * 10 + 10)))
        for n, prompt in enumerate(prompts)
    ]
    with lanes.stepping():
        for sequence in sequences:
            count = len(sequence.tokens) - 1
            run_forward(model, cache, [Chunk(sequence, 0, count, is_last=True)], decodes=0)
            sequence.computed = count
        for count in (6, 3, 1, 4, 2, 5, 6):
            batch = [Chunk(one, one.computed, 1, is_last=True) for one in sequences[-count:]]
            eager = run_forward(model, cache, batch, decodes=count)
            replayed = graphs.run(batch)
            if count in graph_sizes(6, 24):
                assert torch.equal(replayed, eager)
            else:
                torch.testing.assert_close(replayed, eager, rtol=2e-2, atol=2e-2)
            tokens = replayed.argmax(-1).tolist()
            for one, token in zip(sequences[-count:], tokens, strict=True):
                one.computed += 1
                one.tokens.append(token)
        # A prompt's chunk beside two that decode, against a step of its own.
        late = Sequence(6, 0, root, prompts_of(1, shortest=19)[0][:19], 9, blocks=list(range(60, 65)))
        chunks = [Chunk(one, one.computed, 1, is_last=True) for one in sequences[:2]]
        chunks.append(Chunk(late, 0, 19, is_last=True))
        assert graphs.fits(SlotBatch(0, tuple(chunks), 2))
        eager = run_forward(model, cache, chunks, decodes=2)
        torch.testing.assert_close(graphs.run(chunks), eager, rtol=2e-2, atol=2e-2)
    graphs.close()


def test_mixed_steps_are_replayed_and_answer_alike(session: EngineSession, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    (tensors,) = versions(folder, 1)
    prompts = prompts_of(12, longest=90)
    engine = serve(session, folder, tensors, max_sequences=4, mixed_batch_tokens=32, max_batch_tokens=128)
    graphs = engine._graphs[0]
    widths: list[int] = []
    inner = graphs.run

    def noting(chunks: list[Chunk]) -> torch.Tensor:
        widths.append(sum(chunk.count for chunk in chunks))
        return inner(chunks)

    graphs.run = noting  # type: ignore[method-assign, assignment]
    assert answers_of(session, engine, prompts) == generated(folder, tensors, prompts)
    # Few seats: all but the first prompts come while others decode, and none of those steps is eager.
    assert max(widths) == 32


def test_memory_that_ends_during_a_capture_does_not_end_it(
    session: EngineSession, tmp_path: Path, backend: CudaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if garbage collection found a tensor of a version that failed."""
    folder = make_checkpoint(tmp_path)
    (tensors,) = versions(folder, 1)
    prompts = prompts_of(5)
    engine = serve(session, folder, tensors, is_warm=False, max_sequences=4)
    slabs = [sealed(backend, bytes([number])) for number in range(8)]
    mapped = [slab.tensor(0, "U8", (1,)) for slab in slabs]
    for slab in slabs:
        slab.close()
    inner = StepGraphs._compute_in_place

    def ending(graphs: StepGraphs, size: int) -> None:
        mapped.pop()
        inner(graphs, size)
        # That nothing happens cannot be waited for: the thread that unmaps gets its chance to do wrong.
        time.sleep(0.05)

    monkeypatch.setattr(StepGraphs, "_compute_in_place", ending)
    engine.warm(0)
    assert len(engine._graphs[0]._graphs) == 8 - len(mapped) > 2
    mapped.clear()
    backend.free_bytes(backend.devices()[0])  # waits for what is being unmapped
    assert backend.used_bytes == 0
    assert answers_of(session, engine, prompts) == generated(folder, tensors, prompts)


def test_code_that_cannot_be_captured_decodes_without(
    session: EngineSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_checkpoint(tmp_path)
    first, second = versions(folder, 2)
    prompts = prompts_of(5)
    engine = serve(session, folder, first, is_warm=False, max_sequences=4)
    layer = engine._models[0].module.get_submodule("model.norm")
    hook = layer.register_forward_hook(
        lambda module, inputs, output: output * float(output.ne(7).any().item())
    )
    with caplog.at_level(logging.WARNING):
        engine.warm(0)
    assert "without CUDA graphs" in caplog.text
    assert not engine._graphs
    assert answers_of(session, engine, prompts) == generated(folder, first, prompts)
    hook.remove()
    # A failed capture leaves nothing behind that another slot, or the same, would stumble over.
    session.build(engine, 1, second, folder, "1")
    engine.warm(1)
    engine.warm(0)
    assert sorted(engine._graphs) == [0, 1]
    assert answers_of(session, engine, prompts, slot=1) == generated(folder, second, prompts)
    assert answers_of(session, engine, prompts) == generated(folder, first, prompts)
