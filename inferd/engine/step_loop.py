"""`StepLoop`: the thread that runs steps while there is work, and sleeps while there is none."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from time import monotonic_ns

import torch

from inferd.engine.blocks import PrefixKey
from inferd.engine.detokenize import TextStream
from inferd.engine.protocol import (
    EngineLoad,
    FinishReason,
    OutputSink,
    SamplingParams,
    SequenceOutput,
)
from inferd.engine.sampling import Draft, Logprobs, Pick, Sampler, pick
from inferd.engine.scheduler import Scheduler, Sequence, SlotBatch, StepPlan
from shared.errors import InvariantError

_log = logging.getLogger(__name__)

_GREEDY = SamplingParams(1, temperature=0)

Forward = Callable[[SlotBatch], torch.Tensor]
"""Runs a batch; returns logits [chunks that are last, vocabulary] for `pick`."""


@dataclass(slots=True, eq=False)
class Live:
    """A sequence with what turns its logits into output."""

    sequence: Sequence
    sampler: Sampler
    text: TextStream
    sink: OutputSink
    end_tokens: frozenset[int]

    def output(
        self,
        text: str,
        tokens: tuple[int, ...] = (),
        logprobs: tuple[Logprobs, ...] = (),
        finish: FinishReason | None = None,
        error: str = "",
    ) -> SequenceOutput:
        """An output of this sequence; the last one carries its counts."""
        sequence = self.sequence
        if finish is None:
            return SequenceOutput(sequence.sequence_id, text, tokens, logprobs)
        return SequenceOutput(
            sequence.sequence_id,
            text,
            tokens,
            logprobs,
            finish,
            error,
            prompt_tokens=sequence.prompt_tokens,
            completion_tokens=len(sequence.tokens) - sequence.prompt_tokens,
            cached_tokens=sequence.cached_tokens,
        )


@dataclass(frozen=True, slots=True)
class _Move:
    slot: int
    root: PrefixKey
    is_kept: bool


class StepLoop:
    """Owns the scheduler's thread.  `lock` guards the scheduler; no forward pass runs under it."""

    def __init__(
        self,
        scheduler: Scheduler,
        forward: Forward,
        clear_blocks: Callable[[tuple[int, ...]], None],
        torch_threads: int | None,
        on_device: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """`on_device` makes what enters it the place where the step thread's GPU work is queued."""
        self.scheduler = scheduler
        self._on_device = on_device
        self._forward = forward
        self._clear_blocks = clear_blocks
        self._torch_threads = torch_threads
        self.lock = threading.RLock()
        self._wake = threading.Condition(self.lock)
        self._live: dict[int, Live] = {}
        self._cancelled: set[int] = set()
        self._moves: dict[int, _Move] = {}
        self._thread: threading.Thread | None = None
        self._is_stopping = False
        self._death = ""
        self._steps = 0
        self._last_step_ns = 0
        self._tokens = 0
        self._decode_steps = 0
        self._decode_ns = 0

    # --- any thread ------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread.  Raises InvariantError if it runs."""
        if self._thread is not None:
            raise InvariantError("the step thread was started twice")
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="engine-steps", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the step in flight; sequences left finish with ERROR.  Blocking."""
        with self._wake:
            self._is_stopping = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        with self.lock:
            left = list(self._live)
        self._fail(left, "the engine stopped")

    def add(self, live: Live) -> None:
        """Queue a sequence; raises what `Scheduler.add` raises."""
        with self._wake:
            if self._death:
                raise InvariantError(self._death)
            self.scheduler.add(live.sequence)
            self._live[live.sequence.sequence_id] = live
            self._wake.notify()

    def cancel(self, sequence_id: int) -> None:
        """Let a sequence end with CANCELLED before the next step; unknown ones are ignored."""
        with self._wake:
            if sequence_id in self._live:
                self._cancelled.add(sequence_id)
                self._wake.notify()

    def move(self, sequence_id: int, slot: int, root: PrefixKey, *, is_kept: bool) -> None:
        """Let a sequence go on in another slot from the next step; unknown ones are ignored."""
        with self._wake:
            if sequence_id in self._live:
                self._moves[sequence_id] = _Move(slot, root, is_kept)
                self._wake.notify()

    def moving_to(self, slot: int) -> list[int]:
        """Sequences whose move to `slot` has not taken effect yet."""
        return [number for number, move in self._moves.items() if move.slot == slot]

    def load(self) -> EngineLoad:
        """A snapshot."""
        with self.lock:
            counts = self.scheduler.pool.counts()
            return EngineLoad(
                running=self.scheduler.running,
                waiting=self.scheduler.waiting,
                steps=self._steps,
                last_step_ns=self._last_step_ns,
                kv_blocks_total=counts.total,
                kv_blocks_free=counts.free + counts.cached,
                kv_blocks_cached=counts.cached,
                sequences_by_slot=self.scheduler.by_slot(),
                tokens_generated=self._tokens,
                preemptions=self.scheduler.preemptions,
                decode_steps=self._decode_steps,
                decode_ns=self._decode_ns,
            )

    # --- the step thread -------------------------------------------------------------------------

    def _run(self) -> None:
        if self._torch_threads is not None:
            torch.set_num_threads(self._torch_threads)
        try:
            while self._run_once():
                pass
        except BaseException as error:
            # Our own books are wrong: nothing can be served any more, and nobody may wait for it.
            with self.lock:
                self._death = f"the step thread died: {type(error).__name__}: {error}"
                left = list(self._live.values())
                self._live.clear()
            for live in left:
                self._deliver(live, live.output("", finish=FinishReason.ERROR, error=self._death))
            raise

    def _run_once(self) -> bool:
        """Wait for work and run one step; False when it is time to stop."""
        with self._wake:
            was_idle = not self.scheduler.has_work
            self._wake.wait_for(lambda: self._is_stopping or self.scheduler.has_work)
            if self._is_stopping:
                return False
            self._apply_moves()
            cancelled = [self._let_go(number) for number in sorted(self._cancelled)]
            plan = self.scheduler.plan()
        for live in cancelled:
            self._deliver(live, live.output(live.text.finish()[0], finish=FinishReason.CANCELLED))
        if plan.batches:
            with self._on_device():
                self._step(plan)
        with self.lock:
            now_ns = monotonic_ns()
            if plan.batches:
                self._steps += 1
                if not was_idle and all(batch.decodes == len(batch.chunks) for batch in plan.batches):
                    self._decode_steps += 1
                    self._decode_ns += now_ns - self._last_step_ns
            self._last_step_ns = now_ns
            if not self.scheduler.has_work:
                self.scheduler.check()
        return True

    def _step(self, plan: StepPlan) -> None:
        self._clear_blocks(plan.fresh_blocks)
        for batch in plan.batches:
            lasts = [self._live[chunk.sequence.sequence_id] for chunk in batch.chunks if chunk.is_last]
            try:
                logits = self._forward(batch)
                drafts = [self._draft(live, logits.shape[-1]) for live in lasts]
                picks = pick(logits, [draft or Draft(_GREEDY) for draft in drafts])
            except Exception as error:  # noqa: BLE001 - the supervisor of model code, which may raise anything
                self._fail_step([chunk.sequence.sequence_id for chunk in batch.chunks], error)
                continue
            with self.lock:
                for chunk in batch.chunks:
                    if chunk.sequence.sequence_id in self._live:
                        self.scheduler.complete(chunk)
            for live, draft, picked in zip(lasts, drafts, picks, strict=True):
                number = live.sequence.sequence_id
                if draft is None:
                    continue
                if not picked.is_sound:
                    self._fail([number], "the model's logits are not finite")
                    continue
                try:
                    self._advance(live, picked)
                except Exception as error:  # noqa: BLE001 - one sequence's text must not end the others
                    self._fail_step([number], error)

    def _draft(self, live: Live, vocabulary: int) -> Draft | None:
        """What to do to a sequence's row; None if that failed and ended the sequence."""
        try:
            return live.sampler.draft(vocabulary)
        except Exception as error:  # noqa: BLE001 - one sequence's sampling must not end the others
            self._fail_step([live.sequence.sequence_id], error)
            return None

    def _advance(self, live: Live, picked: Pick) -> None:
        """Append the chosen token to a sequence and deliver what it says."""
        params, sequence, token = live.sampler.params, live.sequence, picked.token
        live.sampler.note(token)
        is_end = (token in live.end_tokens and not params.ignore_eos) or token in params.stop_token_ids
        text, is_stopped = ("", False) if is_end else live.text.feed(token)
        is_full = len(sequence.tokens) + 1 - sequence.prompt_tokens >= sequence.max_tokens
        finish: FinishReason | None = None
        if is_end or is_full:
            rest, is_cut = ("", True) if is_stopped else live.text.finish()
            text += rest
            finish = FinishReason.STOP if is_end or is_stopped or is_cut else FinishReason.LENGTH
        elif is_stopped:
            finish = FinishReason.STOP
        with self.lock:
            sequence.tokens.append(token)
            self._tokens += 1
            if finish is not None:
                self._let_go(sequence.sequence_id)
        self._deliver(live, live.output(text, (token,), picked.logprobs, finish))

    def _fail_step(self, numbers: list[int], error: Exception) -> None:
        _log.error("a step failed for sequences %s", numbers, exc_info=error)
        self._fail(numbers, f"the step failed: {type(error).__name__}: {error}")

    def _fail(self, numbers: list[int], message: str) -> None:
        for number in numbers:
            with self.lock:
                live = self._let_go(number)
            self._deliver(live, live.output(live.text.finish()[0], finish=FinishReason.ERROR, error=message))

    def _deliver(self, live: Live, output: SequenceOutput) -> None:
        # A receiver that went away (its event loop closed) must not end the others' steps.
        try:
            live.sink(output)
        except Exception:  # noqa: BLE001
            _log.exception("the receiver of sequence %d failed; it is cancelled", output.sequence_id)
            if output.finish is None:
                self.cancel(output.sequence_id)

    def _apply_moves(self) -> None:
        for number, move in self._moves.items():
            self.scheduler.move(number, move.slot, move.root, is_kept=move.is_kept)
        self._moves.clear()

    def _let_go(self, number: int) -> Live:
        """Take a sequence out of everything.  With the lock held."""
        live = self._live.pop(number)
        self._cancelled.discard(number)
        self._moves.pop(number, None)
        self.scheduler.remove(number)
        return live
