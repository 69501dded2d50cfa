"""The scheduler under arbitrary submits, steps, cancels and moves: nobody is lost, starved or mixed up."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from inferd.engine.blocks import BlockPool, PrefixKey
from inferd.engine.protocol import SLOTS
from inferd.engine.scheduler import Limits, Scheduler, Sequence, StepPlan, share
from shared.errors import InvalidRequest, InvariantError, ResourceError
from shared.ids import Digest

ROOTS = tuple(PrefixKey.root(Digest("sha256:" + digit * 64)) for digit in "ab")
LIMITS = Limits(max_batch_tokens=7, max_sequences=4, max_waiting=6, mixed_batch_tokens=5)
BLOCKS, SIZE = 9, 2


def make(number: int, slot: int, tokens: list[int], max_tokens: int = 4) -> Sequence:
    return Sequence(number, slot, ROOTS[slot], list(tokens), max_tokens)


def run_step(scheduler: Scheduler, cached: dict[int, tuple[int, list[int]]]) -> StepPlan:
    """Carry a plan out: what each block would hold is tracked in `cached`, token by token."""
    plan = scheduler.plan()
    total = sum(chunk.count for batch in plan.batches for chunk in batch.chunks)
    limits = scheduler.limits
    has_decodes = any(batch.decodes for batch in plan.batches)
    assert total == sum(batch.tokens for batch in plan.batches)
    assert total <= (limits.tokens_beside_decodes if has_decodes else limits.max_batch_tokens)
    assert len({batch.slot for batch in plan.batches}) == len(plan.batches)
    for block in plan.fresh_blocks:
        cached.pop(block, None)
    for batch in plan.batches:
        for number, chunk in enumerate(batch.chunks):
            sequence = chunk.sequence
            assert sequence.slot == batch.slot
            assert chunk.count == 1 or number >= batch.decodes
            assert chunk.count <= sequence.pending
            assert chunk.is_last == (chunk.count == sequence.pending)
            # Everything before the chunk lies in the sequence's blocks, written under its own version.
            for at in range(chunk.start):
                slot, held = cached[sequence.blocks[at // SIZE]]
                assert sequence.is_mixed or slot == sequence.slot
                assert held[at % SIZE] == sequence.tokens[at]
            for at in range(chunk.start, chunk.start + chunk.count):
                slot, held = cached.setdefault(sequence.blocks[at // SIZE], (sequence.slot, []))
                assert len(held) == at % SIZE, "a token is written over another"
                held.append(sequence.tokens[at])
    for batch in plan.batches:
        for chunk in batch.chunks:
            scheduler.complete(chunk)
            if chunk.is_last:
                sequence = chunk.sequence
                sequence.tokens.append(len(sequence.tokens) % 2)
                if len(sequence.tokens) - sequence.prompt_tokens >= sequence.max_tokens:
                    scheduler.remove(sequence.sequence_id)
    return plan


class SchedulerMachine(RuleBasedStateMachine):
    """Few blocks and few different tokens: preemption and prefix hits are the rule."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = Scheduler(BlockPool(BLOCKS, SIZE), LIMITS)
        self.cached: dict[int, tuple[int, list[int]]] = {}
        self.number = 0

    @rule(
        slot=st.integers(0, SLOTS - 1),
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=20),
        max_tokens=st.integers(1, 6),
    )
    def submit(self, slot: int, tokens: list[int], max_tokens: int) -> None:
        self.number += 1
        sequence = make(self.number, slot, tokens, max_tokens)
        is_too_long = -(-(len(tokens) + max_tokens) // SIZE) > BLOCKS
        if is_too_long:
            with pytest.raises(InvalidRequest):
                self.scheduler.add(sequence)
        elif self.scheduler.waiting >= LIMITS.max_waiting:
            with pytest.raises(ResourceError):
                self.scheduler.add(sequence)
        else:
            self.scheduler.add(sequence)

    @rule()
    def step(self) -> None:
        plan = run_step(self.scheduler, self.cached)
        assert bool(plan.batches) or not self.scheduler.has_work, "work is left and nothing is computed"

    @precondition(lambda self: self.scheduler.has_work)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.scheduler.remove(data.draw(st.sampled_from(sorted(self.scheduler._all))))

    @precondition(lambda self: self.scheduler.has_work)
    @rule(data=st.data(), slot=st.integers(0, SLOTS - 1), is_kept=st.booleans())
    def move(self, data: st.DataObject, slot: int, is_kept: bool) -> None:
        number = data.draw(st.sampled_from(sorted(self.scheduler._all)))
        self.scheduler.move(number, slot, ROOTS[slot], is_kept=is_kept)

    @rule(slot=st.integers(0, SLOTS - 1))
    def retire(self, slot: int) -> None:
        if self.scheduler.by_slot()[slot]:
            with pytest.raises(InvariantError):
                self.scheduler.forget(slot, ROOTS[slot], is_shared=False)
        else:
            self.scheduler.forget(slot, ROOTS[slot], is_shared=False)

    @invariant()
    def books_agree(self) -> None:
        self.scheduler.check()
        assert self.scheduler.running <= LIMITS.max_sequences

    def teardown(self) -> None:
        steps = 0
        while self.scheduler.has_work:
            run_step(self.scheduler, self.cached)
            steps += 1
            assert steps < 2000, "a sequence starves"
        counts = self.scheduler.pool.counts()
        assert counts.free + counts.cached == counts.total


SchedulerMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestScheduler = SchedulerMachine.TestCase


@given(
    st.integers(0, 50),
    st.lists(st.integers(0, 40), min_size=2, max_size=2),
    st.integers(0, 1),
)
def test_share_is_even_and_wastes_nothing(budget: int, demand: list[int], first: int) -> None:
    shares = share(budget, demand, first=first)
    assert sum(shares) == min(budget, sum(demand))
    assert all(0 <= given <= asked for given, asked in zip(shares, demand, strict=True))
    hungry = [given for given, asked in zip(shares, demand, strict=True) if given < asked]
    assert all(max(shares) - given <= 1 for given in hungry)


def test_a_flood_on_one_slot_does_not_keep_the_other_out() -> None:
    scheduler = Scheduler(BlockPool(64, SIZE), Limits(8, 4, 100))
    for number in range(40):
        scheduler.add(make(number, 0, [0, 1, 0, 1], 8))
    _plain_step(scheduler)
    scheduler.add(make(100, 1, [1, 1, 1], 2))
    scheduler.add(make(101, 1, [1, 1, 1], 2))
    for _ in range(12):
        if not scheduler.by_slot()[1]:
            break
        _plain_step(scheduler)
    assert scheduler.by_slot()[1] == 0
    assert scheduler.by_slot()[0] > 30


def _plain_step(scheduler: Scheduler) -> None:
    for batch in scheduler.plan().batches:
        for chunk in batch.chunks:
            scheduler.complete(chunk)
            if chunk.is_last:
                chunk.sequence.tokens.append(0)
                if len(chunk.sequence.tokens) - chunk.sequence.prompt_tokens >= chunk.sequence.max_tokens:
                    scheduler.remove(chunk.sequence.sequence_id)


def test_prompts_of_both_slots_share_a_step() -> None:
    scheduler = Scheduler(BlockPool(64, SIZE), Limits(8, 4, 100))
    scheduler.add(make(1, 0, [0] * 30))
    scheduler.add(make(2, 1, [0] * 30))
    counts = {batch.slot: sum(c.count for c in batch.chunks) for batch in scheduler.plan().batches}
    assert counts == {0: 4, 1: 4}


def test_a_decode_goes_on_while_a_long_prompt_is_computed() -> None:
    scheduler = Scheduler(BlockPool(64, SIZE), Limits(8, 4, 100))
    scheduler.add(make(1, 0, [0], 20))
    _plain_step(scheduler)
    scheduler.add(make(2, 0, [1] * 30))
    for _ in range(4):
        plan = scheduler.plan()
        assert [chunk.sequence.sequence_id for chunk in plan.batches[0].chunks] == [1, 2]
        assert plan.batches[0].decodes == 1
        for chunk in plan.batches[0].chunks:
            scheduler.complete(chunk)
            if chunk.is_last:
                chunk.sequence.tokens.append(0)


def test_the_youngest_is_preempted_and_keeps_its_slot() -> None:
    scheduler = Scheduler(BlockPool(4, SIZE), Limits(8, 4, 100))
    scheduler.add(make(1, 0, [0, 0, 0], 5))
    scheduler.add(make(2, 1, [1, 1, 1], 5))
    while scheduler.preemptions == 0:
        _plain_step(scheduler)
    assert scheduler.by_slot() == (1, 1)
    assert scheduler._all[2].slot == 1
    assert not scheduler._all[2].is_running
    scheduler.check()
    while scheduler.has_work:
        _plain_step(scheduler)
    assert scheduler.pool.counts().used == 0


def test_what_was_computed_under_two_versions_is_never_offered_as_a_prefix() -> None:
    scheduler = Scheduler(BlockPool(8, SIZE), LIMITS)
    scheduler.add(make(1, 0, [0], 6))
    _plain_step(scheduler)
    scheduler.move(1, 1, ROOTS[1], is_kept=True)  # in the middle of its first block
    while scheduler.has_work:
        _plain_step(scheduler)
    for root in ROOTS:
        assert scheduler.pool.match([root.extend([0, 0])]) == []
    assert scheduler.pool.counts().free == 8


def test_the_same_id_twice_is_refused() -> None:
    scheduler = Scheduler(BlockPool(4, SIZE), LIMITS)
    scheduler.add(make(1, 0, [0]))
    with pytest.raises(InvariantError):
        scheduler.add(make(1, 1, [0]))
    with pytest.raises(InvariantError):
        scheduler.remove(2)


@pytest.mark.parametrize("limits", [(0, 1, 1), (4, 0, 1), (4, 4, 0), (4, 5, 1)])
def test_limits_that_cannot_work_are_refused(limits: tuple[int, int, int]) -> None:
    with pytest.raises(InvalidRequest):
        Limits(*limits)
