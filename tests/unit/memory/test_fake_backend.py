"""The fake backend is stricter than memory: what it must catch in the tests of others."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from shared.errors import DriverError, InvariantError, OutOfMemory, ProtocolError
from shared.ids import HOST_DEVICE, DeviceId, SlabId
from tests.support.replica import replica_of

from .fake_backend import FakeBackend, FakeMemory


def test_leaks_are_named() -> None:
    backend = FakeBackend()
    slab = backend.create_slab(HOST_DEVICE, 16)
    with pytest.raises(InvariantError, match=slab.entry.slab_id):
        backend.check_no_leaks()
    with slab.seal() as readable:
        with pytest.raises(InvariantError, match=slab.entry.slab_id):
            backend.check_no_leaks()
        assert readable.entry == slab.entry
    backend.check_no_leaks()


def test_a_write_through_a_tensor_is_found() -> None:
    slab = FakeBackend().create_slab(HOST_DEVICE, 16).seal()
    slab.tensor(0, "U8", (16,)).fill_(0)
    with pytest.raises(InvariantError, match="written"):
        slab.close()


def test_what_was_not_read_is_not_zero() -> None:
    with FakeBackend().create_slab(HOST_DEVICE, 4).seal() as slab:
        assert slab.tensor(0, "U8", (4,)).tolist() == [0xA5] * 4


def test_the_nth_call_fails_and_the_next_does_not() -> None:
    backend = FakeBackend()
    error = OutOfMemory(what="a slab", needed_bytes=16, free_bytes=0)
    backend.fail("create", error, nth=2)
    with backend.create_slab(HOST_DEVICE, 16) as slab, Path(os.devnull).open() as file:
        with pytest.raises(OutOfMemory):
            backend.create_slab(HOST_DEVICE, 16)
        backend.create_slab(HOST_DEVICE, 16).close()
        backend.fail("read", DriverError("pread", 5, "I/O error"))
        with pytest.raises(DriverError):
            slab.read_file(file.fileno(), 0, 0, 0)
        assert slab.read_file(file.fileno(), 0, 0, 0) == 0
    assert backend.memory.used_bytes == 0
    assert backend.calls["create"] == 3


def test_a_read_can_be_held() -> None:
    backend = FakeBackend()
    held: list[SlabId] = []
    backend.before_read = held.append
    with backend.create_slab(HOST_DEVICE, 16) as slab, Path(os.devnull).open() as file:
        slab.read_file(file.fileno(), 0, 0, 0)
        assert held == [slab.entry.slab_id]


def test_devices_have_memory_of_their_own() -> None:
    one, other = DeviceId("GPU-a"), DeviceId("GPU-b")
    backend = FakeBackend(FakeMemory(capacity_bytes=32, devices=(one, other)))
    with backend.create_slab(one, 32) as full:
        assert (backend.free_bytes(one), backend.free_bytes(other)) == (0, 32)
        with pytest.raises(OutOfMemory, match=one):
            backend.create_slab(one, 1)
        backend.create_slab(other, 32).close()
        with full.seal() as slab, replica_of(slab, backend, other) as replica:
            assert replica.entry.device == other
            with pytest.raises(ProtocolError):
                backend.import_slab(replace(replica.entry, device=one), os.dup(replica.borrow_fd()))
    backend.check_no_leaks()
    assert backend.memory.used_bytes == 0


def test_a_copy_can_fail_and_needs_an_open_source() -> None:
    one, other = DeviceId("GPU-a"), DeviceId("GPU-b")
    backend = FakeBackend(FakeMemory(devices=(one, other)))
    with backend.create_slab(one, 16).seal() as slab:
        backend.fail("copy", DriverError("copy", 719, "planted"))
        with pytest.raises(DriverError):
            replica_of(slab, backend, other)
        assert backend.memory.used[other] == 0
    with pytest.raises(InvariantError, match="closed"):
        replica_of(slab, backend, other)
    backend.check_no_leaks()
