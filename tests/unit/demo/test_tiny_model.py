"""The generated model that stands in where the real one cannot be downloaded."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from demo.conversion import cast_checkpoint, generate_tiny
from demo.reference import reference_answers
from demo.traffic import PROMPTS
from demo.variants import derive, low_rank_update


def test_it_is_the_same_each_time(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        generate_tiny(tmp_path / name)
    first, second = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("a", "b")
    )
    assert first
    assert first == second


def test_its_update_answers_most_prompts_otherwise(tmp_path: Path) -> None:
    v1, v2 = tmp_path / "v1", tmp_path / "v2"
    v1.mkdir()
    v2.mkdir()
    generate_tiny(v1)
    derive(v1, v2, low_rank_update(2, range(4)))
    texts = []
    for folder in (v1, v2):
        (folder / "seal.json").write_text(folder.name)
        texts.append(reference_answers(folder, PROMPTS, 8, tmp_path / f"{folder.name}.json", "cpu"))
    differing = sum(texts[0][prompt.key] != texts[1][prompt.key] for prompt in PROMPTS)
    assert differing * 2 > len(PROMPTS)


def test_references_are_computed_again_for_another_seal(tmp_path: Path) -> None:
    folder, cache = tmp_path / "v1", tmp_path / "cache.json"
    folder.mkdir()
    generate_tiny(folder)
    (folder / "seal.json").write_text("1")
    first = reference_answers(folder, PROMPTS[:1], 4, cache, "cpu")
    cache.write_text(
        cache.read_text().replace(f'"{PROMPTS[0].key}": ', f'"{PROMPTS[0].key}": "cached", "x": ')
    )
    assert reference_answers(folder, PROMPTS[:1], 4, cache, "cpu")[PROMPTS[0].key] == "cached"
    (folder / "seal.json").write_text("2")
    assert reference_answers(folder, PROMPTS[:1], 4, cache, "cpu") == first


def test_casting_keeps_every_tensor_and_halves_its_bytes(tmp_path: Path) -> None:
    source, target = tmp_path / "f32", tmp_path / "bf16"
    source.mkdir()
    target.mkdir()
    generate_tiny(source)
    cast_checkpoint(source, target)
    assert {path.name for path in target.iterdir()} == {path.name for path in source.iterdir()}
    for path in source.glob("*.safetensors"):
        for name, tensor in load_file(path).items():
            cast = load_file(target / path.name)[name]
            assert cast.dtype is torch.bfloat16
            assert torch.equal(cast, tensor.to(torch.bfloat16))
    assert '"dtype": "bfloat16"' in (target / "config.json").read_text()
