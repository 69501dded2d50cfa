"""The pool against a device that others use too: what it promises holds after every step."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shared.errors import OutOfMemory
from shared.memory.pool import Pool
from tests.support.device_memory import FakeDevice, FakeReserve

PIECE = 4
CAPACITY = 100


class PoolMachine(RuleBasedStateMachine):
    """Slabs come and go, readers keep freed ones for a while, and another process takes what is free."""

    def __init__(self) -> None:
        super().__init__()
        self.device = FakeDevice(CAPACITY)
        self.reserve = FakeReserve(self.device, PIECE)
        self.slabs: list[int] = []
        self.lingering: list[int] = []  # freed by the writer, mapped by a reader
        self.others = 0

    @property
    def used(self) -> int:
        return sum(self.slabs)

    @initialize(pool_bytes=st.integers(PIECE, CAPACITY + 20), others=st.integers(0, CAPACITY))
    def start(self, pool_bytes: int, others: int) -> None:
        self.device.take(others)
        self.others = others
        self.pool = Pool(self.reserve, pool_bytes, PIECE)
        self.short = self.pool.keep(0)

    @rule(nbytes=st.integers(1, CAPACITY))
    def create(self, nbytes: int) -> None:
        free_before = self.device.free + self.pool.reserved_bytes
        try:
            self.pool.allocate(nbytes, lambda: self.device.take(nbytes))
        except OutOfMemory:
            assert nbytes > free_before, "a slab that fits was refused"
        else:
            assert nbytes <= free_before
            self.slabs.append(nbytes)
        self.short = self.pool.keep(self.used)

    @precondition(lambda self: self.slabs)
    @rule(data=st.data(), is_mapped=st.booleans())
    def close(self, data: st.DataObject, is_mapped: bool) -> None:
        nbytes = self.slabs.pop(data.draw(st.integers(0, len(self.slabs) - 1)))
        if is_mapped:
            self.lingering.append(nbytes)
        else:
            self.device.give(nbytes)
        self.short = self.pool.keep(self.used)

    @precondition(lambda self: self.lingering)
    @rule()
    def let_go(self) -> None:
        self.device.give(self.lingering.pop())
        self.short = self.pool.keep(self.used)

    @rule(nbytes=st.integers(1, CAPACITY))
    def other_takes(self, nbytes: int) -> None:
        """The other process gets only what is free, never of the reserve."""
        reserved = self.pool.reserved_bytes
        taken = min(nbytes, self.device.free)
        self.device.take(taken)
        self.others += taken
        assert self.pool.reserved_bytes == reserved

    @precondition(lambda self: self.others)
    @rule(data=st.data())
    def other_gives(self, data: st.DataObject) -> None:
        nbytes = data.draw(st.integers(1, self.others))
        self.device.give(nbytes)
        self.others -= nbytes
        self.short = self.pool.keep(self.used)

    @invariant()
    def every_byte_has_one_owner(self) -> None:
        held = self.used + sum(self.lingering) + self.others + self.pool.reserved_bytes
        assert held == self.device.taken <= CAPACITY

    @invariant()
    def the_pool_is_not_exceeded_by_its_reserve(self) -> None:
        if self.reserve.pieces:
            assert self.used + self.pool.reserved_bytes <= self.pool.pool_bytes

    @invariant()
    def it_is_short_only_of_what_the_device_has_not(self) -> None:
        assert self.short == self.pool.wanted_bytes(self.used) - self.pool.reserved_bytes
        if self.short:
            assert self.device.free < PIECE


PoolMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestPool = PoolMachine.TestCase
