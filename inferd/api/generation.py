"""One request between its ticket and its last output."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import chain, count

from inferd.api.admission import Admission, NotReady, Ticket
from inferd.api.errors import GenerationAborted, GenerationFailed, QueueFull
from inferd.api.hold import REQUEST, Hold
from inferd.api.mailbox import Mailbox
from inferd.api.metrics import ApiMetrics, Endpoint
from inferd.engine.protocol import (
    Engine,
    FinishReason,
    SamplingParams,
    SequenceOutput,
    Tokenizer,
    TokenLogprob,
)
from shared.errors import ChangeoverError, ResourceError
from shared.ids import VersionTag

Mover = Callable[[int, int], None]
"""Lets a sequence go on in a slot: from its id and the slot."""

Logprobs = tuple[tuple[TokenLogprob, tuple[TokenLogprob, ...]], ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """What one choice gained: by a step, by several that came while the reader was busy, or in all."""

    index: int  # of the choice in the response
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: Logprobs = ()
    finish: FinishReason | None = None
    cached_tokens: int = 0

    @classmethod
    def joined(cls, index: int, parts: Sequence[Piece | SequenceOutput]) -> Piece:
        """One piece of `parts`, which follow each other."""
        return cls(
            index,
            "".join(part.text for part in parts),
            tuple(chain.from_iterable(part.token_ids for part in parts)),
            tuple(chain.from_iterable(part.logprobs for part in parts)),
            parts[-1].finish,
            parts[-1].cached_tokens,
        )


@dataclass(slots=True)
class _Choice:
    index: int
    last_token_at: float | None = None


class Generation:
    """The sequences of one request, all on one version at a time.  Belongs to the event loop."""

    def __init__(
        self,
        engine: Engine,
        ticket: Ticket,
        hold: Hold,
        mailbox: Mailbox,
        endpoint: Endpoint,
        metrics: ApiMetrics,
        arrived: float,
    ) -> None:
        self.tags = [ticket.tag]  # the versions that it has run on, oldest first
        self.tokenizer: Tokenizer = engine.tokenizer(ticket.slot)
        self.max_model_len = engine.max_model_len(ticket.slot)
        self._slot = ticket.slot
        self._engine = engine
        self._hold = hold
        self._mailbox = mailbox
        self._endpoint = endpoint
        self._metrics = metrics
        self._arrived = arrived
        self._running: dict[int, _Choice] = {}  # by sequence id, without those that ended
        self._cut: ChangeoverError | None = None

    @property
    def tag(self) -> VersionTag:
        """The version that it runs on now."""
        return self.tags[-1]

    @property
    def is_finished(self) -> bool:
        return not self._running

    def submit(self, sequences: Sequence[tuple[list[int], SamplingParams]], ids: Iterator[int]) -> None:
        """Queue one sequence per choice, in order; called once.  Raises what the engine refuses with,
        and then leaves it to `close` to end those that it took before."""
        if self._cut is not None:
            raise self._cut
        for index, (prompt, params) in enumerate(sequences):
            sequence_id = next(ids)
            self._hold.join(sequence_id)
            try:
                self._engine.submit(sequence_id, self._slot, prompt, params, self._deliver)
            except BaseException as error:
                self._hold.leave(sequence_id)
                if type(error) is ResourceError:
                    raise QueueFull(error.message) from error
                raise
            self._running[sequence_id] = _Choice(index)
        self._hold.leave(REQUEST)

    async def take(self) -> list[Piece]:
        """What came since the last call, one piece per choice; waits until there is something.

        Raises GenerationFailed when the engine gave a sequence up, GenerationAborted when this side
        ended it, and the error of `cut_off` after that."""
        outputs = await self._mailbox.take()
        if self._cut is not None:
            raise self._cut
        gained: dict[int, list[SequenceOutput]] = {}
        for at, output in outputs:
            choice = self._running.get(output.sequence_id)
            if choice is not None:
                self._read(choice, at, output)
                gained.setdefault(choice.index, []).append(output)
        return [Piece.joined(index, parts) for index, parts in gained.items()]

    def move(self, ticket: Ticket, mover: Mover) -> None:
        """Let what still runs go on with the version of `ticket`.  The old version's ticket is kept too:
        a step on the old one may be under way, and the engine does not tell when it has ended."""
        self._hold.extend(ticket)
        self._slot = ticket.slot
        self.tags.append(ticket.tag)
        for sequence_id in self._running:
            mover(sequence_id, ticket.slot)

    def cut_off(self, error: ChangeoverError) -> None:
        """End every sequence; the reader gets `error`."""
        self._cut = error
        self.close()
        self._mailbox.ring()

    def close(self) -> None:
        """End what still runs and let go of the ticket; it is given back when the engine has let go too."""
        for sequence_id in self._running:
            self._engine.cancel(sequence_id)
        self._hold.leave(REQUEST)

    def _deliver(self, output: SequenceOutput) -> None:
        self._mailbox.post(output)
        if output.finish is not None:
            self._hold.leave(output.sequence_id)

    def _read(self, choice: _Choice, at: float, output: SequenceOutput) -> None:
        if output.finish is not None:
            del self._running[output.sequence_id]
        if output.finish is FinishReason.ERROR:
            raise GenerationFailed(output.error, sequence_id=output.sequence_id)
        if output.finish is FinishReason.CANCELLED:
            raise GenerationAborted("The request was ended by the server before it was complete.")
        if output.token_ids:
            self._measure(choice, at, len(output.token_ids))
        if output.cached_tokens:
            self._metrics.tokens("cached", output.cached_tokens, self.tag)

    def _measure(self, choice: _Choice, at: float, count: int) -> None:
        if choice.last_token_at is None:
            self._metrics.first_token(self._endpoint, at - self._arrived, self.tag)
        else:
            self._metrics.next_tokens(count, at - choice.last_token_at, self.tag)
        choice.last_token_at = at
        self._metrics.tokens("completion", count, self.tag)


class Generations:
    """Every request that holds a ticket.  Belongs to one event loop."""

    def __init__(
        self,
        engine: Engine,
        admission: Admission,
        metrics: ApiMetrics,
        sequence_ids: Iterator[int] | None = None,
    ) -> None:
        self._engine = engine
        self._admission = admission
        self._metrics = metrics
        self.sequence_ids = count(1) if sequence_ids is None else sequence_ids
        self._open: set[Generation] = set()
        self._is_draining = False
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    @asynccontextmanager
    async def open(self, endpoint: Endpoint, session_id: str | None) -> AsyncIterator[Generation]:
        """A ticket, for as long as the block runs and the engine works on what it submitted.

        Whatever ends the block (an answer, an error, a client that went away, a shutdown) ends its
        sequences and gives the ticket back, once.  Raises NotReady."""
        if self._is_draining:
            raise NotReady("The server is shutting down.")
        arrived = time.monotonic()
        ticket = self._admission.acquire(session_id)
        hold = Hold(ticket, self._admission.release)
        try:
            self._metrics.admit(ticket.tag)
            mailbox = Mailbox(asyncio.get_running_loop())
            generation = Generation(self._engine, ticket, hold, mailbox, endpoint, self._metrics, arrived)
            self._open.add(generation)
            self._is_empty.clear()
            try:
                yield generation
            finally:
                self._open.discard(generation)
                if not self._open:
                    self._is_empty.set()
                generation.close()
        finally:
            hold.leave(REQUEST)

    @property
    def running(self) -> int:
        """Requests inside `open`."""
        return len(self._open)

    def move(self, tag: VersionTag, mover: Mover) -> int:
        """Let every request that runs on `tag` go on with the version that serves now; returns how many.
        Those whose prompt is still being read stay.  Raises NotReady."""
        moved = [one for one in self._open if one.tag == tag and not one.is_finished]
        for generation in moved:
            ticket = self._admission.acquire(None)
            self._metrics.admit(ticket.tag)
            generation.move(ticket, mover)
        return len(moved)

    def abort(self, tag: VersionTag) -> int:
        """End every request on `tag` with an error that its client sees; returns how many."""
        ended = [one for one in self._open if one.tag == tag]
        for generation in ended:
            generation.cut_off(GenerationAborted("The version that answered this request is withdrawn."))
        return len(ended)

    async def drain(self, deadline_s: float) -> int:
        """Take no new requests and wait until those that run have ended.  After `deadline_s` the rest is
        ended with an error that their clients see; returns how many those were."""
        self._is_draining = True
        try:
            async with asyncio.timeout(deadline_s):
                await self._is_empty.wait()
        except TimeoutError:
            pass
        rest = list(self._open)
        for generation in rest:
            generation.cut_off(GenerationAborted("The server is shutting down."))
        return len(rest)
