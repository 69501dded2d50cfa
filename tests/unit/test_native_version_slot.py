"""The version slot as Python sees it; its races are tested in tests/stress."""

from __future__ import annotations

import threading

import pytest

from inferd.engine.protocol import SLOTS
from shared._native import VersionSlot
from shared.errors import InvariantError


def test_there_are_as_many_slots_as_the_engine_has() -> None:
    assert VersionSlot.SLOTS == SLOTS


def test_at_first_there_is_nothing_to_acquire() -> None:
    slot = VersionSlot()
    assert slot.acquire() is None
    assert slot.current() is None
    assert not slot.try_acquire(0)
    slot.open(0)
    slot.publish(0)
    assert slot.references(0) == 0
    assert slot.acquire() == 0


def test_a_version_is_drained_when_its_last_reader_is_done() -> None:
    slot = VersionSlot()
    slot.open(0)
    slot.publish(0)
    assert (slot.acquire(), slot.acquire()) == (0, 0)
    slot.release(0)
    slot.open(1)
    slot.publish(1)
    assert slot.acquire() == 1
    assert slot.references(0) == 1
    assert slot.try_acquire(0)  # a conversation goes on with the version it began on
    slot.close(0)
    assert not slot.try_acquire(0)
    slot.release(0)
    assert not slot.is_drained(0)
    slot.release(0)
    assert slot.is_drained(0)
    assert not slot.is_drained(1)


def test_a_rollback_is_a_flip_to_what_is_retained() -> None:
    slot = VersionSlot()
    slot.open(0)
    slot.open(1)
    for index in (0, 1, 0):
        slot.publish(index)
        assert slot.acquire() == index
    assert (slot.references(0), slot.references(1)) == (2, 1)


def test_after_retract_there_is_nothing_to_acquire() -> None:
    slot = VersionSlot()
    slot.open(0)
    slot.publish(0)
    assert slot.acquire() == 0
    slot.retract()
    slot.retract()
    assert slot.acquire() is None
    assert slot.references(0) == 1
    slot.publish(0)
    assert slot.references(0) == 1


def test_a_drain_can_be_given_up() -> None:
    slot = VersionSlot()
    slot.open(0)
    assert slot.try_acquire(0)
    slot.close(0)
    with pytest.raises(InvariantError, match="drained"):
        slot.open(0)
    slot.reopen(0)
    assert slot.try_acquire(0)
    assert slot.references(0) == 2


def test_misuse_is_named_and_changes_nothing() -> None:
    slot = VersionSlot()
    for misuse in (
        lambda: slot.release(0),
        lambda: slot.publish(0),
        lambda: slot.close(0),
        lambda: slot.release(2),
        lambda: slot.try_acquire(-1),
    ):
        with pytest.raises(InvariantError, match="slot"):
            misuse()
    slot.open(0)
    slot.publish(0)
    for misuse in (
        lambda: slot.publish(0),
        lambda: slot.close(0),
        lambda: slot.open(0),
        lambda: slot.reopen(0),
        lambda: slot.release(0),
    ):
        with pytest.raises(InvariantError, match="slot"):
            misuse()
    assert slot.references(0) == 0
    assert slot.acquire() == 0


def test_counts_hold_between_threads() -> None:
    slot = VersionSlot()
    slot.open(0)
    slot.open(1)
    slot.publish(0)
    is_over = threading.Event()

    def read() -> None:
        while not is_over.is_set():
            index = slot.acquire()
            assert index is not None
            slot.release(index)

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for turn in range(2000):
        slot.publish(1 - turn % 2)
    is_over.set()
    for reader in readers:
        reader.join()
    assert (slot.references(0), slot.references(1)) == (0, 0)
