"""The engine as inferd sees it: slots, warming, refusals, and versions that never mix."""

from __future__ import annotations

import gc
import threading
import traceback
import weakref
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import inferd.engine.model
from inferd.engine import warm
from inferd.engine.protocol import SLOTS, Engine, FinishReason, FlipKind, SamplingParams, SequenceOutput
from inferd.engine.transformers_engine import EngineSettings, TransformersEngine
from shared.errors import InvalidRequest, InvariantError, ResourceError, WarmupFailed

from .checkpoints import PROMPTS, make_checkpoint, read_tensors, tag_of, update_low_rank
from .sessions import Answer, EngineSession

GREEDY = SamplingParams(12, temperature=0)
LONG = list(range(1, 90))


def answers_alone(session: EngineSession, folder: Path, tensors: dict[str, torch.Tensor]) -> list[list[int]]:
    """What one version says to the prompts, in an engine of its own."""
    engine = session.open()
    session.build(engine, 0, tensors, folder, "9")
    given = [session.submit(engine, prompt, GREEDY)[1] for prompt in PROMPTS[:8]]
    for answer in given:
        answer.wait()
    return [answer.tokens for answer in given]


def test_it_says_what_it_can_do() -> None:
    engine: Engine = TransformersEngine(EngineSettings())
    assert engine.abilities.flip is FlipKind.POINTER
    assert engine.abilities.serves_two_versions


# --- two versions side by side -------------------------------------------------------------------


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


# --- moves ---------------------------------------------------------------------------------------


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


# --- slots ---------------------------------------------------------------------------------------


def test_a_slot_with_sequences_is_not_retired(session: EngineSession, tiny_folder: Path) -> None:
    engine = session.open(tiny_folder)
    params = SamplingParams(400, temperature=0, ignore_eos=True)
    number, answer = session.submit(engine, "a", params)
    answer.next()
    with pytest.raises(InvariantError, match="retired with sequences"):
        engine.retire(0)
    engine.cancel(number)
    assert answer.wait().finish is FinishReason.CANCELLED
    engine.retire(0)


def test_slots_are_used_one_at_a_time(session: EngineSession, tiny_folder: Path) -> None:
    engine = session.open(tiny_folder)
    tensors = read_tensors(tiny_folder)
    with pytest.raises(InvariantError, match="still holds"):
        engine.build(0, tag_of("v2"), tensors, tiny_folder)
    with pytest.raises(InvariantError, match="is empty"):
        engine.warm(1)
    with pytest.raises(InvariantError, match="is empty"):
        engine.retire(1)
    with pytest.raises(InvariantError, match="no slot 2"):
        engine.build(2, tag_of("v2"), tensors, tiny_folder)


def test_another_kv_geometry_is_refused_while_the_cache_is_in_use(
    session: EngineSession, tiny_folder: Path, tiny_bf16_folder: Path
) -> None:
    engine = session.open(tiny_folder)
    tensors = read_tensors(tiny_bf16_folder)
    with pytest.raises(InvalidRequest, match=r"in bfloat16 .* in float32"):
        engine.build(1, tag_of("v2"), tensors, tiny_bf16_folder)
    session.submit(engine, LONG, GREEDY)[1].wait()
    engine.retire(0)
    engine.build(1, tag_of("v2"), tensors, tiny_bf16_folder)
    assert session.submit(engine, LONG, GREEDY, slot=1)[1].wait().finish is FinishReason.LENGTH


def count_tensors() -> int:
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


def test_two_hundred_rebuilds_leave_nothing_behind(session: EngineSession, tiny_folder: Path) -> None:
    tensors = read_tensors(tiny_folder)
    engine = session.open(tiny_folder)
    session.submit(engine, LONG, GREEDY)[1].wait()

    def round_trip(number: int) -> list[weakref.ref[object]]:
        # Whatever shares a tensor's memory keeps its array alive, as it would a mapping.
        arrays = {name: tensor.numpy().copy() for name, tensor in tensors.items()}
        mapped = {name: torch.from_numpy(array) for name, array in arrays.items()}
        engine.build(1, tag_of(f"v{number}", f"{number % 16:x}"), mapped, tiny_folder)
        if number % 20 == 0:
            engine.warm(1)
        session.submit(engine, LONG[:20], SamplingParams(2, temperature=0), slot=1)[1].wait()
        engine.retire(1)
        return [weakref.ref(array) for array in arrays.values()]

    round_trip(0)
    free = engine.load().kv_blocks_free, engine.load().kv_blocks_cached
    gc.collect()
    before = count_tensors()
    gc.disable()
    try:
        for number in range(1, 201):
            # Gone at once, not when the collector comes by: the mapping behind them must go.
            assert not [ref for ref in round_trip(number) if ref() is not None]
    finally:
        gc.enable()
    gc.collect()
    assert count_tensors() <= before
    assert (engine.load().kv_blocks_free, engine.load().kv_blocks_cached) == free


@pytest.mark.parametrize("where", ["the model", "the cache", "the probe"])
def test_a_failed_build_lets_go_of_its_weights(
    session: EngineSession,
    tiny_folder: Path,
    tiny_bf16_folder: Path,
    where: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_module = inferd.engine.model._make_module

    def make_cyclic(config: object) -> object:
        module = make_module(config)
        module.__dict__["itself"] = module  # as fused norms and many a model's code do
        return module

    monkeypatch.setattr("inferd.engine.model._make_module", make_cyclic)
    engine = session.open(tiny_folder)
    folder = tiny_bf16_folder if where == "the cache" else tiny_folder
    stored = read_tensors(folder)

    def refuse(*_: object) -> None:
        raise InvalidRequest("planted")

    if where != "the cache":
        at = "model._refuse_meta" if where == "the model" else "transformers_engine.probe_model"
        monkeypatch.setattr(f"inferd.engine.{at}", refuse)

    def attempt() -> list[weakref.ref[object]]:
        arrays = [tensor.view(torch.uint8).numpy().copy() for tensor in stored.values()]
        mapped = {
            name: torch.from_numpy(array).view(tensor.dtype)
            for (name, tensor), array in zip(stored.items(), arrays, strict=True)
        }
        try:
            engine.build(1, tag_of("v2", "2"), mapped, folder)
        except InvalidRequest as error:
            traceback.clear_frames(error.__traceback__)  # they hold the tensors, as Preparer knows
        else:
            raise AssertionError("the build did not fail")
        return [weakref.ref(array) for array in arrays]

    gc.collect()
    gc.disable()
    try:
        assert not [ref for ref in attempt() if ref() is not None]
    finally:
        gc.enable()


# --- warming -------------------------------------------------------------------------------------


def test_warming_reports_what_it_saw(session: EngineSession, tiny_folder: Path) -> None:
    engine = session.open(tiny_folder)
    steps, blocks = engine.load().steps, engine.load().kv_blocks_free
    report = engine.warm(0)
    assert report.prompts == len(report.first_tokens) > 2
    assert (engine.load().steps, engine.load().kv_blocks_free) == (steps, blocks)
    assert engine.warm(0).first_tokens == report.first_tokens


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model.layers.1.mlp.up_proj.weight", float("nan")),
        ("model.layers.2.self_attn.v_proj.weight", float("inf")),
        ("model.norm.weight", float("nan")),
        ("model.embed_tokens.weight", float("nan")),
    ],
)
def test_a_layer_of_nan_is_found_and_named(
    session: EngineSession, tiny_folder: Path, name: str, value: float
) -> None:
    tensors = read_tensors(tiny_folder)
    tensors[name] = torch.full_like(tensors[name], value)
    engine = session.open(tiny_folder)
    engine.build(1, tag_of("v2"), tensors, tiny_folder)
    with pytest.raises(WarmupFailed) as raised:
        engine.warm(1)
    assert raised.value.facts["tensor"] == name
    assert name.removesuffix(".weight") in raised.value.message
    engine.retire(1)
    assert session.submit(engine, LONG, GREEDY)[1].wait().finish is FinishReason.LENGTH


def test_a_nan_that_no_prompt_meets_is_found(session: EngineSession, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "untied", is_tied=False)
    tensors = read_tensors(folder)
    engine = session.open()
    engine.build(0, tag_of("v1"), tensors, folder)
    engine.warm(0)
    met = {token for prompt in warm._prompts(engine._models[0]) for token in prompt}
    row = max(set(range(257)) - met)
    tensors["model.embed_tokens.weight"][row, 5] = float("nan")
    place = f"'model.embed_tokens.weight' holds nan at element {row * 48 + 5}"
    with pytest.raises(WarmupFailed, match=place):
        engine.warm(0)


def test_numbers_that_overflow_are_found(session: EngineSession, tiny_folder: Path) -> None:
    tensors = read_tensors(tiny_folder)
    name = "model.layers.0.mlp.down_proj.weight"
    tensors[name] = torch.full_like(tensors[name], 3e38)  # finite, but no sum of two of it is
    engine = session.open()
    session.build(engine, 0, tensors, tiny_folder, "1")
    with pytest.raises(WarmupFailed) as raised:
        engine.warm(0)
    assert raised.value.facts["module"] == "model.layers.0.mlp.down_proj"
    assert raised.value.facts["tensor"] == ""


# --- requests ------------------------------------------------------------------------------------


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
        for item in answer.outputs[0].logprobs[0][1]:
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
