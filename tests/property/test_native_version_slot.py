"""The version slot against a model of plain numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from shared._native import VersionSlot
from shared.errors import InvariantError

slots = st.integers(0, VersionSlot.SLOTS - 1)


class VersionSlotModel(RuleBasedStateMachine):
    """Every verb at any time: carried out where the rules allow it, refused without effect elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.slot = VersionSlot()
        self.current: int | None = None
        self.references = [0] * VersionSlot.SLOTS
        self.is_closed = [True] * VersionSlot.SLOTS

    def attempt(self, is_allowed: bool, verb: Callable[[], None]) -> bool:
        if not is_allowed:
            with pytest.raises(InvariantError):
                verb()
            return False
        verb()
        return True

    @rule()
    def acquire(self) -> None:
        assert self.slot.acquire() == self.current
        if self.current is not None:
            self.references[self.current] += 1

    @rule(index=slots)
    def try_acquire(self, index: int) -> None:
        assert self.slot.try_acquire(index) is not self.is_closed[index]
        self.references[index] += not self.is_closed[index]

    @rule(index=slots)
    def release(self, index: int) -> None:
        if self.attempt(self.references[index] > 0, lambda: self.slot.release(index)):
            self.references[index] -= 1

    @rule(index=slots)
    def publish(self, index: int) -> None:
        is_allowed = not self.is_closed[index] and self.current != index
        if self.attempt(is_allowed, lambda: self.slot.publish(index)):
            self.current = index

    @rule()
    def retract(self) -> None:
        self.slot.retract()
        self.current = None

    @rule(index=slots)
    def close(self, index: int) -> None:
        is_allowed = not self.is_closed[index] and self.current != index
        if self.attempt(is_allowed, lambda: self.slot.close(index)):
            self.is_closed[index] = True

    @rule(index=slots)
    def open(self, index: int) -> None:
        is_allowed = self.is_closed[index] and self.references[index] == 0
        if self.attempt(is_allowed, lambda: self.slot.open(index)):
            self.is_closed[index] = False

    @rule(index=slots)
    def reopen(self, index: int) -> None:
        if self.attempt(self.is_closed[index], lambda: self.slot.reopen(index)):
            self.is_closed[index] = False

    @invariant()
    def agrees(self) -> None:
        assert self.slot.current() == self.current
        for index in range(VersionSlot.SLOTS):
            assert self.slot.references(index) == self.references[index]
            is_drained = self.is_closed[index] and self.references[index] == 0
            assert self.slot.is_drained(index) is is_drained


TestVersionSlot = VersionSlotModel.TestCase
