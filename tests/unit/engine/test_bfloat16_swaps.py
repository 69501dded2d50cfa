"""In bfloat16 the batch decides low bits and with them some tokens: so runs with a swap are compared with
single-version runs of the same batch, and then token for token."""

from __future__ import annotations

from pathlib import Path

from inferd.engine.protocol import SamplingParams
from inferd.engine.transformers_engine import TransformersEngine

from .checkpoints import PROMPTS, read_tensors, update_low_rank
from .sessions import Answer, EngineSession

BATCH = PROMPTS[:6]
GREEDY = SamplingParams(12, temperature=0, ignore_eos=True)


def start_batch(session: EngineSession, engine: TransformersEngine, slot: int) -> list[Answer]:
    """The whole batch in one step: no step comes between two of its submissions."""
    with engine._loop.lock:
        return [session.submit(engine, prompt, GREEDY, slot)[1] for prompt in BATCH]


def tokens_of(answers: list[Answer]) -> list[list[int]]:
    for answer in answers:
        answer.wait()
    return [answer.tokens for answer in answers]


def test_a_swap_and_back_changes_no_token_of_the_same_batch(
    session: EngineSession, bf16_folder: Path
) -> None:
    tensors = read_tensors(bf16_folder)
    # No prompt fills a block, so none is found again: each run computes what the first one did.
    settings = {"block_tokens": 128, "max_batch_tokens": 2048, "mixed_batch_tokens": 2048}
    alone = {}
    for name, weights in (("v1", tensors), ("v2", {**tensors, **update_low_rank(tensors)})):
        engine = session.open(**settings)
        session.build(engine, 0, weights, bf16_folder, name[1])
        alone[name] = tokens_of(start_batch(session, engine, 0))
    assert alone["v1"] != alone["v2"]

    engine = session.open(**settings)
    session.build(engine, 0, tensors, bf16_folder, "1")
    assert tokens_of(start_batch(session, engine, 0)) == alone["v1"], "before the swap"
    old = start_batch(session, engine, 0)
    session.build(engine, 1, {**tensors, **update_low_rank(tensors)}, bf16_folder, "2")
    assert tokens_of(start_batch(session, engine, 1)) == alone["v2"], "after the swap"
    assert tokens_of(old) == alone["v1"], "in flight at the swap"
    assert tokens_of(start_batch(session, engine, 0)) == alone["v1"], "after going back"
