"""The step thread: whom a failure hits, what wakes it, and what it delivers; with model code made up."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from inferd.engine.blocks import BlockPool, PrefixKey
from inferd.engine.detokenize import TextStream
from inferd.engine.protocol import FinishReason, SamplingParams, SequenceOutput
from inferd.engine.sampling import Sampler
from inferd.engine.scheduler import Limits, Scheduler, Sequence, SlotBatch
from inferd.engine.step_loop import Live, StepLoop
from shared.errors import InvariantError
from shared.ids import Digest

from .sessions import Answer

ROOT = PrefixKey.root(Digest("sha256:" + "0" * 64))
VOCABULARY = 128


def count_up(batch: SlotBatch) -> torch.Tensor:
    """Every sequence goes on with its last token plus one."""
    rows = [chunk.sequence.tokens[-1] + 1 for chunk in batch.chunks if chunk.is_last]
    logits = torch.zeros(len(rows), VOCABULARY)
    for row, token in enumerate(rows):
        logits[row, token % VOCABULARY] = 9.0
    return logits


class Loop:
    """A loop over a forward function that a test may replace."""

    def __init__(self) -> None:
        self.forward: Callable[[SlotBatch], torch.Tensor] = count_up
        self.cleared: list[int] = []
        self.scheduler = Scheduler(BlockPool(64, 4), Limits(16, 8, 16))
        self.steps = StepLoop(self.scheduler, lambda batch: self.forward(batch), self.cleared.extend, None)

    def submit(
        self,
        number: int,
        prompt: list[int],
        params: SamplingParams,
        slot: int = 0,
        sink: Callable[[SequenceOutput], None] | None = None,
    ) -> Answer:
        answer = Answer()
        sequence = Sequence(number, slot, ROOT, list(prompt), params.max_tokens)
        text = TextStream(lambda tokens: "".join(map(chr, tokens)), params.stop)
        self.steps.add(Live(sequence, Sampler(params, prompt), text, sink or answer, frozenset({ord("~")})))
        return answer


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.steps.stop()


def greedy(max_tokens: int, **options: object) -> SamplingParams:
    return SamplingParams(max_tokens, temperature=0, **options)  # type: ignore[arg-type]


def test_it_counts_and_ends_at_the_limit(loop: Loop) -> None:
    loop.steps.start()
    answer = loop.submit(1, [ord("a")], greedy(3))
    last = answer.wait()
    assert answer.text == "bcd"
    assert (last.finish, last.prompt_tokens, last.completion_tokens) == (FinishReason.LENGTH, 1, 3)


@pytest.mark.parametrize(
    ("prompt", "params", "text", "tokens"),
    [
        ("{", greedy(9), "|}", 3),
        ("{", greedy(4, ignore_eos=True), "|}~\x7f", 4),
        ("a", greedy(9, stop=("de",)), "bc", 4),
        ("a", greedy(9, stop_token_ids=(ord("d"),)), "bc", 3),
        ("a", greedy(2, stop=("c",)), "b", 2),
    ],
)
def test_where_it_stops(loop: Loop, prompt: str, params: SamplingParams, text: str, tokens: int) -> None:
    loop.steps.start()
    answer = loop.submit(1, [ord(char) for char in prompt], params)
    last = answer.wait()
    assert (answer.text, last.completion_tokens) == (text, tokens)
    assert last.finish is (FinishReason.LENGTH if params.ignore_eos else FinishReason.STOP)


def test_a_failing_step_ends_its_own_sequences_and_no_others(loop: Loop) -> None:
    def forward(batch: SlotBatch) -> torch.Tensor:
        if batch.slot == 1:
            raise RuntimeError("the device said no")
        return count_up(batch)

    loop.forward = forward
    healthy = loop.submit(1, [ord("a")], greedy(5), slot=0)
    broken = [loop.submit(number, [ord("a")], greedy(5), slot=1) for number in (2, 3)]
    loop.steps.start()
    for answer in broken:
        last = answer.wait()
        assert last.finish is FinishReason.ERROR
        assert "the device said no" in last.error
    assert healthy.wait().finish is FinishReason.LENGTH
    loop.forward = count_up
    assert loop.submit(4, [ord("a")], greedy(2), slot=1).wait().finish is FinishReason.LENGTH
    assert loop.scheduler.pool.counts().used == 0


def test_logits_that_are_not_finite_end_only_the_sequence_that_has_them(loop: Loop) -> None:
    def forward(batch: SlotBatch) -> torch.Tensor:
        logits = count_up(batch)
        for row, chunk in enumerate(chunk for chunk in batch.chunks if chunk.is_last):
            if chunk.sequence.sequence_id == 2:
                logits[row, 5] = float("nan")
        return logits

    loop.forward = forward
    good, bad = loop.submit(1, [ord("a")], greedy(4)), loop.submit(2, [ord("a")], greedy(4))
    loop.steps.start()
    assert bad.wait().finish is FinishReason.ERROR
    assert good.wait().finish is FinishReason.LENGTH


def test_sampling_that_raises_ends_only_its_sequence(loop: Loop) -> None:
    bias = {VOCABULARY + 5: 1.0}  # the engine refuses this earlier; here it reaches the sampler
    bad = loop.submit(1, [ord("a")], greedy(4, logit_bias=bias))
    good = loop.submit(2, [ord("a")], greedy(4))
    loop.steps.start()
    assert bad.wait().finish is FinishReason.ERROR
    assert good.wait().finish is FinishReason.LENGTH


def test_a_receiver_that_raises_ends_only_its_sequence(loop: Loop) -> None:
    def gone(output: SequenceOutput) -> None:
        raise RuntimeError("the event loop is closed")

    loop.submit(1, [ord("a")], greedy(50), sink=gone)
    other = loop.submit(2, [ord("a")], greedy(5))
    loop.steps.start()
    assert other.wait().finish is FinishReason.LENGTH
    assert loop.scheduler.by_slot() == (0, 0)


def test_cancelled_from_its_own_receiver(loop: Loop) -> None:
    answer = Answer()

    def sink(output: SequenceOutput) -> None:
        answer(output)
        if len(answer.tokens) == 2:
            loop.steps.cancel(1)

    loop.submit(1, [ord("a")], greedy(50), sink=sink)
    loop.steps.start()
    last = answer.wait()
    assert (last.finish, answer.text, last.completion_tokens) == (FinishReason.CANCELLED, "bc", 2)
    loop.steps.cancel(1)  # it just ended: ignored


def test_a_waiting_sequence_can_be_cancelled(loop: Loop) -> None:
    answers = [loop.submit(number, [ord("a")] * 16, greedy(2)) for number in range(4)]
    loop.steps.cancel(3)
    loop.steps.start()
    assert answers[3].wait().finish is FinishReason.CANCELLED
    assert all(answer.wait().finish is FinishReason.LENGTH for answer in answers[:3])


def test_it_does_not_step_without_work(loop: Loop) -> None:
    loop.steps.start()
    loop.submit(1, [ord("a")], greedy(3)).wait()
    before = loop.steps.load()
    loop.submit(2, [ord("a")], greedy(1)).wait()
    loop.steps.stop()
    # Three steps for the first, one for the second: no step in the time between.
    assert (before.steps, loop.steps.load().steps) in {(2, 4), (3, 4)}
    assert loop.steps.load().tokens_generated == 4
    assert loop.steps.load().last_step_ns > 0


def test_stopping_ends_what_is_left(loop: Loop) -> None:
    answer = loop.submit(1, [ord("a")], greedy(5))
    loop.steps.stop()
    assert answer.wait().finish is FinishReason.ERROR
    assert loop.scheduler.pool.counts().used == 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_broken_books_end_everyone_and_refuse_the_next(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    def plan() -> None:
        raise InvariantError("a block is lost")

    monkeypatch.setattr(loop.scheduler, "plan", plan)
    answer = loop.submit(1, [ord("a")], greedy(5))
    loop.steps.start()
    last = answer.wait()
    assert last.finish is FinishReason.ERROR
    assert "a block is lost" in last.error
    with pytest.raises(InvariantError, match="a block is lost"):
        loop.submit(2, [ord("a")], greedy(5))


def test_started_twice_is_refused(loop: Loop) -> None:
    loop.steps.start()
    with pytest.raises(InvariantError):
        loop.steps.start()


def test_blocks_are_cleared_before_they_are_used(loop: Loop) -> None:
    loop.steps.start()
    loop.submit(1, list(range(10)), greedy(4)).wait()
    assert sorted(loop.cleared) == [0, 1, 2, 3]


def test_the_time_between_tokens_is_that_of_steps_that_only_decode(loop: Loop) -> None:
    """Prompts, and the wait for someone to ask, are not what clients see between two tokens."""
    assert (loop.steps.load().decode_steps, loop.steps.load().decode_ns) == (0, 0)
    first = loop.submit(1, [ord("a")] * 3, greedy(5))
    loop.steps.start()
    first.wait()
    loop.steps.stop()  # a step is counted after its output
    # Of five steps the first computes the prompt.
    load = loop.steps.load()
    assert (load.steps, load.decode_steps) == (5, 4)
    assert load.decode_ns > 0
    loop.steps.start()
    loop.submit(2, [ord("a")], greedy(1)).wait()
    loop.steps.stop()
    assert loop.steps.load().decode_steps == 4, "it came after a pause, and was a prompt"


def test_a_step_with_a_prompt_in_it_does_not_count(loop: Loop) -> None:
    entered, go_on = threading.Event(), threading.Event()

    def held(batch: SlotBatch) -> torch.Tensor:
        if not entered.is_set():
            entered.set()
            assert go_on.wait(20)
        return count_up(batch)

    loop.forward = held
    first = loop.submit(1, [ord("a")], greedy(3))
    loop.steps.start()
    assert entered.wait(20)
    second = loop.submit(2, [ord("a")] * 3, greedy(3))
    go_on.set()
    first.wait()
    second.wait()
    loop.steps.stop()
    # prompt 1; next of 1 with prompt 2; both; the last of 2.
    load = loop.steps.load()
    assert (load.steps, load.decode_steps) == (4, 2)
