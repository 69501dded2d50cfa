"""The pool's accounts in single cases; tests/property/test_pool.py has the rest."""

from __future__ import annotations

import pytest

from shared.errors import ConfigError, InvariantError, OutOfMemory
from shared.ids import HOST_DEVICE
from shared.memory.host import HostBackend
from shared.memory.pool import PIECE_BYTES, Pool
from shared.memory.selection import reserve_pool
from shared.memory.usage import DeviceUsage
from tests.support.device_memory import FakeDevice, FakeReserve


def test_a_slab_takes_from_the_reserve_only_what_is_not_free() -> None:
    device = FakeDevice(100)
    reserve = FakeReserve(device, 10)
    pool = Pool(reserve, 60, 10)
    assert pool.keep(0) == 0
    reserve.resizes.clear()
    pool.allocate(40, lambda: device.take(40))  # there are 40 free bytes: the reserve is not opened
    assert reserve.resizes == []
    assert pool.keep(40) == 0
    assert pool.reserved_bytes == 20
    pool.allocate(50, lambda: device.take(50))
    assert reserve.pieces == 1


def test_a_refusal_without_a_shortage_takes_piece_after_piece_and_ends() -> None:
    device = FakeDevice(100)
    pool = Pool(FakeReserve(device, 10), 40, 10)
    pool.keep(0)
    seen = []

    def refuse() -> None:
        seen.append(pool.reserved_bytes)
        assert len(seen) < 10, "this does not end"
        raise OutOfMemory(what="addresses", needed_bytes=10, free_bytes=device.free)

    with pytest.raises(OutOfMemory):
        pool.allocate(10, refuse)
    assert seen == [40, 30, 20, 10, 0]


def test_what_is_given_up_for_a_slab_that_fails_is_taken_back() -> None:
    device = FakeDevice(50)
    pool = Pool(FakeReserve(device, 10), 40, 10)
    pool.keep(0)
    with pytest.raises(OutOfMemory):
        pool.allocate(60, lambda: device.take(60))
    assert pool.reserved_bytes == 0
    assert pool.keep(0) == 0
    assert pool.reserved_bytes == 40


def test_other_errors_leave_the_reserve_alone() -> None:
    device = FakeDevice(50)
    reserve = FakeReserve(device, 10)
    pool = Pool(reserve, 40, 10)
    pool.keep(0)

    def broken() -> None:
        raise InvariantError("the context is lost")

    with pytest.raises(InvariantError):
        pool.allocate(10, broken)
    assert reserve.pieces == 4


def test_a_short_pool_says_by_how_much_and_fills_up_later() -> None:
    device = FakeDevice(50)
    device.take(35)
    pool = Pool(FakeReserve(device, 10), 40, 10)
    assert pool.keep(0) == 30
    device.give(35)
    assert pool.keep(0) == 0


@pytest.mark.parametrize(("pool_bytes", "piece_bytes"), [(9, 10), (0, 10), (10, 0)])
def test_a_pool_has_at_least_one_piece(pool_bytes: int, piece_bytes: int) -> None:
    with pytest.raises(InvariantError):
        Pool(FakeReserve(FakeDevice(50), 10), pool_bytes, piece_bytes)


def test_the_host_backend_has_no_pool() -> None:
    with pytest.raises(ConfigError, match="the host backend has no pool"):
        reserve_pool(HostBackend(), HOST_DEVICE, PIECE_BYTES)


@pytest.mark.parametrize(
    ("free", "largest", "expected"), [(0, 0, 0.0), (-5, 0, 0.0), (10, 10, 0.0), (10, 4, 0.6)]
)
def test_fragmentation_is_what_one_slab_cannot_take(free: int, largest: int, expected: float) -> None:
    assert DeviceUsage(free, largest).fragmentation == pytest.approx(expected)
