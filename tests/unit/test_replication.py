"""Loads to several devices and copies made from others, over strict fake devices: what fails, where, and that
nothing stays behind on any of them."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from loaderd.checkpoint.checkpoint import open_directory
from loaderd.load_request import LoadProgress, LoadRequest
from loaderd.loading import Loaded, load_and_verify
from loaderd.placement import PlacementRules, place
from loaderd.read_schedule import FilledSlab
from loaderd.replication import replicate
from loaderd.residents import Residents
from loaderd.seal.create import seal_directory
from loaderd.seal.document import read_seal
from loaderd.verification import Verification
from shared.errors import (
    ChangeoverError,
    CheckpointError,
    DigestMismatch,
    DriverError,
    InvariantError,
    OutOfMemory,
    ReadFailed,
)
from shared.gate import Gate
from shared.ids import DeviceId, VersionRef
from shared.memory.backend import Slab
from shared.resident import Part, ResidentVersion, check_identity, content_digest
from tests.unit.memory.fake_backend import FakeBackend, FakeMemory, FakeWritableSlab

A, B, C = DeviceId("GPU-a"), DeviceId("GPU-b"), DeviceId("GPU-c")
REF = VersionRef("toy", "v1")
RULES = PlacementRules(slab_bytes=128 << 10, granularity_bytes=4096)
TENSORS = 6
"""Each in a slab of its own."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    random = np.random.default_rng(7)
    tensors = {f"layer.{i}.w": random.random((64, 300 + i), dtype=np.float32) for i in range(TENSORS)}
    save_file({**tensors, "empty": np.zeros((0, 4), dtype=np.float32)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    seal_directory(tmp_path)
    return tmp_path


@pytest.fixture
def backend() -> Iterator[FakeBackend]:
    backend = FakeBackend(FakeMemory(8 << 20, (A, B, C)))
    yield backend
    backend.check_no_leaks()
    assert backend.memory.used_bytes == 0


def _load(
    folder: Path,
    backend: FakeBackend,
    devices: Sequence[DeviceId] = (A, B),
    beside: Sequence[ResidentVersion] = (),
) -> Loaded:
    """Load to devices, sharing with the copies in `beside`."""
    with open_directory(folder) as checkpoint:
        assert checkpoint.seal_bytes is not None
        seal = read_seal(checkpoint.seal_bytes)
        residents = Residents.of({"old": [copy.layout for copy in beside]} if beside else {}, devices)
        placement = place(checkpoint.tensors, seal.tensor_digests, residents, RULES)
        by_id = {slab.entry.slab_id: slab for copy in beside for slab in copy.slabs}
        shared = tuple(
            {device: by_id[each.slab_id] for device, each in residents.slabs[slab].replicas.items()}
            for slab in placement.shared_slabs
        )
        request = LoadRequest(REF, checkpoint, seal, placement, shared, tuple(devices))
        return load_and_verify(request, backend, LoadProgress(), threading.Event())


def _close(slabs: Sequence[Slab]) -> None:
    for slab in slabs:
        slab.close()


def test_every_copy_is_the_version(folder: Path, backend: FakeBackend) -> None:
    loaded = _load(folder, backend, (B, A, C))
    assert list(loaded.copies) == [B, A, C]
    first = loaded.copies[B]
    for device, copy in loaded.copies.items():
        check_identity(copy, hash_bytes=True)
        assert {slab.entry.device for slab in copy.slabs} == {device}
        assert [slab.entry for slab in copy.slabs] == list(copy.layout.slabs)
        assert copy.is_copy_of(first)
        assert content_digest(copy.layout, copy.assets) == first.tag.digest
    assert backend.read_bytes == sum(t.nbytes for t in first.layout.tensors)
    assert loaded.bytes_replicated == 2 * sum(slab.nbytes for slab in first.layout.slabs)
    assert backend.memory.used[A] == backend.memory.used[B] == backend.memory.used[C]
    _close(loaded.new_slabs)


def test_the_parts_of_a_large_tensor_are_put_together_on_each_device_alone(
    tmp_path: Path, backend: FakeBackend
) -> None:
    """The parts of two copies put together would hide what is damaged in one."""
    folder = tmp_path / "large"
    folder.mkdir()
    weights = np.random.default_rng(3).random((150, 1024), dtype=np.float32)  # three leaves, hashed apart
    save_file({"w": weights}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    seal_directory(folder)
    with open_directory(folder) as checkpoint, ExitStack() as slabs:
        assert checkpoint.seal_bytes is not None
        seal = read_seal(checkpoint.seal_bytes)
        placement = place(checkpoint.tensors, seal.tensor_digests, Residents(), RULES)
        request = LoadRequest(REF, checkpoint, seal, placement, (), (A, B))
        verification = Verification(request, LoadProgress())
        raw = weights.tobytes()
        on: dict[DeviceId, Slab] = {}
        for device in (A, B):
            with backend.create_slab(device, placement.slabs[0]) as writable:
                writable._data[: len(raw)] = raw
                if device == B:
                    writable._data[5] ^= 1
                on[device] = slabs.enter_context(writable.seal())
        filled = FilledSlab(0, {"w": zlib.crc32(raw)})
        parts = {device: verification.batches(0, slab, int) for device, slab in on.items()}
        assert [len(batches) for batches in parts.values()] == [3, 3]
        for device, part in ((B, 0), (A, 0), (A, 1), (A, 2), (B, 1)):
            verification.check(filled, on[device], parts[device][part], 0.0)
        with pytest.raises(DigestMismatch, match=f"on {B}"):
            verification.check(filled, on[B], parts[B][2], 0.0)


@pytest.mark.parametrize("nth", [1, 2, 5])
@pytest.mark.parametrize("operation", ["create", "read", "copy", "seal", "crc32", "sha256"])
def test_whatever_fails_nothing_stays_on_any_device(
    folder: Path, backend: FakeBackend, operation: str, nth: int
) -> None:
    error = DriverError("driver", 5, "Input/output error")
    if operation == "read":
        error = ReadFailed("pread", 5, "Input/output error", 1000)
    backend.fail(operation, error, nth=nth)  # type: ignore[arg-type]
    expected = CheckpointError if operation == "read" else DriverError
    with pytest.raises(expected, match="Input/output error"):
        _load(folder, backend)


def test_memory_for_every_copy_is_taken_before_a_byte_is_read(folder: Path, backend: FakeBackend) -> None:
    others = backend.memory.take(B, backend.memory.free_bytes(B) - 4096)
    with pytest.raises(OutOfMemory) as caught:
        _load(folder, backend)
    assert caught.value.device == B
    assert backend.calls["read"] == 0
    backend.memory.give_back(others.slab_id)


@pytest.mark.parametrize("is_shared", [False, True])
def test_what_was_checked_on_one_device_only_is_not_offered(
    folder: Path, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch, is_shared: bool
) -> None:
    check = Verification.check

    def forgetful(
        self: Verification, filled: FilledSlab, slab: Slab, batch: list[Part], spread: float
    ) -> None:
        if slab.entry.device != B:
            check(self, filled, slab, batch, spread)

    resident = _load(folder, backend, (A,))
    monkeypatch.setattr(Verification, "check", forgetful)
    with pytest.raises(InvariantError, match=rf"{TENSORS} places on {B} were not checked"):
        _load(folder, backend, (A, B), [resident.copies[A]] if is_shared else [])
    _close(resident.new_slabs)


@pytest.mark.parametrize("at", [17, -1])
def test_a_replica_that_differs_is_named_with_its_device(
    folder: Path, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    copy_from = FakeWritableSlab.copy_from

    def damaging(self: FakeWritableSlab, slab: Slab) -> None:
        copy_from(self, slab)
        if self.entry.device == C:
            last = (64 * 300 * 4) - 1  # of the first tensor
            self._data[at if at >= 0 else last] ^= 1

    monkeypatch.setattr(FakeWritableSlab, "copy_from", damaging)
    with pytest.raises(DigestMismatch, match=r"CRC32 is .* on GPU-c, .* when it was read: damaged") as caught:
        _load(folder, backend, (A, B, C))
    assert caught.value.tensor


def test_a_shared_slab_is_brought_to_a_device_that_lacks_it(folder: Path, backend: FakeBackend) -> None:
    old = _load(folder, backend, (A,))
    reads = backend.calls["read"]
    loaded = _load(folder, backend, (B, A), beside=[old.copies[A]])
    assert backend.calls["read"] == reads
    assert set(loaded.copies[A].slabs) == set(old.copies[A].slabs)
    check_identity(loaded.copies[B], hash_bytes=True)
    assert {slab.entry.device for slab in loaded.new_slabs} == {B}
    _close([*old.new_slabs, *loaded.new_slabs])


def test_a_shared_slab_that_is_damaged_on_its_way_is_not_used(
    folder: Path, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = _load(folder, backend, (A,))
    copy_from = FakeWritableSlab.copy_from

    def damaging(self: FakeWritableSlab, slab: Slab) -> None:
        copy_from(self, slab)
        self._data[5] ^= 1

    monkeypatch.setattr(FakeWritableSlab, "copy_from", damaging)
    with pytest.raises(DigestMismatch):
        _load(folder, backend, (B,), beside=[old.copies[A]])
    assert backend.memory.used[B] == 0
    _close(old.new_slabs)


def test_bytes_that_differ_in_a_way_no_crc_shows_are_found_by_their_digest(
    folder: Path, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CRC32 is made to see nothing: the leaves of an unsealed version's copies must still be equal."""
    (folder / "seal.json").unlink()
    copy_from = FakeWritableSlab.copy_from

    def damaging(self: FakeWritableSlab, slab: Slab) -> None:
        copy_from(self, slab)
        self._data[5] ^= 1

    monkeypatch.setattr(FakeWritableSlab, "copy_from", damaging)
    monkeypatch.setattr(zlib, "crc32", lambda data, value=0: 0)
    monkeypatch.setattr("loaderd.filling.crc32_combine", lambda first, second, nbytes: 0)
    with open_directory(folder) as checkpoint:
        placement = place(checkpoint.tensors, {}, Residents(), RULES)
        request = LoadRequest(REF, checkpoint, None, placement, (), (A, B))
        with pytest.raises(DigestMismatch, match=r"is not on GPU-. what it is elsewhere"):
            load_and_verify(request, backend, LoadProgress(), threading.Event())


# --- a copy of a resident version ----------------------------------------------------------------


@pytest.fixture
def resident(folder: Path, backend: FakeBackend) -> Iterator[ResidentVersion]:
    loaded = _load(folder, backend, (A,))
    yield loaded.copies[A]
    _close(loaded.new_slabs)


def test_a_copy_is_made_from_another(resident: ResidentVersion, backend: FakeBackend) -> None:
    reads = backend.calls["read"]
    made = replicate(resident, B, {}, backend, Gate())
    assert made.copy.is_copy_of(resident)
    check_identity(made.copy, hash_bytes=True)
    assert made.nbytes == sum(slab.nbytes for slab in resident.layout.slabs)
    assert backend.calls["read"] == reads
    _close(made.new_slabs)


def test_what_the_device_has_is_neither_copied_nor_hashed_again(
    resident: ResidentVersion, backend: FakeBackend
) -> None:
    whole = replicate(resident, B, {}, backend, Gate())
    known = {resident.slabs[0].entry.slab_id: whole.copy.slabs[0]}
    hashed = backend.calls["sha256"]
    made = replicate(resident, B, known, backend, Gate())
    assert made.copy.slabs[0] is whole.copy.slabs[0]
    assert len(made.new_slabs) == len(resident.slabs) - 1
    in_first = sum(tensor.slab == 0 and tensor.nbytes > 0 for tensor in resident.layout.tensors)
    assert backend.calls["sha256"] - hashed == TENSORS - in_first
    _close([*made.new_slabs, *whole.new_slabs])


@pytest.mark.parametrize("operation", ["create", "copy", "seal", "sha256"])
@pytest.mark.parametrize("nth", [1, 3])
def test_a_copy_that_fails_leaves_nothing(
    resident: ResidentVersion, backend: FakeBackend, operation: str, nth: int
) -> None:
    backend.fail(operation, DriverError("driver", 5, "lost"), nth=nth)  # type: ignore[arg-type]
    with pytest.raises(ChangeoverError, match="lost"):
        replicate(resident, B, {}, backend, Gate())
    assert backend.memory.used[B] == 0


def test_a_copy_that_differs_is_refused_with_tensor_and_device(
    resident: ResidentVersion, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_from = FakeWritableSlab.copy_from

    def damaging(self: FakeWritableSlab, slab: Slab) -> None:
        copy_from(self, slab)
        self._data[5] ^= 1

    monkeypatch.setattr(FakeWritableSlab, "copy_from", damaging)
    with pytest.raises(DigestMismatch, match="the copy on GPU-b is not what it was made from") as caught:
        replicate(resident, B, {}, backend, Gate())
    assert caught.value.tensor.startswith("layer.")


def test_copies_of_other_versions_or_layouts_are_told_apart(
    resident: ResidentVersion, backend: FakeBackend
) -> None:
    made = replicate(resident, B, {}, backend, Gate())
    copy = made.copy
    moved = replace(copy.layout, tensors=tuple(reversed(copy.layout.tensors)))
    larger = replace(copy.layout.slabs[0], nbytes=1)
    assert copy.is_copy_of(resident)
    assert not replace(copy, layout=moved).is_copy_of(resident)
    assert not replace(copy, tag=replace(copy.tag, ref=VersionRef("toy", "v2"))).is_copy_of(resident)
    other_sizes = replace(copy.layout, slabs=(larger, *copy.layout.slabs[1:]))
    assert not replace(copy, layout=other_sizes).is_copy_of(resident)
    _close(made.new_slabs)
