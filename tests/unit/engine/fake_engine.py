"""An engine without a model: it answers with a text known in advance, one character per token.

It keeps the contract of `Engine` strictly (a slot built twice, a submit to an empty slot, a retire with
sequences left raise) and can be held in the middle of a build, a warm-up or a sequence.  Outputs are
delivered on its own thread, as a real engine's are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic_ns
from typing import Literal

import torch

from inferd.engine.protocol import (
    SLOTS,
    EngineAbilities,
    EngineLoad,
    FinishReason,
    FlipKind,
    OutputSink,
    SamplingParams,
    SequenceOutput,
    Tokenizer,
    TokenLogprob,
    WarmReport,
)
from shared.errors import ChangeoverError, InvalidRequest, InvariantError, ResourceError
from shared.ids import VersionTag

Stage = Literal["build", "warm", "steps"]
Reply = Callable[[VersionTag, str], str]
"""From a version and a prompt's text to the whole answer."""


def echo(tag: VersionTag, prompt: str) -> str:
    """The default answer: which version it is and what it was asked."""
    return f"{tag.ref.version} heard {prompt}"


class CharTokenizer:
    """A token per character; its id is the code point.  The template is one line per message."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        del add_special_tokens  # there are none
        return [ord(char) for char in text]

    def decode(self, token_ids: list[int]) -> str:
        return "".join(map(chr, token_ids))

    def apply_chat_template(self, messages: list[dict[str, object]]) -> list[int]:
        if any(message.get("role") not in ("system", "user", "assistant") for message in messages):
            raise InvalidRequest("the chat template knows the roles system, user and assistant")
        lines = [f"{message['role']}: {message['content']}\n" for message in messages]
        return self.encode("".join([*lines, "assistant:"]), add_special_tokens=False)


@dataclass(slots=True)
class _Fake:
    slot: int
    prompt: list[int]
    params: SamplingParams
    sink: OutputSink
    answer: str  # already cut at a stop string and at max_tokens
    finish: FinishReason
    sent: int = 0


class FakeEngine:
    """Answers every sequence with `reply`, a character per step, until it is held."""

    def __init__(
        self,
        *,
        reply: Reply = echo,
        max_model_len: int = 4096,
        max_waiting: int = 64,
        abilities: EngineAbilities | None = None,
    ) -> None:
        self._abilities = abilities or EngineAbilities("fake", FlipKind.POINTER, serves_two_versions=True)
        self._reply = reply
        self._max_model_len = max_model_len
        self._max_waiting = max_waiting
        self._changed = threading.Condition()
        self._held: set[Stage] = set()
        self._reached: set[Stage] = set()
        self._steps_allowed = 0
        self._failures: dict[Stage, ChangeoverError] = {}
        self._models: dict[int, VersionTag] = {}
        self._warmed: set[int] = set()
        self._sequences: dict[int, _Fake] = {}
        self._cancelled: set[int] = set()
        self._failed: dict[int, str] = {}
        self._submitted = 0
        self._load = EngineLoad(0, 0, 0, 0, 64, 64, 0, (0,) * SLOTS, 0, 0)
        self._thread: threading.Thread | None = None
        self._is_stopping = False
        self.tensors: dict[int, Mapping[str, torch.Tensor]] = {}
        self.assets: dict[int, Path] = {}
        self.requests: list[tuple[int, int, list[int], SamplingParams]] = []
        self.moves: list[tuple[int, int, bool]] = []  # sequence, slot, whether its KV was kept

    # --- what a test does to it ------------------------------------------------------------------

    def hold(self, stage: Stage) -> None:
        """Stop before the next `stage` takes effect: a build, a warm-up, or any step."""
        with self._changed:
            self._held.add(stage)
            self._reached.discard(stage)

    def release(self, stage: Stage) -> None:
        """Let a held stage go on."""
        with self._changed:
            self._held.discard(stage)
            self._changed.notify_all()

    def step(self, count: int = 1) -> None:
        """While steps are held: let `count` steps through and return when they are delivered."""
        with self._changed:
            target = self._load.steps + count
            self._steps_allowed += count
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: self._load.steps >= target, timeout=30):
                raise InvariantError("the fake engine has no sequence to step")

    def wait_reached(self, stage: Stage, timeout_s: float = 30) -> bool:
        """Wait until a held `stage` was reached; False if it was not within `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: stage in self._reached, timeout=timeout_s)

    def wait_submitted(self, count: int, timeout_s: float = 30) -> bool:
        """Wait until `count` sequences have been submitted since start."""
        with self._changed:
            return self._changed.wait_for(lambda: self._submitted >= count, timeout=timeout_s)

    def wait_idle(self, timeout_s: float = 30) -> bool:
        """Wait until no sequence is left."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._sequences, timeout=timeout_s)

    def fail_next(self, stage: Literal["build", "warm"], error: ChangeoverError) -> None:
        """Let the next build or warm-up raise `error`."""
        with self._changed:
            self._failures[stage] = error

    def fail_sequence(self, sequence_id: int, message: str) -> None:
        """End a sequence with ERROR, as a step that raised would."""
        with self._changed:
            if sequence_id not in self._sequences:
                raise InvariantError(f"no sequence {sequence_id} to fail")
            self._failed[sequence_id] = message
            self._changed.notify_all()

    # --- Engine ----------------------------------------------------------------------------------

    @property
    def abilities(self) -> EngineAbilities:
        return self._abilities

    def start(self) -> None:
        if self._thread is not None:
            raise InvariantError("the fake engine was started twice")
        self._thread = threading.Thread(target=self._run, name="fake-engine", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        with self._changed:
            self._is_stopping = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def build(self, slot: int, tag: VersionTag, tensors: Mapping[str, torch.Tensor], assets: Path) -> None:
        self._pass("build")
        with self._changed:
            if slot in self._models:
                raise InvariantError(f"slot {slot} still holds {self._models[slot]}")
            self._models[slot] = tag
            self.tensors[slot] = tensors
            self.assets[slot] = assets

    def warm(self, slot: int) -> WarmReport:
        self._pass("warm")
        with self._changed:
            self._need(slot)
            self._warmed.add(slot)
        return WarmReport(prompts=1, seconds=0.0, first_tokens=(ord("v"),))

    def retire(self, slot: int) -> None:
        with self._changed:
            self._need(slot)
            left = [number for number, fake in self._sequences.items() if fake.slot == slot]
            if left:
                raise InvariantError(f"slot {slot} is retired with sequences {left}")
            del self._models[slot], self.tensors[slot], self.assets[slot]
            self._warmed.discard(slot)

    def tokenizer(self, slot: int) -> Tokenizer:
        with self._changed:
            self._need(slot)
        return CharTokenizer()

    def max_model_len(self, slot: int) -> int:
        with self._changed:
            self._need(slot)
        return self._max_model_len

    def submit(
        self, sequence_id: int, slot: int, prompt: list[int], params: SamplingParams, sink: OutputSink
    ) -> None:
        with self._changed:
            tag = self._need(slot)
            if sequence_id in self._sequences:
                raise InvariantError(f"sequence {sequence_id} was submitted twice")
            if not prompt or len(prompt) + params.max_tokens > self._max_model_len:
                raise InvalidRequest(
                    f"{len(prompt)} + {params.max_tokens} tokens exceed {self._max_model_len}"
                )
            if len(self._sequences) >= self._max_waiting:
                raise ResourceError(f"{len(self._sequences)} sequences are waiting")
            answer, finish = _cut(self._reply(tag, CharTokenizer().decode(prompt)), params)
            self._sequences[sequence_id] = _Fake(slot, prompt, params, sink, answer, finish)
            self.requests.append((sequence_id, slot, prompt, params))
            self._submitted += 1
            self._changed.notify_all()

    def move(self, sequence_id: int, slot: int, *, keep_kv: bool) -> None:
        with self._changed:
            self._need(slot)
            if sequence_id in self._sequences:
                self._sequences[sequence_id].slot = slot
                self.moves.append((sequence_id, slot, keep_kv))

    def cancel(self, sequence_id: int) -> None:
        with self._changed:
            if sequence_id in self._sequences:
                self._cancelled.add(sequence_id)
                self._changed.notify_all()

    def load(self) -> EngineLoad:
        with self._changed:
            by_slot = [0] * SLOTS
            for fake in self._sequences.values():
                by_slot[fake.slot] += 1
            return replace(self._load, running=len(self._sequences), sequences_by_slot=tuple(by_slot))

    # --- inside ----------------------------------------------------------------------------------

    def _need(self, slot: int) -> VersionTag:
        if slot not in self._models:
            raise InvariantError(f"slot {slot} is empty")
        return self._models[slot]

    def _pass(self, stage: Literal["build", "warm"]) -> None:
        with self._changed:
            self._reached.add(stage)
            self._changed.notify_all()
            self._changed.wait_for(lambda: stage not in self._held or self._is_stopping)
            error = self._failures.pop(stage, None)
        if error is not None:
            raise error

    def _has_work(self) -> bool:
        if self._is_stopping or self._cancelled or self._failed:
            return True
        may_step = "steps" not in self._held or self._steps_allowed > 0
        return bool(self._sequences) and may_step

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._sequences and "steps" in self._held and self._steps_allowed == 0:
                    self._reached.add("steps")
                    self._changed.notify_all()
                self._changed.wait_for(self._has_work)
                outputs = self._take_outputs()
                is_last = self._is_stopping
            for sink, output in outputs:
                sink(output)
            with self._changed:
                if outputs:
                    self._load = replace(self._load, steps=self._load.steps + 1, last_step_ns=monotonic_ns())
                self._changed.notify_all()
            if is_last:
                return

    def _take_outputs(self) -> list[tuple[OutputSink, SequenceOutput]]:
        """What the step delivers; ended sequences are gone afterwards."""
        outputs: list[tuple[OutputSink, SequenceOutput]] = []
        may_step = "steps" not in self._held or self._steps_allowed > 0
        if may_step and "steps" in self._held and self._sequences:
            self._steps_allowed -= 1
        for number, fake in list(self._sequences.items()):
            if self._is_stopping:
                output = _end(number, fake, FinishReason.ERROR, "the engine stopped")
            elif number in self._failed:
                output = _end(number, fake, FinishReason.ERROR, self._failed[number])
            elif number in self._cancelled:
                output = _end(number, fake, FinishReason.CANCELLED, "")
            elif may_step:
                output = _next(number, fake)
                self._load = replace(self._load, tokens_generated=self._load.tokens_generated + 1)
            else:
                continue
            outputs.append((fake.sink, output))
            if output.finish is not None:
                del self._sequences[number]
        self._cancelled.clear()
        self._failed.clear()
        return outputs


def _cut(answer: str, params: SamplingParams) -> tuple[str, FinishReason]:
    ends = [at for stop in params.stop if (at := answer.find(stop)) >= 0]
    text = answer[: min(ends)] if ends else answer
    if len(text) >= params.max_tokens:
        return text[: params.max_tokens], FinishReason.LENGTH
    return text, FinishReason.STOP


def _next(number: int, fake: _Fake) -> SequenceOutput:
    char = fake.answer[fake.sent : fake.sent + 1]  # empty for an empty answer
    fake.sent += 1
    token_ids = (ord(char),) if char else ()
    logprobs: tuple[tuple[TokenLogprob, tuple[TokenLogprob, ...]], ...] = ()
    if fake.params.logprobs is not None and char:
        chosen = TokenLogprob(ord(char), -0.25)
        others = tuple(TokenLogprob(ord(char) + n, -0.25 - n) for n in range(fake.params.logprobs))
        logprobs = ((chosen, others),)
    if fake.sent < len(fake.answer):
        return SequenceOutput(number, char, token_ids, logprobs)
    return replace(_end(number, fake, fake.finish, ""), text=char, token_ids=token_ids, logprobs=logprobs)


def _end(number: int, fake: _Fake, finish: FinishReason, error: str) -> SequenceOutput:
    return SequenceOutput(
        number,
        "",
        (),
        finish=finish,
        error=error,
        prompt_tokens=len(fake.prompt),
        completion_tokens=min(fake.sent, len(fake.answer)),
    )
