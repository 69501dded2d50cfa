"""Warming: trial prompts that find weights which cannot work, and name them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from inferd.engine import warm
from inferd.engine.protocol import FinishReason
from shared.errors import WarmupFailed

from .checkpoints import make_checkpoint, read_tensors, tag_of
from .sessions import GREEDY, LONG, EngineSession


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
