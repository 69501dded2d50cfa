"""The block pool against a trivial model: who holds what, and which prefixes may still be found."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from inferd.engine.blocks import BlockPool, PrefixKey
from shared.errors import InvariantError
from shared.ids import Digest

VERSIONS = tuple(Digest("sha256:" + digit * 64) for digit in "ab")
TOTAL, SIZE = 12, 2


def chain(version: Digest, tokens: list[int]) -> list[PrefixKey]:
    """Keys of the full blocks of `tokens`."""
    keys: list[PrefixKey] = []
    key = PrefixKey.root(version)
    for at in range(0, len(tokens) - SIZE + 1, SIZE):
        key = key.extend(tokens[at : at + SIZE])
        keys.append(key)
    return keys


class PoolMachine(RuleBasedStateMachine):
    """Sequences come with a prompt of few different tokens, so that prefixes meet often."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(TOTAL, SIZE)
        self.held: list[list[int]] = []
        self.content: dict[int, tuple[Digest, tuple[int, ...]]] = {}  # what each block was last filled with

    @rule(version=st.sampled_from(VERSIONS), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=8))
    def start(self, version: Digest, tokens: list[int]) -> None:
        keys = chain(version, tokens)
        known = self.pool.match(keys)
        for number, block in enumerate(known):
            # A block that is found holds exactly this prefix of exactly this version.
            assert self.content[block] == (version, tuple(tokens[: (number + 1) * SIZE]))
        needed = self.pool.blocks_for(len(tokens)) - len(known)
        if needed > self.pool.available - self.pool.unused(known):
            return
        self.pool.hold(known)
        fresh = self.pool.allocate(needed)
        assert fresh is not None
        in_use = {block for blocks in self.held for block in blocks}
        assert not in_use & set(fresh)
        blocks = known + fresh
        for number, key in enumerate(keys):
            if number >= len(known):
                self.content[blocks[number]] = (version, tuple(tokens[: (number + 1) * SIZE]))
            self.pool.publish(blocks[number], key)
        self.held.append(blocks)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.pool.release(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @rule(version=st.sampled_from(VERSIONS))
    def retire(self, version: Digest) -> None:
        self.pool.forget(version)
        assert not self.pool.match(chain(version, [0, 0]))
        assert not self.pool.match(chain(version, [1, 1]))

    @rule(count=st.integers(0, TOTAL + 1))
    def ask_for_too_much(self, count: int) -> None:
        before = self.pool.counts()
        blocks = self.pool.allocate(count)
        assert (blocks is None) == (count > before.free + before.cached)
        if blocks is None:
            assert self.pool.counts() == before
        else:
            self.held.append(blocks)

    @invariant()
    def books_agree(self) -> None:
        self.pool.check(self.held)
        counts = self.pool.counts()
        assert counts.free + counts.cached + counts.used == counts.total == TOTAL


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPool = PoolMachine.TestCase


@given(
    st.lists(st.integers(0, 3), min_size=2, max_size=10), st.lists(st.integers(0, 3), min_size=2, max_size=10)
)
def test_keys_are_equal_only_for_equal_prefixes_of_one_version(one: list[int], other: list[int]) -> None:
    a, b = VERSIONS
    for first in chain(a, one):
        assert first not in chain(b, one)
        assert first.chain not in [key.chain for key in chain(b, other)]
    common = [x == y for x, y in zip(chain(a, one), chain(a, other), strict=False)]
    wanted = [one[: n * SIZE] == other[: n * SIZE] for n in range(1, len(common) + 1)]
    assert common == wanted


def test_the_least_recently_used_prefix_is_evicted_first_and_its_end_before_its_start() -> None:
    pool = BlockPool(4, SIZE)
    old, new = chain(VERSIONS[0], [0, 0, 1, 1]), chain(VERSIONS[0], [2, 2, 3, 3])
    for keys in (old, new):
        blocks = pool.allocate(2)
        assert blocks is not None
        for block, key in zip(blocks, keys, strict=True):
            pool.publish(block, key)
        pool.release(blocks)
    pool.allocate(1)
    assert len(pool.match(old)) == 1
    assert len(pool.match(new)) == 2


def test_check_finds_planted_violations() -> None:
    pool = BlockPool(4, SIZE)
    blocks = pool.allocate(2)
    assert blocks is not None
    pool.check([blocks])
    with pytest.raises(InvariantError):
        pool.check([])
    with pytest.raises(InvariantError):
        pool.check([blocks, blocks[:1]])
    pool._free.pop()
    with pytest.raises(InvariantError):
        pool.check([blocks])


def test_misuse_raises() -> None:
    pool = BlockPool(2, SIZE)
    key = PrefixKey.root(VERSIONS[0])
    with pytest.raises(InvariantError):
        pool.release([0])
    with pytest.raises(InvariantError):
        pool.publish(0, key)
    with pytest.raises(InvariantError):
        pool.hold([0])
    blocks = pool.allocate(1)
    assert blocks is not None
    pool.publish(blocks[0], key)
    with pytest.raises(InvariantError):
        pool.publish(blocks[0], key.extend([1]))
    pool.release(blocks)
    with pytest.raises(InvariantError):
        pool.release(blocks)
