"""`EngineSession`: engines opened by a test, whose books are checked when the test ends."""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from inferd.engine.protocol import SamplingParams, SequenceOutput
from inferd.engine.transformers_engine import EngineSettings, TransformersEngine

from .checkpoints import read_tensors, tag_of

WAIT_S = 120
GREEDY = SamplingParams(12, temperature=0)
LONG = list(range(1, 90))
"""A prompt of several blocks."""


class Answer:
    """Collects the outputs of one sequence; a sink."""

    def __init__(self) -> None:
        self.outputs: list[SequenceOutput] = []
        self._arrived: queue.Queue[SequenceOutput] = queue.Queue()
        self._ended = threading.Event()

    def __call__(self, output: SequenceOutput) -> None:
        self.outputs.append(output)
        self._arrived.put(output)
        if output.finish is not None:
            self._ended.set()

    def next(self) -> SequenceOutput:
        """Wait for the next output."""
        return self._arrived.get(timeout=WAIT_S)

    def wait(self) -> SequenceOutput:
        """Wait for the end and return the last output."""
        if not self._ended.wait(WAIT_S):
            raise TimeoutError("a sequence did not end")
        return self.outputs[-1]

    @property
    def tokens(self) -> list[int]:
        """Tokens so far."""
        return [token for output in self.outputs for token in output.token_ids]

    @property
    def text(self) -> str:
        """Text so far."""
        return "".join(output.text for output in self.outputs)


class EngineSession:
    """Opens engines over checkpoints and runs prompts on them."""

    def __init__(self) -> None:
        self._engines: list[TransformersEngine] = []
        self._numbers = iter(range(1, 1 << 30))
        self._submitted: list[int] = []

    def open(self, folder: Path | None = None, **settings: int) -> TransformersEngine:
        """A started engine; with a `folder`, version v1 is built in slot 0."""
        options: dict[str, int] = {
            "kv_cache_bytes": 1 << 26,
            "torch_threads": torch.get_num_threads(),
        } | settings
        engine = TransformersEngine(EngineSettings(**options))  # type: ignore[arg-type]
        self._engines.append(engine)
        if folder is not None:
            engine.build(0, tag_of("v1"), read_tensors(folder), folder)
        engine.start()
        return engine

    def build(
        self,
        engine: TransformersEngine,
        slot: int,
        tensors: Mapping[str, torch.Tensor],
        assets: Path,
        fill: str,
    ) -> None:
        """Build a version with the digest `fill` all over."""
        engine.build(slot, tag_of(f"v{fill}", fill), tensors, assets)

    def submit(
        self, engine: TransformersEngine, prompt: str | Sequence[int], params: SamplingParams, slot: int = 0
    ) -> tuple[int, Answer]:
        """Submit a prompt; its id and what collects its outputs."""
        tokens = (
            engine.tokenizer(slot).encode(prompt, add_special_tokens=True)
            if isinstance(prompt, str)
            else list(prompt)
        )
        number, answer = next(self._numbers), Answer()
        self._submitted.append(number)
        engine.submit(number, slot, tokens, params, answer)
        return number, answer

    def cancel_all(self, engine: TransformersEngine) -> None:
        """Cancel every sequence that this session submitted to `engine`."""
        for number in self._submitted:
            engine.cancel(number)

    def close(self) -> None:
        """Check the books of every engine and stop it."""
        for engine in self._engines:
            with engine._loop.lock:
                engine._loop.scheduler.check()
            engine.stop()
