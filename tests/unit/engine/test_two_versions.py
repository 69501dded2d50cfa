"""Versions side by side in one engine: they never mix, and a sequence moves from one to the other."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import torch

from inferd.engine.protocol import SLOTS, FinishReason, SamplingParams, SequenceOutput
from inferd.engine.transformers_engine import TransformersEngine

from .checkpoints import PROMPTS, read_tensors, tag_of, update_low_rank
from .sessions import GREEDY, LONG, Answer, EngineSession


def answers_alone(session: EngineSession, folder: Path, tensors: dict[str, torch.Tensor]) -> list[list[int]]:
    """What one version says to the prompts, in an engine of its own."""
    engine = session.open()
    session.build(engine, 0, tensors, folder, "9")
    given = [session.submit(engine, prompt, GREEDY)[1] for prompt in PROMPTS[:8]]
    for answer in given:
        answer.wait()
    return [answer.tokens for answer in given]


def test_each_slot_gives_its_own_versions_answers(session: EngineSession, f32_folder: Path) -> None:
    old = read_tensors(f32_folder)
    new = update_low_rank(old)
    wanted = {0: answers_alone(session, f32_folder, old), 1: answers_alone(session, f32_folder, new)}
    assert wanted[0] != wanted[1]

    engine = session.open(max_batch_tokens=48, max_sequences=16)
    session.build(engine, 0, old, f32_folder, "1")
    session.build(engine, 1, new, f32_folder, "2")
    order: list[int] = []
    given: dict[int, list[Answer]] = {0: [], 1: []}
    number = 1000
    for prompt in PROMPTS[:8]:
        for slot in range(SLOTS):
            answer = Answer()

            def sink(output: SequenceOutput, slot: int = slot, answer: Answer = answer) -> None:
                order.append(slot)
                answer(output)

            number += 1
            tokens = engine.tokenizer(slot).encode(prompt, add_special_tokens=True)
            engine.submit(number, slot, tokens, GREEDY, sink)
            given[slot].append(answer)
    for slot in range(SLOTS):
        for answer in given[slot]:
            answer.wait()
        assert [answer.tokens for answer in given[slot]] == wanted[slot]
    turns = sum(one != other for one, other in pairwise(order))
    assert turns > 10, "the slots took turns"


def test_a_prefix_is_found_by_its_own_version_only(session: EngineSession, tiny_folder: Path) -> None:
    old = read_tensors(tiny_folder)
    new = update_low_rank(old)
    engine = session.open()
    session.build(engine, 0, old, tiny_folder, "1")
    session.build(engine, 1, new, tiny_folder, "2")
    first = session.submit(engine, LONG, GREEDY, slot=0)[1]
    assert first.wait().cached_tokens == 0
    other = session.submit(engine, LONG, GREEDY, slot=1)[1]
    assert other.wait().cached_tokens == 0
    assert first.tokens != other.tokens
    for slot, before in ((0, first), (1, other)):
        again = session.submit(engine, LONG, GREEDY, slot=slot)[1]
        assert again.wait().cached_tokens == 80
        assert again.tokens == before.tokens


def test_a_retired_version_leaves_no_prefix(session: EngineSession, tiny_folder: Path) -> None:
    tensors = read_tensors(tiny_folder)
    engine = session.open(tiny_folder)
    session.submit(engine, LONG, GREEDY)[1].wait()
    assert engine.load().kv_blocks_cached > 0
    engine.retire(0)
    assert engine.load().kv_blocks_cached == 0
    engine.build(0, tag_of("v1"), tensors, tiny_folder)  # the very same digest
    assert session.submit(engine, LONG, GREEDY)[1].wait().cached_tokens == 0


def test_one_version_in_both_slots_shares_prefixes_until_both_are_gone(
    session: EngineSession, tiny_folder: Path
) -> None:
    engine = session.open(tiny_folder)
    engine.build(1, tag_of("v1"), read_tensors(tiny_folder), tiny_folder)
    session.submit(engine, LONG, GREEDY, slot=0)[1].wait()
    engine.retire(0)
    assert session.submit(engine, LONG, GREEDY, slot=1)[1].wait().cached_tokens == 80


def test_what_an_earlier_sequence_left_in_the_cache_is_not_seen(
    session: EngineSession, tiny_folder: Path
) -> None:
    clean = session.open(tiny_folder)
    wanted = session.submit(clean, LONG[:19], GREEDY)[1]
    wanted.wait()
    engine = session.open(tiny_folder)
    assert engine._cache is not None
    engine._cache._data.fill_(float("nan"))
    given = [session.submit(engine, prompt, GREEDY)[1] for prompt in (LONG[:19], LONG[:3])]
    assert all(answer.wait().finish is FinishReason.LENGTH for answer in given)
    assert given[0].tokens == wanted.tokens


def test_building_beside_running_sequences_does_not_change_them(
    session: EngineSession, f32_folder: Path
) -> None:
    tensors = read_tensors(f32_folder)
    wanted = answers_alone(session, f32_folder, tensors)
    engine = session.open(f32_folder)
    params = SamplingParams(200, temperature=0, ignore_eos=True)
    running = session.submit(engine, PROMPTS[0], params)[1]
    running.next()
    for _ in range(2):
        session.build(engine, 1, update_low_rank(tensors), f32_folder, "2")
        engine.warm(1)
        engine.retire(1)
    given = [session.submit(engine, prompt, GREEDY)[1] for prompt in PROMPTS[:8]]
    for answer in given:
        answer.wait()
    assert [answer.tokens for answer in given] == wanted
    session.cancel_all(engine)


def moved_after(
    session: EngineSession, engine: TransformersEngine, count: int, *, keep_kv: bool
) -> list[int]:
    """Tokens of a sequence that moves from slot 0 to slot 1 after `count` of them."""
    answer = Answer()

    def sink(output: SequenceOutput) -> None:
        answer(output)
        if len(answer.tokens) == count:
            engine.move(900, 1, keep_kv=keep_kv)

    engine.submit(900, 0, LONG, GREEDY, sink)
    answer.wait()
    return answer.tokens


def test_a_sequence_restarts_on_the_new_weights(session: EngineSession, tiny_folder: Path) -> None:
    old = read_tensors(tiny_folder)
    new = update_low_rank(old)
    engine = session.open()
    session.build(engine, 0, old, tiny_folder, "1")
    session.build(engine, 1, new, tiny_folder, "2")
    tokens = moved_after(session, engine, 5, keep_kv=False)
    before = session.submit(engine, LONG, GREEDY, slot=0)[1]
    before.wait()
    assert tokens[:5] == before.tokens[:5]
    rest = SamplingParams(7, temperature=0)
    after = session.submit(engine, LONG + tokens[:5], rest, slot=1)[1]
    after.wait()
    assert tokens[5:] == after.tokens
    assert engine.load().sequences_by_slot == (0, 0)


def test_a_sequence_goes_on_over_the_kv_it_has(session: EngineSession, tiny_folder: Path) -> None:
    tensors = read_tensors(tiny_folder)
    engine = session.open()
    session.build(engine, 0, tensors, tiny_folder, "1")
    session.build(engine, 1, tensors, tiny_folder, "2")  # the same weights under another digest
    steps = engine.load().steps
    tokens = moved_after(session, engine, 5, keep_kv=True)
    assert engine.load().steps - steps <= 13, "nothing was computed twice"
    unmoved = session.submit(engine, LONG, GREEDY, slot=0)[1]
    unmoved.wait()
    assert tokens == unmoved.tokens
    # What was computed under two versions is nobody's prefix.
    again = session.submit(engine, LONG + tokens, GREEDY, slot=1)[1]
    assert again.wait().cached_tokens == 0
