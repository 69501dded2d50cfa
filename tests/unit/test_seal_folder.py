"""Sealing and checking real folders: one pass, atomic, and precise about what differs."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import threading
import zlib
from pathlib import Path

import pytest

from loaderd.checkpoint import replacement
from loaderd.checkpoint.checkpoint import Checkpoint, open_directory
from loaderd.checkpoint.header import TensorSource
from loaderd.seal import scan as scan_module
from loaderd.seal.check import VerifiedFolder, check_against, check_tensor, verify_directory
from loaderd.seal.create import seal_directory
from loaderd.seal.document import Seal, read_seal
from loaderd.seal.scan import scan_checkpoint
from shared._native import crc32, sha256_leaves
from shared.digest import LEAF_BYTES, tensor_digest
from shared.errors import CheckpointError, DigestMismatch, DriverError, InvariantError
from tests.unit.checkpoint_files import Tensor, content, write_sharded, write_single

BIG = content(3, 5 * LEAF_BYTES + 11)
SHARDS: dict[str, dict[str, Tensor]] = {
    "a.safetensors": {"big": ("U8", [len(BIG)], BIG), "scalar": ("F32", [], b"abcd")},
    "b.safetensors": {"empty": ("I64", [0], b""), "w": ("U8", [3], b"www"), "stray": ("U8", [2], b"??")},
}
PLACED = {"big": "a.safetensors", "scalar": "a.safetensors", "empty": "b.safetensors", "w": "b.safetensors"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = write_sharded(tmp_path / "m-v1", SHARDS, weight_map=PLACED)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def damage(path: Path, byte: int) -> None:
    """Flip one bit and leave size and times as they were."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(byte)
        value = file.read(1)[0]
        file.seek(byte)
        file.write(bytes([value ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def source_of(folder: Path, name: str) -> TensorSource:
    with open_directory(folder) as checkpoint:
        return next(tensor for tensor in checkpoint.tensors if tensor.name == name)


def held_against_seal(folder: Path) -> None:
    with open_directory(folder) as checkpoint:
        assert checkpoint.seal_bytes is not None
        check_against(checkpoint, read_seal(checkpoint.seal_bytes))


@pytest.mark.parametrize("jobs", [1, 2, 4])
def test_a_seal_says_what_the_folder_holds(folder: Path, jobs: int) -> None:
    seen: list[tuple[int, int]] = []
    seal = seal_directory(folder, jobs=jobs, progress=lambda done, total: seen.append((done, total)))
    assert read_seal((folder / "seal.json").read_bytes()) == seal
    assert sorted(seal.files) == [
        "a.safetensors", "b.safetensors", "config.json", "model.safetensors.index.json", "tokenizer.json",
    ]  # fmt: skip
    for name, file in seal.files.items():
        data = (folder / name).read_bytes()
        assert file.sha256 == "sha256:" + hashlib.sha256(data).hexdigest()
        assert file.nbytes == len(data)
    assert sorted(seal.tensors) == sorted(PLACED)
    for name, tensor in seal.tensors.items():
        data = SHARDS[PLACED[name]][name][2]
        leaves = b"".join(
            hashlib.sha256(data[at : at + LEAF_BYTES]).digest() for at in range(0, len(data), LEAF_BYTES)
        )
        assert (tensor.leaves, tensor.digest, tensor.crc32) == (
            leaves,
            tensor_digest(leaves),
            zlib.crc32(data),
        )
    total = sum((folder / file).stat().st_size for file in SHARDS)
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert verify_directory(folder, jobs=jobs) == VerifiedFolder(seal, None)
    assert [name.name for name in folder.iterdir() if name.name.startswith(".")] == []


def test_the_same_content_has_the_same_identity_in_other_files(folder: Path, tmp_path: Path) -> None:
    tensors = {name: SHARDS[file][name] for name, file in sorted(PLACED.items(), reverse=True)}
    single = write_single(tmp_path / "single", tensors)
    (single / "tokenizer.json").write_text("{}")
    assert seal_directory(single).digest == seal_directory(folder).digest


def test_sealing_again_replaces_the_seal(folder: Path) -> None:
    before = seal_directory(folder)
    (folder / "tokenizer.json").write_text("[]")
    after = seal_directory(folder)
    assert before.digest != after.digest
    assert read_seal((folder / "seal.json").read_bytes()) == after


def test_a_scan_reads_in_chunks_of_bounded_size(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    preadv = os.preadv

    def spy(fd: int, buffers: list[memoryview], offset: int) -> int:
        sizes.append(len(buffers[0]))
        return preadv(fd, [buffers[0][:100_000]], offset)  # short reads, as over a network

    monkeypatch.setattr(os, "preadv", spy)
    monkeypatch.setattr(scan_module, "_CHUNK_BYTES", 2 * LEAF_BYTES)
    seal = seal_directory(folder)
    assert max(sizes) == 2 * LEAF_BYTES
    assert seal.tensors["big"].leaves == sha256_leaves(BIG, LEAF_BYTES)
    assert seal.tensors["big"].crc32 == crc32(BIG)


def test_the_buffer_is_not_read_into_while_it_is_hashed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_single(tmp_path / "m-v1", {"big": ("U8", [len(BIG)], BIG)})
    expected = seal_directory(folder, jobs=1)
    preadv = os.preadv
    busy: list[Slow] = []
    reads: list[int] = []

    class Slow:
        def __init__(self) -> None:
            self._state = hashlib.sha256()

        def update(self, chunk: memoryview) -> None:
            busy.append(self)
            threading.Event().wait(0.01)  # long enough for a reader that does not wait
            self._state.update(chunk)
            busy.remove(self)

        def digest(self) -> bytes:
            assert self not in busy
            return self._state.digest()

    def spy(fd: int, buffers: list[memoryview], offset: int) -> int:
        assert not busy
        reads.append(offset)
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(scan_module, "sha256", Slow)
    monkeypatch.setattr(os, "preadv", spy)
    monkeypatch.setattr(scan_module, "_CHUNK_BYTES", LEAF_BYTES)
    assert seal_directory(folder, jobs=2) == expected
    assert len(reads) == 1 + 6


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


def test_a_folder_that_changes_while_it_is_sealed_gets_no_seal(folder: Path) -> None:
    seal_directory(folder)
    before = (folder / "seal.json").read_bytes()

    def write(done: int, total: int) -> None:
        if done == total:
            (folder / "tokenizer.json").write_text("[]")

    with pytest.raises(CheckpointError, match="was replaced while it was read"):
        seal_directory(folder, progress=write)
    assert (folder / "seal.json").read_bytes() == before


def test_a_file_that_shrinks_while_it_is_hashed(folder: Path) -> None:
    path = folder / "a.safetensors"
    with open_directory(folder) as checkpoint:
        os.truncate(path, path.stat().st_size - LEAF_BYTES)
        with pytest.raises(CheckpointError, match="ends early: it had") as caught:
            scan_checkpoint(checkpoint)
    assert (caught.value.file, caught.value.byte) == ("a.safetensors", path.stat().st_size)


def test_the_first_error_stops_the_other_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_sharded(
        tmp_path / "m-v1", {f"{name}.safetensors": {name: ("U8", [9], content(1, 9))} for name in "ab"}
    )
    second_is_waiting, first_has_failed = threading.Event(), threading.Event()
    preadv = os.preadv

    def scripted(fd: int, buffers: list[memoryview], offset: int) -> int:
        if fd == failing:
            assert second_is_waiting.wait(30)
            raise OSError(5, "Input/output error")
        second_is_waiting.set()
        assert first_has_failed.wait(30)
        return preadv(fd, buffers, offset)

    stop = scan_module._Meter.stop

    def stopped(meter: scan_module._Meter) -> None:
        stop(meter)
        first_has_failed.set()

    with open_directory(folder) as checkpoint:
        failing = checkpoint.borrow_fd("b.safetensors")
        monkeypatch.setattr(os, "preadv", scripted)
        monkeypatch.setattr(scan_module._Meter, "stop", stopped)
        seen: list[int] = []
        with pytest.raises(DriverError, match=r"preadv failed with 5: b\.safetensors at 0"):
            scan_checkpoint(checkpoint, jobs=2, progress=lambda done, total: seen.append(done))
    assert seen == []


@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_a_seal_is_whole_or_not_there(folder: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    before = seal_directory(folder)
    (folder / "tokenizer.json").write_text("[]")

    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(replacement.os, call, fail)
    with pytest.raises(DriverError, match=r"write failed with 28: seal\.json: No space left"):
        seal_directory(folder)
    assert read_seal((folder / "seal.json").read_bytes()) == before
    assert not [path for path in folder.iterdir() if path.name.startswith(".seal")]


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_a_folder_that_cannot_be_written_to_is_not_hashed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    real = os.open

    def refuse(path: str, flags: int, *rest: int, dir_fd: int | None = None) -> int:
        if flags & os.O_CREAT:
            raise OSError(number, os.strerror(number))
        return real(path, flags, *rest, dir_fd=dir_fd)

    monkeypatch.setattr(replacement.os, "open", refuse)
    seen: list[int] = []
    with pytest.raises(CheckpointError) as caught:
        seal_directory(folder, progress=lambda done, total: seen.append(done))
    assert str(caught.value) == (
        f"seal.json: cannot be written: {os.strerror(number)}; "
        "sealing needs the right to create files in the folder"
    )
    assert seen == []


def test_another_seal_meanwhile_is_told(folder: Path) -> None:
    seal_directory(folder)

    def seal_too(done: int, total: int) -> None:
        if done == total:
            seal_directory(folder)

    with pytest.raises(CheckpointError) as caught:
        seal_directory(folder, progress=seal_too)
    assert str(caught.value) == (
        "seal.json: changed while the folder was hashed: another seal of it ran; try again when none does"
    )


def test_a_seal_is_on_the_disk_before_it_has_its_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    fsync, rename = os.fsync, os.rename

    def spy_fsync(fd: int) -> None:
        calls.append("fsync " + ("folder" if stat.S_ISDIR(os.fstat(fd).st_mode) else "file"))
        fsync(fd)

    def spy_rename(source: str, target: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        calls.append(f"rename to {target}")
        rename(source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

    monkeypatch.setattr(replacement.os, "fsync", spy_fsync)
    monkeypatch.setattr(replacement.os, "rename", spy_rename)
    seal_directory(folder)
    assert calls == ["fsync file", "rename to seal.json", "fsync folder"]


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


def test_a_seal_is_written_through_the_folder_that_was_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Another folder takes the path while this one is hashed: the seal goes where the bytes were read.
    moved = folder.with_name("moved")
    verify = Checkpoint.verify_unchanged

    def move_first(checkpoint: Checkpoint) -> None:
        folder.rename(moved)
        folder.mkdir()
        verify(checkpoint)

    monkeypatch.setattr(Checkpoint, "verify_unchanged", move_first)
    seal_directory(folder)
    assert (moved / "seal.json").exists()
    assert not list(folder.iterdir())


def test_a_seal_that_nobody_could_read_is_not_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loaderd.seal.create.SEAL_LIMIT_BYTES", 100)
    with pytest.raises(CheckpointError, match=r"^seal\.json: would have \d+ bytes, 100 are allowed"):
        seal_directory(folder)
    assert not (folder / "seal.json").exists()
