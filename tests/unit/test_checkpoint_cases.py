"""The checkpoint cases C1 to C9 that were seen in public, each with what the user is told."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from loaderd.checkpoint.checkpoint import Checkpoint, open_checkpoint
from loaderd.seal.check import check_against
from loaderd.seal.create import seal_directory
from loaderd.seal.document import read_seal
from shared.errors import CheckpointError
from tests.unit.checkpoint_files import content, pack, ranges, safetensors, write_sharded, write_single

TENSORS = {"a": ("U8", [4], b"aaaa"), "b": ("F32", [2], b"bbbbbbbb")}
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def load(folder: Path) -> Checkpoint:
    return open_checkpoint([folder.parent], folder.name)


def refused(folder: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        load(folder).close()
    return caught.value


def with_file(folder: Path, data: bytes) -> Path:
    write_single(folder, TENSORS)
    (folder / SINGLE).write_bytes(data)
    return folder


@pytest.mark.parametrize("missing", [1, 8, 9, 12])
def test_c1_a_truncated_payload(tmp_path: Path, missing: int) -> None:
    raw = safetensors(TENSORS)
    error = refused(with_file(tmp_path / "m-v1", raw[:-missing]))
    assert error.file == SINGLE
    assert error.tensor == ("b" if missing <= 8 else "a")
    assert error.byte == len(raw) - missing
    assert error.reason.startswith("truncated: it ends at")


def test_c1_a_truncated_header(tmp_path: Path) -> None:
    error = refused(with_file(tmp_path / "m-v1", safetensors(TENSORS)[:20]))
    assert (
        error.reason
        == f"truncated: header claims {len(safetensors(TENSORS)) - 8 - 12} bytes, 12 follow its length"
    )


def test_c1_an_empty_file(tmp_path: Path) -> None:
    assert refused(with_file(tmp_path / "m-v1", b"")).reason == "truncated: 0 bytes, a header length takes 8"


ENTRY = '{"dtype":"U8","shape":[2],"data_offsets":[0,2]}'


@pytest.mark.parametrize("key", ["w", "\\u0077"])
def test_c2_a_duplicate_key(tmp_path: Path, key: str) -> None:
    error = refused(with_file(tmp_path / "m-v1", pack(f'{{"w":{ENTRY},"{key}":{ENTRY}}}', b"xx")))
    assert (error.file, error.tensor, error.reason) == (SINGLE, "w", "duplicate key 'w'")


@pytest.mark.parametrize(
    ("raw", "tensor", "byte", "reason"),
    [
        (ranges((0, 4), (3, 8), 8), "two", 3, "overlaps 'one'"),
        (ranges((0, 4), (0, 4), 4), "two", 0, "overlaps 'one'"),
        (ranges((0, 8), (2, 4), 8), "two", 2, "overlaps 'one'"),
        (ranges((0, 4), (6, 8), 8), "two", 4, "hole of 2 bytes before it"),
        (ranges((1, 4), (4, 8), 8), "one", 0, "hole of 1 bytes before it"),
        (ranges((0, 4), (4, 8), 11), "", 8, "3 trailing bytes after the last tensor"),
    ],
)
def test_c3_overlaps_holes_and_rests(tmp_path: Path, raw: bytes, tensor: str, byte: int, reason: str) -> None:
    error = refused(with_file(tmp_path / "m-v1", raw))
    data_start = 8 + struct.unpack("<Q", raw[:8])[0]
    assert (error.file, error.tensor, error.byte, error.reason) == (SINGLE, tensor, data_start + byte, reason)


@pytest.mark.parametrize("length", [100_000_001, (1 << 63) - 1, (1 << 64) - 1])
def test_c4_a_huge_header_length(tmp_path: Path, length: int) -> None:
    error = refused(with_file(tmp_path / "m-v1", pack("{}", length=length)))
    assert (error.byte, error.reason) == (0, f"header claims {length} bytes, at most 100000000 are allowed")


def test_c4_offsets_beyond_64_bits(tmp_path: Path) -> None:
    wrapped = f'{{"w":{{"dtype":"U8","shape":[2],"data_offsets":[{(1 << 64) - 1},{(1 << 64) + 1}]}}}}'
    error = refused(with_file(tmp_path / "m-v1", pack(wrapped, b"xx")))
    assert (error.tensor, error.reason.split()[0]) == ("w", "hole")


def test_c5_a_data_section_that_is_not_aligned(tmp_path: Path) -> None:
    # A header of odd length puts an F32 at an odd offset: legal, and loaderd reads it anywhere.
    raw = pack('{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}' + " " * 3, b"abcd")
    with load(with_file(tmp_path / "m-v1", raw)) as checkpoint:
        (tensor,) = checkpoint.tensors
        assert tensor.file_offset % 4
        assert os.pread(checkpoint.borrow_fd(SINGLE), 4, tensor.file_offset) == b"abcd"


FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def test_c6_tensors_outside_the_index_are_ignored_and_named(tmp_path: Path) -> None:
    folder = write_sharded(
        tmp_path / "m-v1",
        {
            FIRST: {"a": ("U8", [1], b"1"), "b": ("U8", [1], b"?")},
            SECOND: {"b": ("U8", [1], b"2"), "c": ("U8", [1], b"?")},
        },
        weight_map={"a": FIRST, "b": SECOND},
    )
    (folder / "consolidated.safetensors").write_bytes(safetensors({"a": ("U8", [1], b"!")}))
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    with load(folder) as checkpoint:
        assert {tensor.name: tensor.file for tensor in checkpoint.tensors} == {"a": FIRST, "b": SECOND}
        assert checkpoint.files == (FIRST, SECOND)
        assert checkpoint.ignored == (
            f"{FIRST}: tensor 'b' is placed in {SECOND} by the index",
            f"{SECOND}: tensor 'c' is not in the index",
            "consolidated.safetensors: not part of the checkpoint",
            "pytorch_model.bin: not part of the checkpoint",
        )


def test_c6_of_two_layouts_the_index_decides(tmp_path: Path) -> None:
    folder = write_sharded(tmp_path / "m-v1", {FIRST: {"a": ("U8", [1], b"1")}})
    (folder / SINGLE).write_bytes(safetensors({"a": ("U8", [1], b"2")}))
    with load(folder) as checkpoint:
        assert [tensor.file for tensor in checkpoint.tensors] == [FIRST]
        assert checkpoint.ignored == ("model.safetensors: not part of the checkpoint",)


def test_c6_a_tensor_that_its_shard_lacks(tmp_path: Path) -> None:
    folder = write_sharded(
        tmp_path / "m-v1", {FIRST: {"a": ("U8", [1], b"1")}}, weight_map={"a": FIRST, "b": FIRST}
    )
    error = refused(folder)
    assert (error.file, error.tensor) == (FIRST, "b")
    assert "the index places 'b' here" in error.reason


def test_c6_a_shard_that_does_not_exist(tmp_path: Path) -> None:
    folder = write_sharded(
        tmp_path / "m-v1", {FIRST: {"a": ("U8", [1], b"1")}}, weight_map={"a": FIRST, "b": SECOND}
    )
    assert refused(folder).message == f"{SECOND}: is named by the index and does not exist"


@pytest.mark.parametrize(
    "name", ["../m-v0/model.safetensors", "/etc/model.safetensors", ".a.safetensors", "a.bin", "", 7]
)
def test_c6_a_shard_name_that_is_no_plain_name(tmp_path: Path, name: object) -> None:
    folder = write_sharded(tmp_path / "m-v1", {FIRST: {"a": ("U8", [1], b"1")}})
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": FIRST, "b": name}}))
    error = refused(folder)
    assert (error.file, error.tensor) == (INDEX, "b")
    assert "not the plain name of a .safetensors file" in error.reason


def test_c6_a_key_that_the_index_has_twice(tmp_path: Path) -> None:
    folder = write_sharded(tmp_path / "m-v1", {FIRST: {"a": ("U8", [1], b"1")}})
    (folder / INDEX).write_text(f'{{"weight_map":{{"a":"{FIRST}","\\u0061":"{SECOND}"}}}}')
    error = refused(folder)
    assert error.file == INDEX
    assert "duplicate key 'a'" in error.reason


def test_c7_scalars_and_empty_tensors(tmp_path: Path) -> None:
    folder = write_single(tmp_path / "m-v1", {"scalar": ("F32", [], b"abcd"), "empty": ("I64", [3, 0], b"")})
    with load(folder) as checkpoint:
        assert {t.name: (t.shape, t.nbytes) for t in checkpoint.tensors} == {
            "empty": ((3, 0), 0),
            "scalar": ((), 4),
        }


def write_to(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"!")
    os.utime(path, ns=(1, 1))


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def swap(path: Path) -> None:
    other = path.with_suffix(".new")
    other.write_bytes(path.read_bytes())
    other.rename(path)


@pytest.mark.parametrize("is_sealed", [False, True])
@pytest.mark.parametrize(
    ("change", "what"),
    [
        (write_to, "it was written to;"),
        (cut, r"it had \d+ bytes and has \d+;"),
        (swap, "it was written to, or its name, owner or mode changed;"),
        (Path.unlink, "it was written to, or its name, owner or mode changed;"),
    ],
)
def test_c8_a_file_that_changes_while_it_is_read(
    tmp_path: Path, change: Callable[[Path], None], what: str, is_sealed: bool
) -> None:
    folder = write_single(tmp_path / "m-v1", TENSORS)
    if is_sealed:
        seal_directory(folder)
    with load(folder) as checkpoint:
        checkpoint.verify_unchanged()
        change(folder / SINGLE)
        with pytest.raises(CheckpointError, match=f"changed while it was read: {what}") as caught:
            checkpoint.verify_unchanged()
    assert caught.value.file == SINGLE


@pytest.mark.parametrize("change", [write_to, swap])
def test_c8_a_config_that_changes_while_weights_are_read(
    tmp_path: Path, change: Callable[[Path], None]
) -> None:
    folder = write_single(tmp_path / "m-v1", TENSORS)
    with load(folder) as checkpoint:
        change(folder / "config.json")
        with pytest.raises(CheckpointError, match="was replaced while it was read") as caught:
            checkpoint.verify_unchanged()
    assert caught.value.file == "config.json"


def test_c8_a_name_that_another_file_took(tmp_path: Path) -> None:
    # The hub's layout: the link in the snapshot is replaced, the blob behind the fd stays as it was.
    write_single(tmp_path / "blobs", TENSORS)
    write_single(tmp_path / "other", TENSORS)
    folder = write_single(tmp_path / "m-v1", TENSORS)
    (folder / SINGLE).unlink()
    (folder / SINGLE).symlink_to("../blobs/model.safetensors")
    with load(folder) as checkpoint:
        (folder / SINGLE).unlink()
        (folder / SINGLE).symlink_to("../other/model.safetensors")
        with pytest.raises(
            CheckpointError, match="was replaced while it was read: another file has its name;"
        ):
            checkpoint.verify_unchanged()


@pytest.mark.parametrize("name", ["model-00002.safetensors.incomplete", "x.part", "y.aria2", "z.tmp"])
def test_c9_an_upload_under_way_is_refused_until_it_is_sealed(tmp_path: Path, name: str) -> None:
    folder = write_single(tmp_path / "m-v1", TENSORS)
    partial = folder / name
    partial.write_bytes(b"half")
    assert refused(folder).message == f"{name}: looks like an unfinished upload"
    with pytest.raises(CheckpointError, match="unfinished upload"):
        seal_directory(folder)
    partial.unlink()
    seal_directory(folder)
    partial.write_bytes(b"half of something else")
    load(folder).close()
    with pytest.raises(CheckpointError, match="unfinished upload"):
        seal_directory(folder)


def test_c9_a_file_that_appears_while_an_unsealed_folder_is_read(tmp_path: Path) -> None:
    folder = write_single(tmp_path / "m-v1", TENSORS)
    with load(folder) as checkpoint:
        (folder / "notes.txt").write_text("no part of a checkpoint")
        checkpoint.verify_unchanged()
        (folder / "tokenizer.json").write_text("{}")
        with pytest.raises(
            CheckpointError, match="appeared or went away while the unsealed folder was read"
        ) as caught:
            checkpoint.verify_unchanged()
    assert caught.value.file == "tokenizer.json"


def test_c9_a_sealed_folder_that_an_upload_goes_on_in(tmp_path: Path) -> None:
    folder = write_single(tmp_path / "m-v1", TENSORS)
    seal_directory(folder)
    (folder / "tokenizer.json").write_bytes(content(1, 50))
    with load(folder) as checkpoint:
        assert checkpoint.seal_bytes is not None
        with pytest.raises(CheckpointError, match="is in the folder and not in the seal") as caught:
            check_against(checkpoint, read_seal(checkpoint.seal_bytes))
    assert caught.value.file == "tokenizer.json"
