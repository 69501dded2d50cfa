"""What a slot of the engine holds: one version at a time, and nothing of it once it is retired."""

from __future__ import annotations

import gc
import traceback
import weakref
from pathlib import Path

import pytest
import torch

import inferd.engine.model
from inferd.engine.protocol import FinishReason, SamplingParams
from shared.errors import InvalidRequest, InvariantError

from .checkpoints import read_tensors, tag_of
from .sessions import GREEDY, LONG, EngineSession


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
