"""Holding real folders against their seals: precise about what differs."""

from __future__ import annotations

from pathlib import Path

import pytest

from loaderd.checkpoint.checkpoint import open_directory
from loaderd.checkpoint.header import TensorSource
from loaderd.seal.check import check_against, check_tensor, verify_directory
from loaderd.seal.create import seal_directory
from loaderd.seal.document import Seal, read_seal
from shared.digest import LEAF_BYTES
from shared.errors import CheckpointError, DigestMismatch, InvariantError
from tests.unit.checkpoint_files import Tensor, damage, write_single
from tests.unit.sealed_folder.shards import BIG


def source_of(folder: Path, name: str) -> TensorSource:
    with open_directory(folder) as checkpoint:
        return next(tensor for tensor in checkpoint.tensors if tensor.name == name)


def held_against_seal(folder: Path) -> None:
    with open_directory(folder) as checkpoint:
        assert checkpoint.seal_bytes is not None
        check_against(checkpoint, read_seal(checkpoint.seal_bytes))


@pytest.mark.parametrize(
    ("leaf", "offset"), [(0, 0), (0, LEAF_BYTES - 1), (3, 3 * LEAF_BYTES), (5, len(BIG) - 1)]
)
def test_damage_is_located_to_file_tensor_and_leaf(folder: Path, leaf: int, offset: int) -> None:
    seal_directory(folder)
    source = source_of(folder, "big")
    damage(folder / source.file, source.file_offset + offset)
    held_against_seal(folder)  # sizes and tables agree: only the bytes differ
    with pytest.raises(DigestMismatch, match=f"leaf {leaf} is") as caught:
        verify_directory(folder)
    assert (caught.value.file, caught.value.tensor) == ("a.safetensors", "big")
    assert caught.value.byte == source.file_offset + leaf * LEAF_BYTES


@pytest.mark.parametrize("where", ["metadata", "stray tensor"])
def test_damage_outside_all_tensors_is_found_as_well(folder: Path, where: str) -> None:
    path = folder / "b.safetensors"
    seal_directory(folder)
    damage(
        path, path.stat().st_size - 1 if where == "stray tensor" else path.read_bytes().index(b'"stray"') + 1
    )
    with pytest.raises(DigestMismatch, match="the seal says") as caught:
        verify_directory(folder)
    assert (caught.value.file, caught.value.tensor) == ("b.safetensors", "")


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("config.json", '"hidden_size": 4', '"hidden_size": 5'),
        ("tokenizer.json", "{}", "[]"),
        ("model.safetensors.index.json", '"total_size": 0', '"total_size": 1'),
    ],
)
def test_changed_documents_are_found_before_loading(folder: Path, name: str, before: str, after: str) -> None:
    seal_directory(folder)
    text = (folder / name).read_text()
    assert before in text
    (folder / name).write_text(text.replace(before, after))
    with pytest.raises(DigestMismatch, match="the seal says") as caught:
        held_against_seal(folder)
    assert caught.value.file == name


def test_missing_added_and_resized_files_are_named(folder: Path) -> None:
    seal_directory(folder)
    (folder / "tokenizer.json").rename(folder / "vocab.json")
    with pytest.raises(CheckpointError, match=r"^tokenizer\.json: is in the seal and not in the folder"):
        held_against_seal(folder)
    (folder / "vocab.json").rename(folder / "tokenizer.json")
    (folder / "vocab.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"^vocab\.json: is in the folder and not in the seal"):
        held_against_seal(folder)
    (folder / "vocab.json").unlink()
    (folder / "tokenizer.json").write_text("{} ")
    with pytest.raises(CheckpointError, match=r"^tokenizer\.json: has 3 bytes, the seal says 2"):
        held_against_seal(folder)


def other_seal(tmp_path: Path, tensors: dict[str, Tensor]) -> Seal:
    return seal_directory(write_single(tmp_path / "other", tensors))


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({"x": ("U8", [4], b"1234"), "y": ("U8", [2], b"56")}, "is in the seal and not in the file"),
        ({"w": ("U8", [4], b"1234"), "x": ("U8", [2], b"56")}, "is in the seal and not in the file"),
        ({"w": ("U8", [2, 2], b"1234"), "y": ("U8", [2], b"56")}, r"is U8 \[4\], the seal says U8 \[2, 2\]"),
        ({"w": ("I8", [4], b"1234"), "y": ("U8", [2], b"56")}, r"is U8 \[4\], the seal says I8 \[4\]"),
    ],
)
def test_another_tensor_table_is_refused(tmp_path: Path, tensors: dict[str, Tensor], reason: str) -> None:
    folder = write_single(tmp_path / "m-v1", {"w": ("U8", [4], b"1234"), "y": ("U8", [2], b"56")})
    seal = other_seal(tmp_path, tensors)
    own = seal_directory(folder)
    with open_directory(folder) as checkpoint, pytest.raises(CheckpointError, match=reason) as caught:
        check_against(checkpoint, Seal(seal.digest, own.files, seal.tensors))
    assert caught.value.tensor


def test_a_tensor_the_seal_does_not_know_is_refused(tmp_path: Path) -> None:
    folder = write_single(tmp_path / "m-v1", {"w": ("U8", [4], b"1234"), "y": ("U8", [2], b"56")})
    seal = seal_directory(folder)
    known = {"w": seal.tensors["w"]}
    with (
        open_directory(folder) as checkpoint,
        pytest.raises(CheckpointError, match="not in the seal") as caught,
    ):
        check_against(checkpoint, Seal(seal.digest, seal.files, known))
    assert (caught.value.file, caught.value.tensor) == ("model.safetensors", "y")


def test_a_loaded_tensor_is_held_against_leaves_and_crc32(folder: Path) -> None:
    seal = seal_directory(folder)
    source, sealed = source_of(folder, "big"), seal.tensors["big"]
    check_tensor(source, sealed, leaves=sealed.leaves, crc32=sealed.crc32)
    with pytest.raises(DigestMismatch, match="a wrong seal"):
        check_tensor(source, sealed, leaves=sealed.leaves, crc32=sealed.crc32 ^ 1)
    with pytest.raises(InvariantError, match="another size"):
        check_tensor(source, sealed, leaves=sealed.leaves[32:], crc32=sealed.crc32)


def test_a_folder_that_changes_while_it_is_verified(folder: Path) -> None:
    seal_directory(folder)

    def write(done: int, total: int) -> None:
        if done == total:
            (folder / "tokenizer.json").write_text("[]")

    with pytest.raises(CheckpointError, match="was replaced while it was read"):
        verify_directory(folder, progress=write)


def test_a_folder_that_is_sealed_while_it_is_verified(folder: Path) -> None:
    seal_directory(folder)

    def seal_too(done: int, total: int) -> None:
        if done == total:
            seal_directory(folder)

    with pytest.raises(CheckpointError) as caught:
        verify_directory(folder, progress=seal_too)
    assert str(caught.value) == (
        "seal.json: was replaced while the folder was read: the folder is being sealed or copied over; "
        "try again when nothing writes to the folder"
    )


def test_an_unsealed_folder_cannot_be_verified(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"^seal\.json: does not exist"):
        verify_directory(folder)
