"""What a load does when, and beside what."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from loaderd.checkpoint.checkpoint import open_directory
from shared.errors import (
    OutOfMemory,
)
from shared.ids import DeviceId, SlabId
from tests.unit.loading.loads import load
from tests.unit.memory.fake_backend import FakeBackend, FakeSlab, FakeWritableSlab


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
        for slab in load(checkpoint, backend).new_slabs:
            slab.close()
    assert waited
    assert all(waited)


def test_readers_stay_near_the_device_they_read_into(folder: Path, backend: FakeBackend) -> None:
    with open_directory(folder) as checkpoint:
        loaded = load(checkpoint, backend)
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
        loaded = load(checkpoint, backend)
    assert by_us == [True] + [False] * (len(loaded.new_slabs) - 1)
    for slab in loaded.new_slabs:
        slab.close()


def test_reads_and_hashes_are_paced(folder: Path, backend: FakeBackend) -> None:
    meter = _Meter()
    with open_directory(folder) as checkpoint:
        for slab in load(checkpoint, backend, pace=meter).new_slabs:
            slab.close()
        assert meter.admitted == 2 * checkpoint.total_bytes, "once to read, once to hash"


def test_what_lacks_memory_does_not_wait_at_the_gate(folder: Path, backend: FakeBackend) -> None:
    """At a limited rate it would be told only when each reader had had its turn."""
    lacking = OutOfMemory(what="a slab", needed_bytes=2, free_bytes=1)
    backend.fail("create", lacking)
    meter = _Meter()
    with open_directory(folder) as checkpoint, pytest.raises(OutOfMemory) as caught:
        load(checkpoint, backend, pace=meter)
    assert caught.value is lacking
    assert meter.admitted == 0
