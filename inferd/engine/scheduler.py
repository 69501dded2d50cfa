"""`Scheduler`: which tokens of which sequences the next step computes.  A pure state machine.

Continuous batching over both slots.  A step holds one batch per slot; every running sequence that
only waits for its next token is in it, the rest of the token budget goes to prompts in chunks, in
equal shares where both slots ask.  Beside sequences that decode the budget is smaller, so that a long
prompt does not hold their next tokens up.  Where blocks run out, the youngest running sequence gives its
blocks back and is computed again later, on the slot it was admitted to.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from inferd.engine.blocks import BlockPool, PrefixKey
from inferd.engine.protocol import SLOTS
from shared.errors import InvalidRequest, InvariantError, ResourceError


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of a step and of the queue."""

    max_batch_tokens: int
    max_sequences: int
    max_waiting: int
    mixed_batch_tokens: int | None = None  # of a step in which sequences decode; None: as any other

    def __post_init__(self) -> None:
        if min(self.max_batch_tokens, self.max_sequences, self.max_waiting) < 1:
            raise InvalidRequest("every limit of the scheduler must be at least 1")
        if self.max_sequences > self.max_batch_tokens:
            raise InvalidRequest(
                f"max_sequences {self.max_sequences} exceeds max_batch_tokens {self.max_batch_tokens}: "
                "a step could not give each running sequence its next token"
            )
        if not self.max_sequences <= self.tokens_beside_decodes <= self.max_batch_tokens:
            raise InvalidRequest(
                f"mixed_batch_tokens {self.tokens_beside_decodes} must lie between max_sequences "
                f"{self.max_sequences} and max_batch_tokens {self.max_batch_tokens}"
            )

    @property
    def tokens_beside_decodes(self) -> int:
        """Tokens of a step in which sequences decode, theirs included."""
        return self.max_batch_tokens if self.mixed_batch_tokens is None else self.mixed_batch_tokens


@dataclass(slots=True, eq=False)
class Sequence:
    """One prompt and its continuation; the scheduler owns everything but `tokens[prompt_tokens:]`."""

    sequence_id: int
    slot: int
    root: PrefixKey  # of the version it runs on
    tokens: list[int]
    max_tokens: int
    prompt_tokens: int = 0
    computed: int = 0  # tokens whose keys and values lie in `blocks`
    cached_tokens: int = 0  # prompt tokens found in the prefix cache at first admission
    blocks: list[int] = field(default_factory=list)
    keys: list[PrefixKey] = field(default_factory=list)  # of the full blocks' worth of `tokens`
    is_running: bool = False
    was_admitted: bool = False
    is_mixed: bool = False  # its keys and values come from more than one version: never a prefix

    def __post_init__(self) -> None:
        self.prompt_tokens = len(self.tokens)

    @property
    def pending(self) -> int:
        """Tokens still to be computed; 1 when it only waits for its next token."""
        return len(self.tokens) - self.computed


@dataclass(frozen=True, slots=True)
class Chunk:
    """`count` tokens of `sequence` from position `start`; `is_last` ones yield a next token."""

    sequence: Sequence
    start: int
    count: int
    is_last: bool


@dataclass(frozen=True, slots=True)
class SlotBatch:
    """What one forward pass on a slot's model computes: first the `decodes` chunks of one token with
    a context, then prompt chunks."""

    slot: int
    chunks: tuple[Chunk, ...]
    decodes: int

    @property
    def tokens(self) -> int:
        """Tokens that are computed."""
        return sum(chunk.count for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: at most one batch per slot, and blocks that still hold someone's old content."""

    batches: tuple[SlotBatch, ...]
    fresh_blocks: tuple[int, ...]


class Scheduler:
    """Holds every sequence from `add` until `remove`.  Not thread-safe; never blocks."""

    def __init__(self, pool: BlockPool, limits: Limits) -> None:
        self.pool = pool
        self.limits = limits
        self.preemptions = 0
        self._all: dict[int, Sequence] = {}
        self._running: list[Sequence] = []  # by admission, oldest first
        self._waiting: tuple[deque[Sequence], ...] = tuple(deque() for _ in range(SLOTS))
        self._turn = 0  # the slot that goes first where both have an equal claim
        self._fresh: list[int] = []

    @property
    def running(self) -> int:
        """Sequences that hold blocks."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Sequences that wait for a seat or for blocks."""
        return sum(map(len, self._waiting))

    @property
    def has_work(self) -> bool:
        """Whether any sequence is left."""
        return bool(self._all)

    def by_slot(self) -> tuple[int, ...]:
        """Running and waiting sequences of each slot."""
        counts = [0] * SLOTS
        for sequence in self._all.values():
            counts[sequence.slot] += 1
        return tuple(counts)

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence.  Raises InvalidRequest if the pool could never hold it,
        ResourceError if the queue is full, InvariantError if its id is in use."""
        if sequence.sequence_id in self._all:
            raise InvariantError(f"sequence {sequence.sequence_id} was submitted twice")
        if not sequence.tokens or sequence.max_tokens < 1:
            raise InvalidRequest("a sequence needs at least one prompt token and one token to generate")
        needed = self.pool.blocks_for(len(sequence.tokens) + sequence.max_tokens)
        if needed > self.pool.total:
            raise InvalidRequest(
                f"{len(sequence.tokens)} prompt tokens and {sequence.max_tokens} to generate need "
                f"{needed} KV blocks, the cache has {self.pool.total}"
            )
        if self.waiting >= self.limits.max_waiting:
            raise ResourceError(
                f"{self.waiting} sequences are waiting, {self.limits.max_waiting} may",
                waiting=self.waiting,
                max_waiting=self.limits.max_waiting,
            )
        self._all[sequence.sequence_id] = sequence
        self._waiting[sequence.slot].append(sequence)

    def remove(self, sequence_id: int) -> None:
        """Let a sequence go, wherever it is, and give its blocks back."""
        sequence = self._all.pop(sequence_id, None)
        if sequence is None:
            raise InvariantError(f"sequence {sequence_id} is removed but unknown")
        if sequence.is_running:
            self._running.remove(sequence)
            self._give_back(sequence)
        else:
            self._waiting[sequence.slot].remove(sequence)

    def move(self, sequence_id: int, slot: int, root: PrefixKey, *, is_kept: bool) -> None:
        """Let a sequence go on in `slot`.  With `is_kept` its keys and values stay as they are and are
        not offered as prefixes again; otherwise all its tokens are computed anew."""
        sequence = self._all.get(sequence_id)
        if sequence is None:
            raise InvariantError(f"sequence {sequence_id} is moved but unknown")
        if not sequence.is_running:
            self._waiting[sequence.slot].remove(sequence)
            self._waiting[slot].append(sequence)
        elif not is_kept:
            self._running.remove(sequence)
            self._give_back(sequence)
            self._waiting[slot].appendleft(sequence)
        sequence.is_mixed = sequence.is_running
        sequence.slot = slot
        sequence.root = root
        sequence.keys = []

    def plan(self) -> StepPlan:
        """Decide the next step.  Every chunk of it must be passed to `complete`, or its sequence to
        `remove`, before the next call."""
        decodes = self._plan_decodes()
        tokens = self.limits.tokens_beside_decodes if decodes else self.limits.max_batch_tokens
        budget = tokens - len(decodes)
        self._admit(budget)
        # A sequence seated just now may lack a single token, as one that decodes does.
        decoding = {chunk.sequence.sequence_id for chunk in decodes}
        prompts = self._plan_prompts(budget, [s for s in self._running if s.sequence_id not in decoding])
        batches: list[SlotBatch] = []
        for slot in self._slots_in_turn():
            first = [chunk for chunk in decodes if chunk.sequence.slot == slot]
            rest = [chunk for chunk in prompts if chunk.sequence.slot == slot]
            if first or rest:
                batches.append(SlotBatch(slot, (*first, *rest), len(first)))
        self._turn = (self._turn + 1) % SLOTS
        fresh = tuple(self._fresh)
        self._fresh.clear()
        return StepPlan(tuple(batches), fresh)

    def complete(self, chunk: Chunk) -> None:
        """The chunk's keys and values are in the cache: count them and offer full blocks as prefixes."""
        sequence = chunk.sequence
        if sequence.computed != chunk.start or not sequence.is_running:
            raise InvariantError(f"sequence {sequence.sequence_id} completed a chunk out of order")
        sequence.computed += chunk.count
        if sequence.is_mixed:
            return
        size = self.pool.block_tokens
        for index in range(chunk.start // size, sequence.computed // size):
            self._extend_keys(sequence, index + 1)
            self.pool.publish(sequence.blocks[index], sequence.keys[index])

    def forget(self, slot: int, root: PrefixKey, *, is_shared: bool) -> None:
        """A version leaves `slot`: drop its prefixes, unless the other slot holds it too.  Raises
        InvariantError if sequences are left."""
        left = [s.sequence_id for s in self._all.values() if s.slot == slot]
        if left:
            raise InvariantError(f"slot {slot} is retired with sequences {left}")
        if not is_shared:
            self.pool.forget(root.version)

    def check(self) -> None:
        """Raise InvariantError unless sequences, queues and blocks agree; call between steps."""
        self.pool.check([sequence.blocks for sequence in self._running])
        queued = [sequence for queue in self._waiting for sequence in queue]
        if any(sequence.blocks or sequence.computed for sequence in queued):
            raise InvariantError("a waiting sequence holds blocks")
        if sorted(s.sequence_id for s in (*queued, *self._running)) != sorted(self._all):
            raise InvariantError("a sequence is lost or queued twice")

    # --- decisions -------------------------------------------------------------------------------

    def _slots_in_turn(self) -> list[int]:
        return [(self._turn + n) % SLOTS for n in range(SLOTS)]

    def _plan_decodes(self) -> list[Chunk]:
        chunks: list[Chunk] = []
        for sequence in list(self._running):
            # An older one may just have taken this one's blocks.
            if not sequence.is_running or sequence.pending != 1:
                continue
            if self._grow(sequence):
                chunks.append(Chunk(sequence, sequence.computed, 1, is_last=True))
        return chunks

    def _grow(self, sequence: Sequence) -> bool:
        """Get the block that the next token needs, from the youngest if need be; False if that was
        `sequence` itself."""
        while len(sequence.blocks) * self.pool.block_tokens <= sequence.computed:
            blocks = self.pool.allocate(1)
            if blocks is not None:
                sequence.blocks += blocks
                self._fresh += blocks
                continue
            victim = self._running.pop()
            self._give_back(victim)
            self._waiting[victim.slot].appendleft(victim)
            self.preemptions += 1
            if victim is sequence:
                return False
        return True

    def _admit(self, budget: int) -> None:
        """Seat waiting sequences while the step could still take some of their tokens."""
        prompts = [0] * SLOTS
        seats = [0] * SLOTS
        for sequence in self._running:
            seats[sequence.slot] += 1
            prompts[sequence.slot] += sequence.pending if sequence.pending > 1 else 0
        while len(self._running) < self.limits.max_sequences:
            open_slots = [s for s in self._slots_in_turn() if self._waiting[s] and prompts[s] < budget]
            if not open_slots:
                return
            slot = min(open_slots, key=lambda s: seats[s])  # the first in turn where they are equal
            sequence = self._waiting[slot][0]
            # The first in line is not overtaken, or a long prompt would never find enough blocks.
            if not self._seat(sequence):
                return
            self._waiting[slot].popleft()
            self._running.append(sequence)
            seats[slot] += 1
            prompts[slot] += sequence.pending

    def _seat(self, sequence: Sequence) -> bool:
        """Give a waiting sequence the blocks of all its tokens, known prefixes first."""
        size = self.pool.block_tokens
        # At least one token is computed, or there would be no logits to continue from.
        self._extend_keys(sequence, (len(sequence.tokens) - 1) // size)
        known = self.pool.match(sequence.keys[: (len(sequence.tokens) - 1) // size])
        needed = self.pool.blocks_for(len(sequence.tokens)) - len(known)
        if needed > self.pool.available - self.pool.unused(known):
            return False
        self.pool.hold(known)
        blocks = self.pool.allocate(needed)
        if blocks is None:
            raise InvariantError(f"{needed} KV blocks were available and then not")
        sequence.blocks = known + blocks
        sequence.computed = len(known) * size
        sequence.is_running = True
        sequence.is_mixed = False
        if not sequence.was_admitted:
            sequence.was_admitted = True
            sequence.cached_tokens = sequence.computed
        self._fresh += blocks
        return True

    def _plan_prompts(self, budget: int, prompts: list[Sequence]) -> list[Chunk]:
        demand = [sum(s.pending for s in prompts if s.slot == slot) for slot in range(SLOTS)]
        shares = share(budget, demand, first=self._turn)
        chunks: list[Chunk] = []
        for sequence in prompts:
            count = min(sequence.pending, shares[sequence.slot])
            if count:
                shares[sequence.slot] -= count
                chunks.append(Chunk(sequence, sequence.computed, count, is_last=count == sequence.pending))
        return chunks

    def _give_back(self, sequence: Sequence) -> None:
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.computed = 0
        sequence.is_running = False

    def _extend_keys(self, sequence: Sequence, blocks: int) -> None:
        size = self.pool.block_tokens
        for index in range(len(sequence.keys), blocks):
            before = sequence.keys[-1] if sequence.keys else sequence.root
            sequence.keys.append(before.extend(sequence.tokens[index * size : (index + 1) * size]))


def share(budget: int, demand: list[int], *, first: int) -> list[int]:
    """Split `budget` evenly over `demand`, never more than is asked; what one leaves goes to the
    others, and an odd token to `first`."""
    shares = [0] * len(demand)
    while budget > 0:
        asking = [(first + n) % len(demand) for n in range(len(demand))]
        asking = [n for n in asking if shares[n] < demand[n]]
        if not asking:
            break
        part = max(1, budget // len(asking))
        for n in asking:
            given = min(part, demand[n] - shares[n], budget)
            shares[n] += given
            budget -= given
    return shares
