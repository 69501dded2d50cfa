"""Load and verify over a strict fake device: what fails, where, and that nothing stays behind."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from loaderd.checkpoint.checkpoint import Checkpoint, open_directory
from loaderd.crew import Crew
from loaderd.load_request import LoadProgress, LoadRequest
from loaderd.loading import Loaded, load_and_verify
from loaderd.placement import PlacementRules, place
from loaderd.read_schedule import FilledSlab, ReadSchedule
from loaderd.residents import Residents
from loaderd.seal.create import seal_directory
from loaderd.seal.document import Seal, read_seal
from loaderd.verification import Verification
from shared.errors import (
    CheckpointError,
    DigestMismatch,
    DriverError,
    InvariantError,
    OutOfMemory,
    ReadFailed,
    ResourceError,
    Superseded,
)
from shared.gate import Pacer
from shared.ids import HOST_DEVICE, DeviceId, SlabId, VersionRef
from shared.layout import TensorEntry
from shared.memory.backend import Slab
from shared.resident import Part, check_identity
from tests.unit.memory.fake_backend import FakeBackend, FakeMemory, FakeSlab, FakeWritableSlab

REF = VersionRef("toy", "v1")
RUN_BYTES = 64 << 10
RULES = PlacementRules(slab_bytes=256 << 10, granularity_bytes=4096)


@pytest.fixture(autouse=True)
def _runs_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loaderd.filling.ReadSchedule", partial(ReadSchedule, run_bytes=RUN_BYTES))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    random = np.random.default_rng(7)
    tensors = {f"layer.{i}.w": random.random((64, 300 + i), dtype=np.float32) for i in range(6)}
    tensors["large"] = random.random((150, 1001), dtype=np.float32)  # more than one leaf
    tensors["scalar"] = np.array(3.0, dtype=np.float32)
    tensors["empty"] = np.zeros((0, 4), dtype=np.float32)
    tensors["twin"] = tensors["layer.0.w"].copy()
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


@pytest.fixture
def backend() -> Iterator[FakeBackend]:
    backend = FakeBackend(FakeMemory(8 << 20))
    yield backend
    backend.check_no_leaks()
    assert backend.memory.used_bytes == 0


def _load(
    checkpoint: Checkpoint,
    backend: FakeBackend,
    *,
    progress: LoadProgress | None = None,
    cancelled: threading.Event | None = None,
    pace: Pacer | None = None,
) -> Loaded:
    seal: Seal | None = read_seal(checkpoint.seal_bytes) if checkpoint.seal_bytes else None
    digests = seal.tensor_digests if seal is not None else {}
    placement = place(checkpoint.tensors, digests, Residents(), RULES)
    request = LoadRequest(REF, checkpoint, seal, placement, (), (HOST_DEVICE,))
    return load_and_verify(request, backend, progress or LoadProgress(), cancelled or threading.Event(), pace)


@pytest.mark.parametrize("is_sealed", [False, True])
def test_what_is_resident_is_what_the_files_hold(folder: Path, backend: FakeBackend, is_sealed: bool) -> None:
    expected = seal_directory(folder)
    if not is_sealed:
        (folder / "seal.json").unlink()
    progress = LoadProgress()
    with open_directory(folder) as checkpoint:
        loaded = _load(checkpoint, backend, progress=progress)
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
        _load(checkpoint, backend)


def test_a_flipped_byte_is_named_by_file_tensor_and_leaf(folder: Path, backend: FakeBackend) -> None:
    seal_directory(folder)
    with open_directory(folder) as checkpoint:
        victim = next(t for t in checkpoint.tensors if t.name == "layer.3.w")
    path = folder / "model.safetensors"
    raw = bytearray(path.read_bytes())
    raw[victim.file_offset + 5] ^= 0x10
    path.write_bytes(raw)
    with open_directory(folder) as checkpoint, pytest.raises(DigestMismatch) as caught:
        _load(checkpoint, backend)
    assert (caught.value.file, caught.value.tensor) == ("model.safetensors", "layer.3.w")
    assert caught.value.byte == victim.file_offset


@pytest.mark.parametrize("nth", [1, 3])
@pytest.mark.parametrize("operation", ["create", "read", "seal", "crc32", "sha256"])
def test_whatever_fails_nothing_stays_allocated(
    folder: Path, backend: FakeBackend, operation: str, nth: int
) -> None:
    error = DriverError("call", 5, "Input/output error")
    if operation == "read":
        error = ReadFailed("pread", 5, "Input/output error", 1000)
    backend.fail(operation, error, nth=nth)  # type: ignore[arg-type]
    expected = CheckpointError if operation == "read" else DriverError
    with open_directory(folder) as checkpoint, pytest.raises(expected, match="Input/output error") as caught:
        _load(checkpoint, backend)
    if isinstance(caught.value, CheckpointError):
        assert caught.value.file == "model.safetensors"
        assert caught.value.tensor
        assert caught.value.byte > 0


def test_too_little_memory(folder: Path) -> None:
    backend = FakeBackend(FakeMemory(300 << 10))
    with open_directory(folder) as checkpoint, pytest.raises(OutOfMemory):
        _load(checkpoint, backend)
    backend.check_no_leaks()


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
            _load(checkpoint, backend)


def test_a_file_that_is_cut_while_it_is_read(folder: Path, backend: FakeBackend) -> None:
    with open_directory(folder) as checkpoint:
        backend.before_read = lambda _: os.truncate(folder / "model.safetensors", 5000)
        with pytest.raises(CheckpointError, match=r"model\.safetensors: tensor '.*: ends early"):
            _load(checkpoint, backend)


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
            _load(checkpoint, backend)


def test_a_slab_is_verified_while_the_next_is_still_read(
    folder: Path, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, has_hashed = SlabId("fake-0"), threading.Event()
    hash_leaves = FakeSlab.sha256_leaves
    waited: list[bool] = []

    def note(self: FakeSlab, offset_bytes: int, nbytes: int, leaf_bytes: int) -> bytes:
        leaves = hash_leaves(self, offset_bytes, nbytes, leaf_bytes)
        if self.entry.slab_id == first:
            has_hashed.set()
        return leaves

    def hold(slab_id: SlabId) -> None:
        if slab_id != first:
            waited.append(has_hashed.wait(20))

    monkeypatch.setattr(FakeSlab, "sha256_leaves", note)
    backend.before_read = hold
    with open_directory(folder) as checkpoint:
        for slab in _load(checkpoint, backend).new_slabs:
            slab.close()
    assert waited
    assert all(waited)


def test_the_table_of_a_sealed_version_is_made_while_the_rest_is_hashed(
    folder: Path, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_table, waited = threading.Event(), []
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
    expected = seal_directory(folder)
    with open_directory(folder) as checkpoint:
        loaded = _load(checkpoint, backend)
    assert loaded.copies[HOST_DEVICE].tag.digest == expected.digest
    assert waited
    assert all(waited)
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
            _load(checkpoint, backend)


def test_a_table_of_promises_is_held_against_what_was_found(
    folder: Path, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if a tensor that is not what its seal says were let through."""
    has_table = threading.Event()
    hash_leaves, make_table = FakeSlab.sha256_leaves, Verification.table

    def hold(self: FakeSlab, offset_bytes: int, nbytes: int, leaf_bytes: int) -> bytes:
        assert has_table.wait(20)
        return hash_leaves(self, offset_bytes, nbytes, leaf_bytes)

    def noted(self: Verification) -> tuple[TensorEntry, ...]:
        table = make_table(self)
        has_table.set()
        return table

    monkeypatch.setattr(Verification, "table", noted)
    monkeypatch.setattr(FakeSlab, "sha256_leaves", hold)
    monkeypatch.setattr("loaderd.verification.check_tensor", lambda *_, **__: None)
    seal_directory(folder)
    with open_directory(folder) as checkpoint:
        victim = next(t for t in checkpoint.tensors if t.name == "layer.3.w")
    path = folder / "model.safetensors"
    raw = bytearray(path.read_bytes())
    raw[victim.file_offset] ^= 1
    path.write_bytes(raw)
    with (
        open_directory(folder) as checkpoint,
        pytest.raises(InvariantError, match=r"'layer.3.w' is .* in the table"),
    ):
        _load(checkpoint, backend)


def test_a_difference_ends_the_reading(
    folder: Path, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeBackend, "readers", 1)
    monkeypatch.setattr(FakeSlab, "crc32", lambda self, offset_bytes, nbytes: 1)
    first, has_ended = SlabId("fake-0"), threading.Event()
    work_on_a_thread = Crew._guarded

    def guarded(self: Crew, work: Callable[[], None]) -> None:
        work_on_a_thread(self, work)
        if self.is_ending:  # and not where a thread has done its work, as the one that allocates
            has_ended.set()

    def hold(slab_id: SlabId) -> None:
        if slab_id != first:
            has_ended.wait(20)

    monkeypatch.setattr(Crew, "_guarded", guarded)
    backend.before_read = hold
    with open_directory(folder) as checkpoint:
        runs = checkpoint.total_bytes // RUN_BYTES
        with pytest.raises(DigestMismatch, match="damaged on the way"):
            _load(checkpoint, backend)
    assert backend.calls["read"] < runs


def test_readers_stay_near_the_device_they_read_into(folder: Path, backend: FakeBackend) -> None:
    with open_directory(folder) as checkpoint:
        loaded = _load(checkpoint, backend)
    assert backend.near == [slab.entry.device for slab in loaded.new_slabs[:1]] * backend.readers
    for slab in loaded.new_slabs:
        slab.close()


def test_the_first_slab_is_allocated_before_readers_start_and_the_others_beside_them(
    folder: Path, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    create, by_us = FakeBackend.create_slab, list[bool]()

    def noted(self: FakeBackend, device: DeviceId, nbytes: int) -> FakeWritableSlab:
        by_us.append(threading.current_thread() is threading.main_thread())
        return create(self, device, nbytes)

    monkeypatch.setattr(FakeBackend, "create_slab", noted)
    with open_directory(folder) as checkpoint:
        loaded = _load(checkpoint, backend)
    assert by_us == [True] + [False] * (len(loaded.new_slabs) - 1)
    for slab in loaded.new_slabs:
        slab.close()


class _Meter:
    """Lets everything through, and says how much it was."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.admitted = 0

    def admit(self, nbytes: int) -> None:
        with self.lock:
            self.admitted += nbytes

    def grain_bytes(self, most_bytes: int) -> int:
        return most_bytes

    def spread_s(self, nbytes: int) -> float:
        return 0.0


def test_reads_and_hashes_are_paced(folder: Path, backend: FakeBackend) -> None:
    meter = _Meter()
    with open_directory(folder) as checkpoint:
        for slab in _load(checkpoint, backend, pace=meter).new_slabs:
            slab.close()
        assert meter.admitted == 2 * checkpoint.total_bytes, "once to read, once to hash"


def test_what_lacks_memory_does_not_wait_at_the_gate(folder: Path, backend: FakeBackend) -> None:
    """At a limited rate it would be told only when each reader had had its turn."""
    lacking = OutOfMemory(what="a slab", needed_bytes=2, free_bytes=1)
    backend.fail("create", lacking)
    meter = _Meter()
    with open_directory(folder) as checkpoint, pytest.raises(OutOfMemory) as caught:
        _load(checkpoint, backend, pace=meter)
    assert caught.value is lacking
    assert meter.admitted == 0


@pytest.mark.parametrize("nth", [1, 2, 3, 4, 7], ids=str)
def test_a_host_that_gives_no_more_threads(
    folder: Path, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch, nth: int
) -> None:
    """Of two hashers, one that allocates and four readers: those that run are not waited for in vain."""
    start, numbers = threading.Thread.start, count(1)

    def limited(self: threading.Thread) -> None:
        if self.name.startswith("load-") and next(numbers) == nth:
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", limited)
    with (
        open_directory(folder) as checkpoint,
        pytest.raises(ResourceError, match="cannot be started: can't start new thread"),
    ):
        _load(checkpoint, backend)


@pytest.mark.parametrize("has_failed", [False, True])
def test_a_load_that_ends_allocates_no_further(
    folder: Path, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch, has_failed: bool
) -> None:
    """To allocate what is left, and to give it back, takes a GPU's driver longer than to end."""
    cancelled, has_ended = threading.Event(), threading.Event()
    create = FakeBackend.create_slab

    def slow(self: FakeBackend, device: DeviceId, nbytes: int) -> FakeWritableSlab:
        if self.calls["create"] > 0:
            assert has_ended.wait(20)
        return create(self, device, nbytes)

    def end(_: SlabId) -> None:
        if not has_failed:
            cancelled.set()
            has_ended.set()

    guarded = Crew._guarded

    def note(self: Crew, work: Callable[[], None]) -> None:
        try:
            guarded(self, work)
        finally:
            has_ended.set()

    monkeypatch.setattr(FakeBackend, "create_slab", slow)
    monkeypatch.setattr(Crew, "_guarded", note)
    backend.before_read = end
    if has_failed:
        backend.fail("read", ReadFailed("pread", 5, "Input/output error", 1000))
    with (
        open_directory(folder) as checkpoint,
        pytest.raises(CheckpointError if has_failed else Superseded),
    ):
        _load(checkpoint, backend, cancelled=cancelled)
    assert backend.calls["create"] <= 2, "the one that was being made, and no other"


def test_a_load_can_be_ended(folder: Path, backend: FakeBackend) -> None:
    cancelled = threading.Event()
    backend.before_read = lambda _: cancelled.set()
    with open_directory(folder) as checkpoint, pytest.raises(Superseded):
        _load(checkpoint, backend, cancelled=cancelled)
    assert backend.calls["read"] < 10
