"""In float32 the engine's greedy answers are those of `transformers`' own `generate`, token for token."""

from __future__ import annotations

from pathlib import Path

import pytest

from inferd.engine.protocol import SamplingParams
from tests.support.reference import greedy_tokens

from .checkpoints import NEW_TOKENS, PROMPTS
from .sessions import EngineSession

GREEDY = SamplingParams(NEW_TOKENS, temperature=0)


@pytest.fixture(scope="module")
def expected(f32_folder: Path) -> dict[str, list[int]]:
    return {prompt: list(ids) for prompt, ids in greedy_tokens(f32_folder, PROMPTS, NEW_TOKENS).items()}


def test_there_are_enough_prompts() -> None:
    assert len(set(PROMPTS)) >= 20


def test_alone(session: EngineSession, f32_folder: Path, expected: dict[str, list[int]]) -> None:
    engine = session.open(f32_folder)
    got = {}
    for prompt in PROMPTS:
        _, answer = session.submit(engine, prompt, GREEDY)
        answer.wait()
        got[prompt] = answer.tokens
    assert got == expected


def test_batched(session: EngineSession, f32_folder: Path, expected: dict[str, list[int]]) -> None:
    engine = session.open(f32_folder)
    answers = {prompt: session.submit(engine, prompt, GREEDY)[1] for prompt in PROMPTS}
    for answer in answers.values():
        answer.wait()
    assert {prompt: answer.tokens for prompt, answer in answers.items()} == expected


def test_prompts_in_chunks(session: EngineSession, f32_folder: Path, expected: dict[str, list[int]]) -> None:
    # Seven tokens a step: no chunk ends where a block does.
    engine = session.open(f32_folder, max_batch_tokens=7, max_sequences=3)
    answers = {prompt: session.submit(engine, prompt, GREEDY)[1] for prompt in PROMPTS}
    for answer in answers.values():
        answer.wait()
    assert {prompt: answer.tokens for prompt, answer in answers.items()} == expected


def test_prefix_found_again(session: EngineSession, f32_folder: Path, expected: dict[str, list[int]]) -> None:
    engine = session.open(f32_folder, block_tokens=4)
    cached = 0
    for _ in range(2):
        for prompt in PROMPTS[-6:]:
            _, answer = session.submit(engine, prompt, GREEDY)
            cached += answer.wait().cached_tokens
            assert answer.tokens == expected[prompt]
    assert cached >= 4 * len(PROMPTS[-6:])


def test_preempted(session: EngineSession, f32_folder: Path, expected: dict[str, list[int]]) -> None:
    probe = session.open(f32_folder)
    longest = max(len(probe.tokenizer(0).encode(prompt, add_special_tokens=True)) for prompt in PROMPTS)
    assert probe._cache is not None
    per_token = probe._cache.geometry.bytes_per_token
    # Room for the longest sequence and a little: the others are preempted again and again.
    tokens = longest + NEW_TOKENS + 8
    engine = session.open(f32_folder, block_tokens=4, kv_cache_bytes=per_token * (tokens // 4 + 1) * 4)
    answers = {prompt: session.submit(engine, prompt, GREEDY)[1] for prompt in PROMPTS}
    for answer in answers.values():
        answer.wait()
    assert {prompt: answer.tokens for prompt, answer in answers.items()} == expected
    assert engine.load().preemptions > 0
