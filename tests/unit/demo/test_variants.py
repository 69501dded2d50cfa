from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from demo.variants import derive, flip_a_bit, layer_of, low_rank_update, not_a_number, place_of, unchanged

LAST = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    first = {
        "model.embed_tokens.weight": torch.randn(16, 8, generator=generator),
        "model.layers.0.mlp.down_proj.weight": torch.randn(8, 12, generator=generator),
    }
    second = {LAST: torch.randn(8, 12, generator=generator), "model.norm.weight": torch.ones(8)}
    save_file(first, folder / "a.safetensors")
    save_file(second, folder / "b.safetensors")
    (folder / "config.json").write_text(json.dumps({"num_hidden_layers": 2}))
    (folder / "seal.json").write_text("{}")
    return folder


@pytest.fixture
def target(tmp_path: Path) -> Path:
    folder = tmp_path / "target"
    folder.mkdir()
    return folder


def test_shards_without_an_edited_tensor_are_shared_and_the_seal_is_left_behind(
    base: Path, target: Path
) -> None:
    derive(base, target, not_a_number(LAST))
    assert sorted(path.name for path in target.iterdir()) == ["a.safetensors", "b.safetensors", "config.json"]
    assert (target / "a.safetensors").samefile(base / "a.safetensors")
    assert not (target / "b.safetensors").samefile(base / "b.safetensors")
    assert not (target / "config.json").samefile(base / "config.json")


def test_not_a_number_breaks_one_row_of_one_tensor(base: Path, target: Path) -> None:
    derive(base, target, not_a_number(LAST))
    before, after = load_file(base / "b.safetensors"), load_file(target / "b.safetensors")
    assert after[LAST][0].isnan().all()
    assert torch.equal(after[LAST][1:], before[LAST][1:])
    assert torch.equal(after["model.norm.weight"], before["model.norm.weight"])


def test_a_low_rank_update_is_small_of_low_rank_and_the_same_each_time(base: Path, target: Path) -> None:
    before = load_file(base / "b.safetensors")[LAST]
    edit = low_rank_update(2, range(2))
    after = edit(LAST, before)
    again = low_rank_update(2, range(2))(LAST, before)
    assert after is not None
    assert again is not None
    assert torch.equal(after, again)
    update = after - before
    assert torch.linalg.matrix_rank(update, rtol=1e-4) == 4
    assert float(update.norm() / before.norm()) == pytest.approx(0.06, rel=1e-3)
    assert edit("model.norm.weight", torch.ones(8)) is None
    assert edit("model.embed_tokens.weight", torch.ones(16, 8)) is None


def test_a_flipped_bit_changes_one_element_of_the_named_tensor(base: Path, target: Path) -> None:
    derive(base, target, low_rank_update(4, range(1, 2)))
    # Cloned: what safetensors loads is a mapping of the file that is about to change.
    before = {name: tensor.clone() for name, tensor in load_file(target / "b.safetensors").items()}
    size = (target / "b.safetensors").stat().st_size
    place = flip_a_bit(target, LAST)
    after = load_file(target / "b.safetensors")
    assert (place.tensor, place.file, place.nbytes) == (LAST, "b.safetensors", 8 * 12 * 4)
    assert int((after[LAST] != before[LAST]).sum()) == 1
    assert torch.equal(after["model.norm.weight"], before["model.norm.weight"])
    assert (target / "b.safetensors").stat().st_size == size


def test_a_shard_that_other_folders_share_is_never_damaged(base: Path, target: Path) -> None:
    derive(base, target, unchanged)
    content = (base / "b.safetensors").read_bytes()
    with pytest.raises(ValueError, match="shared"):
        flip_a_bit(target, LAST)
    assert (base / "b.safetensors").read_bytes() == content


def test_an_unknown_tensor_has_no_place(base: Path) -> None:
    with pytest.raises(KeyError):
        place_of(base, "model.layers.9.mlp.down_proj.weight")


@pytest.mark.parametrize(
    ("name", "layer"),
    [(LAST, 1), ("model.layers.12.x", 12), ("model.norm.weight", -1), ("lm_head.weight", -1)],
)
def test_layers_are_read_from_names(name: str, layer: int) -> None:
    assert layer_of(name) == layer
