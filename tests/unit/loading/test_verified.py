"""What a load says is resident: what the files hold, and nothing else."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from loaderd.checkpoint.checkpoint import open_directory
from loaderd.load_request import LoadProgress
from loaderd.placement import place
from loaderd.read_schedule import FilledSlab
from loaderd.residents import Residents
from loaderd.seal.create import seal_directory
from loaderd.seal.document import read_seal
from loaderd.verification import Verification
from shared.errors import (
    CheckpointError,
    DigestMismatch,
    InvariantError,
)
from shared.ids import HOST_DEVICE, SlabId
from shared.layout import TensorEntry
from shared.memory.backend import Slab
from shared.resident import Part, check_identity
from tests.unit.checkpoint_files import damage
from tests.unit.loading.loads import RULES, load
from tests.unit.memory.fake_backend import FakeBackend, FakeSlab, FakeWritableSlab


@pytest.mark.parametrize("is_sealed", [False, True])
def test_what_is_resident_is_what_the_files_hold(folder: Path, backend: FakeBackend, is_sealed: bool) -> None:
    expected = seal_directory(folder)
    if not is_sealed:
        (folder / "seal.json").unlink()
    progress = LoadProgress()
    with open_directory(folder) as checkpoint:
        loaded = load(checkpoint, backend, progress=progress)
        distinct = checkpoint.total_bytes - (64 * 300 * 4 if is_sealed else 0)
    version = loaded.copies[HOST_DEVICE]
    assert version.tag.digest == expected.digest
    assert {t.name: t.digest for t in version.layout.tensors} == expected.tensor_digests
    assert {t.name: t.crc32 for t in version.layout.tensors} == {
        name: tensor.crc32 for name, tensor in expected.tensors.items()
    }
    assert all(t.offset_bytes % 256 == 0 for t in version.layout.tensors)
    assert (progress.read, progress.verified) == (distinct, distinct)
    assert version.layout.total_bytes == distinct, "equal tensors lie in one place where it is known"
    check_identity(version, hash_bytes=True)
    for slab in loaded.new_slabs:
        slab.close()


def test_bytes_damaged_on_the_way_are_noticed(
    folder: Path, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The case of a staging buffer that was used again too early: read well, resident wrong."""
    read = FakeWritableSlab.read_file

    def damaging(self: FakeWritableSlab, fd: int, file_offset: int, offset: int, nbytes: int) -> int:
        crc = read(self, fd, file_offset, offset, nbytes)
        if nbytes > 1000:
            self._data[offset + 17] ^= 1
        return crc

    monkeypatch.setattr(FakeWritableSlab, "read_file", damaging)
    with (
        open_directory(folder) as checkpoint,
        pytest.raises(DigestMismatch, match=r"model.safetensors: tensor '.*damaged on the way"),
    ):
        load(checkpoint, backend)


def test_a_flipped_byte_is_named_by_file_tensor_and_leaf(folder: Path, backend: FakeBackend) -> None:
    seal_directory(folder)
    with open_directory(folder) as checkpoint:
        victim = next(t for t in checkpoint.tensors if t.name == "layer.3.w")
    damage(folder / "model.safetensors", victim.file_offset + 5)
    with open_directory(folder) as checkpoint, pytest.raises(DigestMismatch) as caught:
        load(checkpoint, backend)
    assert (caught.value.file, caught.value.tensor) == ("model.safetensors", "layer.3.w")
    assert caught.value.byte == victim.file_offset


def test_a_file_that_changes_while_it_is_read(folder: Path, backend: FakeBackend) -> None:
    with open_directory(folder) as checkpoint:

        def touch(_: SlabId) -> None:
            backend.before_read = None
            path = folder / "model.safetensors"
            # In place: a truncated file would be seen as one that ends early by whoever reads meanwhile.
            with path.open("r+b") as file:
                file.seek(-4, os.SEEK_END)
                file.write(b"\0\0\0\0")

        backend.before_read = touch
        with pytest.raises(CheckpointError, match=r"model\.safetensors: .*changed"):
            load(checkpoint, backend)


def test_a_file_that_is_cut_while_it_is_read(folder: Path, backend: FakeBackend) -> None:
    with open_directory(folder) as checkpoint:
        backend.before_read = lambda _: os.truncate(folder / "model.safetensors", 5000)
        with pytest.raises(CheckpointError, match=r"model\.safetensors: tensor '.*: ends early"):
            load(checkpoint, backend)


def test_a_sealed_folder_that_changes_while_it_is_read_is_not_called_damaged(
    folder: Path, backend: FakeBackend
) -> None:
    seal_directory(folder)
    with open_directory(folder) as checkpoint:
        victim = next(t for t in checkpoint.tensors if t.name == "layer.3.w")

        def overwrite(_: SlabId) -> None:
            with (folder / "model.safetensors").open("r+b") as file:
                file.seek(victim.file_offset)
                file.write(b"other bytes")

        backend.before_read = overwrite
        with pytest.raises(CheckpointError, match="changed while it was read"):
            load(checkpoint, backend)


@pytest.fixture
def table_first(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Leaves are hashed only once the table was made; of each call, whether it was."""
    has_table, waited = threading.Event(), list[bool]()
    hash_leaves, make_table = FakeSlab.sha256_leaves, Verification.table

    def hold(self: FakeSlab, offset_bytes: int, nbytes: int, leaf_bytes: int) -> bytes:
        waited.append(has_table.wait(20))
        return hash_leaves(self, offset_bytes, nbytes, leaf_bytes)

    def noted(self: Verification) -> tuple[TensorEntry, ...]:
        table = make_table(self)
        has_table.set()
        return table

    monkeypatch.setattr(Verification, "table", noted)
    monkeypatch.setattr(FakeSlab, "sha256_leaves", hold)
    return waited


def test_the_table_of_a_sealed_version_is_made_while_the_rest_is_hashed(
    folder: Path, backend: FakeBackend, table_first: list[bool]
) -> None:
    expected = seal_directory(folder)
    with open_directory(folder) as checkpoint:
        loaded = load(checkpoint, backend)
    assert loaded.copies[HOST_DEVICE].tag.digest == expected.digest
    assert table_first
    assert all(table_first)
    for slab in loaded.new_slabs:
        slab.close()


@pytest.mark.parametrize("is_sealed", [False, True])
def test_what_was_not_checked_is_not_offered(
    folder: Path, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch, is_sealed: bool
) -> None:
    """Whatever a seal promises."""
    check = Verification.check

    def forgetful(
        self: Verification, filled: FilledSlab, slab: Slab, batch: list[Part], spread: float
    ) -> None:
        check(self, filled, slab, [part for part in batch if part.place != forgotten], spread)

    seal_directory(folder)
    if not is_sealed:
        (folder / "seal.json").unlink()
    monkeypatch.setattr(Verification, "check", forgetful)
    with open_directory(folder) as checkpoint:
        scalar = next(tensor for tensor in checkpoint.tensors if tensor.name == "scalar")
        placement = place(checkpoint.tensors, {}, Residents(), RULES)
        if is_sealed:
            assert checkpoint.seal_bytes is not None
            digests = read_seal(checkpoint.seal_bytes).tensor_digests
            placement = place(checkpoint.tensors, digests, Residents(), RULES)
        spot = placement.places["scalar"]
        forgotten = spot.slab, spot.offset_bytes, scalar.nbytes
        with pytest.raises(InvariantError, match="'scalar'"):
            load(checkpoint, backend)


def test_a_table_of_promises_is_held_against_what_was_found(
    folder: Path, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch, table_first: list[bool]
) -> None:
    """Even if a tensor that is not what its seal says were let through."""
    monkeypatch.setattr("loaderd.verification.check_tensor", lambda *_, **__: None)
    seal_directory(folder)
    with open_directory(folder) as checkpoint:
        victim = next(t for t in checkpoint.tensors if t.name == "layer.3.w")
    damage(folder / "model.safetensors", victim.file_offset)
    with (
        open_directory(folder) as checkpoint,
        pytest.raises(InvariantError, match=r"'layer.3.w' is .* in the table"),
    ):
        load(checkpoint, backend)
    assert table_first
    assert all(table_first)
