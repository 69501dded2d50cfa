"""The fake backend is stricter than memory: what it must catch in the tests of others."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shared.errors import DriverError, InvariantError, OutOfMemory
from shared.ids import HOST_DEVICE, SlabId

from .fake_backend import FakeBackend


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
