"""The engine as inferd sees it: what it can do, what it takes and refuses, and answers like transformers'."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from inferd.engine.protocol import Engine, FlipKind, SamplingParams, SequenceOutput
from inferd.engine.transformers_engine import EngineSettings, TransformersEngine
from shared.errors import InvalidRequest, ResourceError

from .checkpoints import PROMPTS
from .sessions import GREEDY, LONG, EngineSession


def test_it_says_what_it_can_do() -> None:
    engine: Engine = TransformersEngine(EngineSettings())
    assert engine.abilities.flip is FlipKind.POINTER
    assert engine.abilities.serves_two_versions


def test_what_can_never_fit_is_refused(session: EngineSession, tiny_folder: Path) -> None:
    engine = session.open(tiny_folder, max_model_len=100)
    assert engine.max_model_len(0) == 100
    with pytest.raises(InvalidRequest, match="89 prompt tokens and 12 to generate exceed the 100"):
        session.submit(engine, LONG, GREEDY)
    with pytest.raises(InvalidRequest, match="token 257"):
        session.submit(engine, [257], GREEDY)
    with pytest.raises(InvalidRequest, match="token -1"):
        session.submit(engine, [1], SamplingParams(1, logit_bias={-1: 1.0}))
    with pytest.raises(InvalidRequest, match="at least one prompt token"):
        session.submit(engine, [], GREEDY)
    small = session.open(tiny_folder, kv_cache_bytes=1 << 15)
    assert small.max_model_len(0) == small.load().kv_blocks_total * 16 < 512
    assert session.open(tiny_folder, max_model_len=99_999_999).max_model_len(0) == 512
    with pytest.raises(InvalidRequest, match="holds no block"):
        session.open(tiny_folder, kv_cache_bytes=100)


def test_a_full_queue_is_said(session: EngineSession, tiny_folder: Path) -> None:
    engine = session.open(tiny_folder, max_waiting=2, max_sequences=1)
    go_on = threading.Event()
    reached = threading.Event()

    def sink(output: SequenceOutput) -> None:
        reached.set()
        go_on.wait(60)

    engine.submit(901, 0, [1], SamplingParams(5, temperature=0, ignore_eos=True), sink)
    assert reached.wait(60)
    given = [session.submit(engine, [2], GREEDY)[1] for _ in range(2)]
    with pytest.raises(ResourceError, match="2 sequences are waiting, 2 may"):
        session.submit(engine, [2], GREEDY)
    assert engine.load().waiting == 2
    go_on.set()
    for answer in given:
        answer.wait()


def test_a_seeded_sequence_is_the_same_alone_and_in_a_crowd(
    session: EngineSession, tiny_folder: Path
) -> None:
    params = SamplingParams(12, temperature=0.8, top_p=0.95, seed=5)
    engine = session.open(tiny_folder)
    alone = session.submit(engine, LONG[:30], params)[1]
    alone.wait()
    crowd = [
        session.submit(engine, LONG[:30], params if number == 3 else SamplingParams(12, seed=number))[1]
        for number in range(7)
    ]
    for answer in crowd:
        answer.wait()
    assert crowd[3].tokens == alone.tokens


def test_logprobs_agree_with_transformers(session: EngineSession, f32_folder: Path) -> None:
    engine = session.open(f32_folder)
    prompt = engine.tokenizer(0).encode(PROMPTS[0], add_special_tokens=True)
    answer = session.submit(engine, prompt, SamplingParams(4, temperature=0, logprobs=3))[1]
    answer.wait()
    model = AutoModelForCausalLM.from_pretrained(f32_folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + answer.tokens])).logits[0]
    wanted = torch.log_softmax(logits, -1)
    said = [entry for output in answer.outputs for entry in output.logprobs]
    assert len(said) == len(answer.tokens)
    for at, (chosen, best) in enumerate(said, start=len(prompt) - 1):
        values, ids = wanted[at].topk(3)
        assert chosen.token_id == best[0].token_id == int(ids[0])
        assert [item.logprob for item in best] == pytest.approx(values.tolist(), abs=1e-3)


def test_bfloat16_logits_are_within_rounding_of_transformers(
    session: EngineSession, bf16_folder: Path
) -> None:
    engine = session.open(bf16_folder)
    model = AutoModelForCausalLM.from_pretrained(bf16_folder, dtype=torch.bfloat16).eval()
    for prompt in PROMPTS[:5]:
        tokens = engine.tokenizer(0).encode(prompt, add_special_tokens=True)
        answer = session.submit(engine, tokens, SamplingParams(1, temperature=0, logprobs=20))[1]
        answer.wait()
        with torch.inference_mode():
            logits = model(torch.tensor([tokens])).logits[0, -1].float()
        wanted = torch.log_softmax(logits, -1)
        # bfloat16 has 8 significant bits: four units in the last place of the largest logit.
        tolerance = 4 * 2.0**-8 * max(1.0, float(logits.abs().max()))
        said = answer.outputs[0].logprobs[0][1]
        assert len(said) == 20
        for item in said:
            assert item.logprob == pytest.approx(float(wanted[item.token_id]), abs=tolerance)


def test_the_tokenizer_renders_and_refuses_chats(session: EngineSession, tiny_folder: Path) -> None:
    tokenizer = session.open(tiny_folder).tokenizer(0)
    tokens = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    assert tokenizer.decode(tokens) == "user: hi\nassistant:"
    with pytest.raises(InvalidRequest, match="refuses the messages"):
        tokenizer.apply_chat_template([{"role": "pirate", "content": "hi"}])


@pytest.mark.parametrize(
    "options",
    [
        {"block_tokens": 0},
        {"kv_cache_bytes": 0},
        {"kv_cache_share": 0},
        {"kv_cache_share": 1},
        {"max_model_len": 1},
        {"max_sequences": 1000},
        {"mixed_batch_tokens": 63},
        {"mixed_batch_tokens": 513},
    ],
)
def test_settings_that_cannot_work_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(InvalidRequest):
        EngineSettings(**options)
