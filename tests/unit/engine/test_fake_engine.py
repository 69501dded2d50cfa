"""The fake engine keeps the engine's contract; API tests rest on it."""

from __future__ import annotations

import queue
from pathlib import Path

import pytest

from inferd.engine.protocol import Engine, FinishReason, SamplingParams, SequenceOutput
from shared.errors import InvalidRequest, InvariantError, ResourceError, WarmupFailed
from shared.ids import Digest, VersionRef, VersionTag

from .fake_engine import FakeEngine

TAG = VersionTag(VersionRef("m", "v1"), Digest("sha256:" + "0" * 64))


def started(**options: object) -> FakeEngine:
    engine = FakeEngine(**options)  # type: ignore[arg-type]
    engine.start()
    engine.build(0, TAG, {}, Path())
    return engine


def collect(outputs: queue.Queue[SequenceOutput]) -> tuple[str, SequenceOutput]:
    text = ""
    while True:
        output = outputs.get(timeout=10)
        text += output.text
        if output.finish is not None:
            return text, output


def test_it_answers_and_counts() -> None:
    engine: Engine = started()
    outputs: queue.Queue[SequenceOutput] = queue.Queue()
    engine.submit(
        7, 0, engine.tokenizer(0).encode("hi", add_special_tokens=True), SamplingParams(64), outputs.put
    )
    text, last = collect(outputs)
    assert text == "v1 heard hi"
    assert (last.finish, last.prompt_tokens, last.completion_tokens) == (FinishReason.STOP, 2, 11)
    engine.stop()


def test_it_can_be_held_in_the_middle_of_a_sequence() -> None:
    engine = started()
    outputs: queue.Queue[SequenceOutput] = queue.Queue()
    engine.hold("steps")
    engine.submit(1, 0, [65], SamplingParams(64, logprobs=2), outputs.put)
    engine.step(3)
    assert "".join(outputs.get_nowait().text for _ in range(3)) == "v1 "
    assert outputs.empty()
    with pytest.raises(InvariantError):
        engine.retire(0)
    engine.cancel(1)
    assert collect(outputs)[1].finish is FinishReason.CANCELLED
    assert engine.wait_idle()
    engine.retire(0)
    engine.stop()


@pytest.mark.parametrize(
    ("params", "text", "finish"),
    [
        (SamplingParams(4), "v1 h", FinishReason.LENGTH),
        (SamplingParams(64, stop=("ear",)), "v1 h", FinishReason.STOP),
    ],
)
def test_it_ends_where_asked(params: SamplingParams, text: str, finish: FinishReason) -> None:
    engine = started()
    outputs: queue.Queue[SequenceOutput] = queue.Queue()
    engine.submit(1, 0, [65], params, outputs.put)
    got, last = collect(outputs)
    assert (got, last.finish) == (text, finish)
    engine.stop()


def test_it_refuses_what_a_real_engine_refuses() -> None:
    engine = started(max_waiting=1, max_model_len=8)
    engine.hold("steps")
    outputs: queue.Queue[SequenceOutput] = queue.Queue()
    with pytest.raises(InvariantError):
        engine.build(0, TAG, {}, Path())
    with pytest.raises(InvalidRequest):
        engine.submit(1, 0, [65], SamplingParams(8), outputs.put)
    engine.submit(1, 0, [65], SamplingParams(2), outputs.put)
    with pytest.raises(ResourceError):
        engine.submit(2, 0, [65], SamplingParams(2), outputs.put)
    engine.fail_next("warm", WarmupFailed("NaN"))
    with pytest.raises(WarmupFailed):
        engine.warm(0)
    engine.stop()
    assert collect(outputs)[1].finish is FinishReason.ERROR
