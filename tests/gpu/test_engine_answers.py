"""On a GPU in float32 the engine's greedy answers are those of `generate` there, token for token."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from inferd.engine.protocol import SamplingParams
from shared.errors import InvalidRequest
from tests.unit.engine.checkpoints import make_checkpoint
from tests.unit.engine.sessions import EngineSession

from .engine_cases import (
    DEVICE,
    GREEDY,
    NEW_TOKENS,
    answers_of,
    bfloat16_folder,
    float32_folder,
    generated,
    needs_cuda,
    on_device,
    opened,
    prompts_of,
    serve,
    versions,
)

pytestmark = needs_cuda
PROMPTS = prompts_of(21)


@pytest.fixture
def session() -> Iterator[EngineSession]:
    with opened() as made:
        yield made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return float32_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def two(folder: Path) -> list[dict[str, torch.Tensor]]:
    return versions(folder, 2)


@pytest.fixture(scope="module")
def expected(folder: Path, two: list[dict[str, torch.Tensor]]) -> list[list[list[int]]]:
    return [generated(folder, tensors, PROMPTS) for tensors in two]


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize(
    "settings",
    [
        {"max_sequences": 1},
        {"max_sequences": 32},
        {"max_sequences": 5, "block_tokens": 4},
        {"max_batch_tokens": 7, "max_sequences": 3},  # no chunk ends where a block does
    ],
    ids=["alone", "batched", "odd", "chunked"],
)
def test_equal_to_generate(
    session: EngineSession,
    folder: Path,
    two: list[dict[str, torch.Tensor]],
    expected: list[list[list[int]]],
    settings: dict[str, int],
    graphs: bool,
) -> None:
    engine = serve(session, folder, two[0], cuda_graphs=graphs, **settings)
    assert bool(engine._graphs) == graphs
    assert answers_of(session, engine, PROMPTS) == expected[0]


def test_equal_after_preemptions(
    session: EngineSession, folder: Path, two: list[dict[str, torch.Tensor]], expected: list[list[list[int]]]
) -> None:
    probe = serve(session, folder, two[0], is_warm=False)
    assert probe._cache is not None
    longest = max(map(len, PROMPTS)) + NEW_TOKENS
    room = probe._cache.geometry.bytes_per_token * (longest + 12) // 4 * 4
    engine = serve(session, folder, two[0], block_tokens=4, kv_cache_bytes=room)
    assert answers_of(session, engine, PROMPTS) == expected[0]
    assert engine.load().preemptions > 0


def test_two_versions_interleaved(
    session: EngineSession, folder: Path, two: list[dict[str, torch.Tensor]], expected: list[list[list[int]]]
) -> None:
    assert expected[0] != expected[1]
    engine = serve(session, folder, two[0])
    session.build(engine, 1, two[1], folder, "1")
    engine.warm(1)
    answers = [[session.submit(engine, prompt, GREEDY, slot)[1] for slot in range(2)] for prompt in PROMPTS]
    for pair in answers:
        for answer in pair:
            answer.wait()
    assert [[pair[slot].tokens for pair in answers] for slot in range(2)] == expected


def test_a_version_prepared_beside_it_changes_no_answer(
    session: EngineSession, folder: Path, two: list[dict[str, torch.Tensor]], expected: list[list[list[int]]]
) -> None:
    engine = serve(session, folder, two[0])

    def prepare() -> None:
        for fill in ("1", "2", "3"):
            session.build(engine, 1, two[1], folder, fill)
            engine.warm(1)
            engine.retire(1)

    thread = threading.Thread(target=prepare)
    thread.start()
    while thread.is_alive():
        assert answers_of(session, engine, PROMPTS) == expected[0]
    thread.join()
    session.build(engine, 1, two[1], folder, "4")
    engine.warm(1)
    assert answers_of(session, engine, PROMPTS, slot=1) == expected[1]
    assert answers_of(session, engine, PROMPTS) == expected[0]


def test_a_moved_sequence_goes_on_with_its_keys_and_values(
    session: EngineSession, folder: Path, two: list[dict[str, torch.Tensor]], expected: list[list[list[int]]]
) -> None:
    engine = serve(session, folder, two[0])
    session.build(engine, 1, two[0], folder, "1")
    engine.warm(1)
    running = [session.submit(engine, prompt, GREEDY) for prompt in PROMPTS]
    for _, answer in running:
        answer.next()
    for number, _ in running:
        engine.move(number, 1, keep_kv=True)
    for (_, answer), tokens in zip(running, expected[0], strict=True):
        answer.wait()
        assert answer.tokens == tokens


def test_a_seed_gives_the_same_answer_alone_and_in_a_batch(
    session: EngineSession, folder: Path, two: list[dict[str, torch.Tensor]]
) -> None:
    engine = serve(session, folder, two[0])
    wishes = [
        SamplingParams(NEW_TOKENS, seed=1, ignore_eos=True),
        SamplingParams(NEW_TOKENS, seed=2, top_k=7, temperature=0.8, ignore_eos=True),
        SamplingParams(NEW_TOKENS, seed=3, top_p=0.9, frequency_penalty=0.4, ignore_eos=True),
        SamplingParams(NEW_TOKENS, seed=4, min_p=0.05, repetition_penalty=1.2, logprobs=3, ignore_eos=True),
        SamplingParams(NEW_TOKENS, temperature=0, logit_bias={9: 1.0}, ignore_eos=True),
    ]
    alone = [answers_of(session, engine, [PROMPTS[9]], params)[0] for params in wishes]
    together = [session.submit(engine, PROMPTS[9], params)[1] for params in wishes]
    for answer, tokens in zip(together, alone, strict=True):
        answer.wait()
        assert answer.tokens == tokens


def test_bfloat16_answers_with_and_without_graphs(session: EngineSession, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, dtype=torch.bfloat16)
    (tensors,) = versions(folder, 1)
    one = SamplingParams(NEW_TOKENS, temperature=0, ignore_eos=True, logprobs=0)
    captured = serve(session, folder, tensors, max_sequences=1)
    eager = serve(session, folder, tensors, max_sequences=1, cuda_graphs=False)
    # One at a time: both compute the same products, so even bfloat16 agrees.
    assert answers_of(session, captured, PROMPTS, one) == answers_of(session, eager, PROMPTS, one)


@pytest.mark.parametrize("graphs", [True, False])
def test_bfloat16_logits_are_within_rounding_of_transformers(
    session: EngineSession, tmp_path: Path, graphs: bool
) -> None:
    folder = bfloat16_folder(tmp_path)
    (tensors,) = versions(folder, 1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(DEVICE).eval()
    engine = serve(session, folder, tensors, max_sequences=8, cuda_graphs=graphs)
    wish = SamplingParams(6, temperature=0, ignore_eos=True, logprobs=20)
    answers = [session.submit(engine, prompt, wish)[1] for prompt in PROMPTS]
    apart: list[torch.Tensor] = []
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        answer.wait()
        # The engine's own tokens are given to both, so that one tie decides nothing that comes after it.
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *answer.tokens]], device=DEVICE)).logits[0].float().cpu()
        said = [entry for output in answer.outputs for entry in output.logprobs]
        assert len(said) == len(answer.tokens) == 6
        for row, (_, best) in zip(logits[len(prompt) - 1 :], said, strict=False):
            found = torch.tensor([item.logprob for item in best])
            ids = torch.tensor([item.token_id for item in best])
            # bfloat16 has 8 significant bits: in units in the last place of the row's largest logit.
            unit = 2.0**-8 * max(1.0, float(row.abs().max()))
            apart.append((found - torch.log_softmax(row, -1)[ids]).abs() / unit)
    units = torch.cat(apart)
    assert float(units.max()) <= 8
    assert float(units.mean()) <= 1


def test_tf32_is_refused(session: EngineSession, folder: Path, two: list[dict[str, torch.Tensor]]) -> None:
    engine = session.open()
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        with pytest.raises(InvalidRequest, match="TF32"):
            session.build(engine, 0, two[0], folder, "0")
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
    session.build(engine, 0, two[0], folder, "0")


def test_tensors_on_two_devices_are_refused(
    session: EngineSession, folder: Path, two: list[dict[str, torch.Tensor]]
) -> None:
    engine = session.open()
    name = next(iter(two[0]))
    with pytest.raises(InvalidRequest, match="2 devices"):
        session.build(engine, 0, {**two[0], name: two[0][name].cpu()}, folder, "0")
    session.build(engine, 0, on_device(two[0]), folder, "0")
    assert answers_of(session, engine, PROMPTS[:1])
