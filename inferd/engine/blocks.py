"""`BlockPool`: which KV blocks are free, in use, or kept because their prefix may be asked for again.

Invariants, checked by `check`:
1. every block is in exactly one of: free, cached (nobody uses it, its content has a key), used;
2. a used block's count is the number of sequences that hold it;
3. keys and blocks that carry one map to each other one to one;
4. a key belongs to one version; no chain of another version can produce it.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from shared.errors import InvariantError
from shared.ids import Digest

_KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """How many blocks are in which state; the three states add up to `total`."""

    total: int
    free: int
    cached: int
    used: int


@dataclass(frozen=True, slots=True)
class PrefixKey:
    """What a full block holds: these tokens, after that prefix, under that version's weights."""

    version: Digest
    chain: bytes

    @classmethod
    def root(cls, version: Digest) -> PrefixKey:
        """The key of the empty prefix of `version`; the seed of all its chains."""
        return cls(version, blake2b(version.encode(), digest_size=_KEY_BYTES).digest())

    def extend(self, tokens: Sequence[int]) -> PrefixKey:
        """The key of this prefix followed by `tokens`."""
        state = blake2b(self.chain, digest_size=_KEY_BYTES)
        state.update(array("q", tokens).tobytes())
        return PrefixKey(self.version, state.digest())


class BlockPool:
    """Hands out block numbers `0 … total - 1`.  Not thread-safe."""

    def __init__(self, total: int, block_tokens: int) -> None:
        self.total = total
        self.block_tokens = block_tokens
        self._free = list(range(total - 1, -1, -1))  # the lowest number is taken first
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._users: dict[int, int] = {}
        self._block_of: dict[PrefixKey, int] = {}
        self._key_of: dict[int, PrefixKey] = {}

    @property
    def available(self) -> int:
        """Blocks that `allocate` could hand out now."""
        return len(self._free) + len(self._cached)

    def counts(self) -> BlockCounts:
        """A snapshot of the states."""
        return BlockCounts(self.total, len(self._free), len(self._cached), len(self._users))

    def blocks_for(self, tokens: int) -> int:
        """Blocks that `tokens` tokens fill, the last one perhaps in part."""
        return -(-tokens // self.block_tokens)

    def match(self, keys: Sequence[PrefixKey]) -> list[int]:
        """Blocks of the longest known prefix of `keys`; nobody's until `hold` takes them."""
        blocks: list[int] = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def hold(self, blocks: Sequence[int]) -> None:
        """Add one user to each of `blocks`, which `match` returned."""
        for block in blocks:
            if block in self._users:
                self._users[block] += 1
            elif block in self._cached:
                del self._cached[block]
                self._users[block] = 1
            else:
                raise InvariantError(f"block {block} is held but has no content")

    def unused(self, blocks: Sequence[int]) -> int:
        """How many of `blocks` are cached and would no longer be available once held."""
        return sum(block in self._cached for block in blocks)

    def allocate(self, count: int) -> list[int] | None:
        """Take `count` blocks with one user each, the least recently used cached ones last of all;
        None, and nothing taken, if there are not enough."""
        if count > self.available:
            return None
        blocks: list[int] = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            else:
                block, _ = self._cached.popitem(last=False)
                self._drop_key(block)
            self._users[block] = 1
            blocks.append(block)
        return blocks

    def publish(self, block: int, key: PrefixKey) -> None:
        """Say that a used `block` is full and holds `key`.  If another block already does, nothing."""
        if block not in self._users:
            raise InvariantError(f"block {block} is published but not in use")
        if block in self._key_of:
            if self._key_of[block] != key:
                raise InvariantError(f"block {block} is published under a second key")
        elif key not in self._block_of:
            self._block_of[key] = block
            self._key_of[block] = key

    def release(self, blocks: Sequence[int]) -> None:
        """Take one user from each of `blocks`.  The end of a prefix is forgotten before its start."""
        for block in reversed(blocks):
            users = self._users.get(block)
            if users is None:
                raise InvariantError(f"block {block} is released but not in use")
            if users > 1:
                self._users[block] = users - 1
                continue
            del self._users[block]
            if block in self._key_of:
                self._cached[block] = None
            else:
                self._free.append(block)

    def forget(self, version: Digest) -> None:
        """Drop every prefix of `version`; its unused blocks become free."""
        for key in [key for key in self._block_of if key.version == version]:
            block = self._block_of[key]
            self._drop_key(block)
            if block in self._cached:
                del self._cached[block]
                self._free.append(block)

    def check(self, held: Sequence[Sequence[int]]) -> None:
        """Raise InvariantError unless the pool is consistent with the blocks that sequences hold."""
        users: dict[int, int] = {}
        for blocks in held:
            for block in blocks:
                users[block] = users.get(block, 0) + 1
        if users != self._users:
            raise InvariantError(f"sequences hold {users}, the pool counts {self._users}")
        states = [*self._free, *self._cached, *self._users]
        if sorted(states) != list(range(self.total)):
            raise InvariantError(f"blocks are not in exactly one state: {self.counts()}")
        if {block: key for key, block in self._block_of.items()} != self._key_of:
            raise InvariantError("prefix keys and blocks do not match")
        if not set(self._cached) <= set(self._key_of) or set(self._free) & set(self._key_of):
            raise InvariantError("a free block carries a key or a cached one does not")

    def _drop_key(self, block: int) -> None:
        key = self._key_of.pop(block)
        del self._block_of[key]
