"""Sealing real folders: one pass over the bytes, and a seal that is whole or not there."""

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
from loaderd.seal import scan as scan_module
from loaderd.seal.check import VerifiedFolder, verify_directory
from loaderd.seal.create import seal_directory
from loaderd.seal.document import read_seal
from loaderd.seal.scan import scan_checkpoint
from shared._native import crc32, sha256_leaves
from shared.digest import LEAF_BYTES, tensor_digest
from shared.errors import CheckpointError, DriverError
from tests.unit.checkpoint_files import content, write_sharded, write_single
from tests.unit.sealed_folder.shards import BIG, PLACED, SHARDS


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
