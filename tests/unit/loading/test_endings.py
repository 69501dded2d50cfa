"""Loads that fail, are cancelled or lack something: which error it is, and that nothing stays behind."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest

from loaderd.checkpoint.checkpoint import open_directory
from loaderd.crew import Crew
from shared.errors import (
    CheckpointError,
    DigestMismatch,
    DriverError,
    OutOfMemory,
    ReadFailed,
    ResourceError,
    Superseded,
)
from shared.ids import DeviceId, SlabId
from tests.unit.loading.loads import RUN_BYTES, load
from tests.unit.memory.fake_backend import FakeBackend, FakeMemory, FakeSlab, FakeWritableSlab


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
        load(checkpoint, backend)
    if isinstance(caught.value, CheckpointError):
        assert caught.value.file == "model.safetensors"
        assert caught.value.tensor
        assert caught.value.byte > 0


def test_too_little_memory(folder: Path) -> None:
    backend = FakeBackend(FakeMemory(300 << 10))
    with open_directory(folder) as checkpoint, pytest.raises(OutOfMemory):
        load(checkpoint, backend)
    backend.check_no_leaks()


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
            load(checkpoint, backend)
    assert backend.calls["read"] < runs


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
        load(checkpoint, backend)


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
        load(checkpoint, backend, cancelled=cancelled)
    assert backend.calls["create"] <= 2, "the one that was being made, and no other"


def test_a_load_can_be_ended(folder: Path, backend: FakeBackend) -> None:
    cancelled = threading.Event()
    backend.before_read = lambda _: cancelled.set()
    with open_directory(folder) as checkpoint, pytest.raises(Superseded):
        load(checkpoint, backend, cancelled=cancelled)
    assert backend.calls["read"] < 10
