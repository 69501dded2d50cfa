"""What a step's graph is told to compute: over graphs that run their work anew instead of replaying it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
import torch

from inferd.engine.blocks import PrefixKey
from inferd.engine.forward import run_forward
from inferd.engine.kv_cache import KvCache
from inferd.engine.lanes import Captures
from inferd.engine.model import VersionModel, build_model
from inferd.engine.scheduler import Chunk, Sequence, SlotBatch
from inferd.engine.step_graphs import StepGraphs, graph_sizes

from .checkpoints import make_checkpoint, read_tensors, tag_of

BLOCK_TOKENS = 4
BLOCKS_EACH = 12
LONGEST = BLOCKS_EACH * BLOCK_TOKENS


class Replayed:
    """Stands for a captured graph."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.replay = work
        self.is_open = True

    def reset(self) -> None:
        assert self.is_open, "a graph was reset twice"
        self.is_open = False


class Recorder:
    """Stands for `Captures`."""

    def __init__(self, *, fails_at: int | None = None) -> None:
        self.graphs: list[Replayed] = []
        self._fails_at = fails_at
        self._logits = torch.empty(0)

    def record(self, work: Callable[[], None]) -> Replayed:
        if len(self.graphs) == self._fails_at:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.graphs.append(Replayed(work))
        return self.graphs[-1]

    def logits(self, rows: int, vocabulary: int, dtype: torch.dtype) -> torch.Tensor:
        if self._logits.shape != (rows, vocabulary):
            self._logits = torch.empty((rows, vocabulary), dtype=dtype)
        return self._logits


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> VersionModel:
    folder: Path = make_checkpoint(tmp_path_factory.mktemp("tiny"))
    return build_model(tag_of("v1"), read_tensors(folder), folder)


class Scene:
    """Some sequences over two caches: one for graphs, one for plain steps."""

    def __init__(self, model: VersionModel, lengths: list[int], *, sequences: int, widest: int) -> None:
        self.model = model
        self.caches = [KvCache(model.geometry, len(lengths) * BLOCKS_EACH, BLOCK_TOKENS) for _ in range(2)]
        captures = cast(Captures, Recorder())
        graphs = StepGraphs.capture(
            model, self.caches[0], captures, sequences=sequences, widest=widest, longest=LONGEST
        )
        assert graphs is not None
        self.graphs = graphs
        root = PrefixKey.root(model.tag.digest)
        generator = torch.Generator().manual_seed(len(lengths))
        self.sequences = [
            Sequence(
                number,
                0,
                root,
                torch.randint(1, 257, (length,), generator=generator).tolist(),
                LONGEST - length,
                blocks=list(range(number * BLOCKS_EACH, (number + 1) * BLOCKS_EACH)),
            )
            for number, length in enumerate(lengths)
        ]

    def step(self, *counts: tuple[int, int]) -> None:
        """Compute so many tokens of each of some sequences both ways, and let those that end go on."""
        chunks = []
        for number, count in counts:
            sequence = self.sequences[number]
            is_last = sequence.computed + count == len(sequence.tokens)
            chunks.append(Chunk(sequence, sequence.computed, count, is_last=is_last))
        decodes = sum(chunk.count == 1 and chunk.start > 0 for chunk in chunks)
        batch = SlotBatch(0, tuple(chunks), decodes)
        assert self.graphs.fits(batch)
        expected = run_forward(self.model, self.caches[1], chunks, decodes)
        found = self.graphs.run(chunks)
        assert found.shape == expected.shape == (sum(c.is_last for c in chunks), self.model.vocabulary)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        ended = [chunk for chunk in chunks if chunk.is_last]
        for chunk in chunks:
            chunk.sequence.computed += chunk.count
        for chunk, token in zip(ended, expected.argmax(-1).tolist(), strict=True):
            chunk.sequence.tokens.append(token)


def test_decodes_and_prompts_in_one_graph(model: VersionModel) -> None:
    scene = Scene(model, [9, 5, 17, 1], sequences=4, widest=16)
    scene.step((0, 9), (1, 5))  # both whole
    scene.step((0, 1), (1, 1), (2, 13))  # a chunk that does not end its prompt
    scene.step((1, 1), (0, 1), (2, 3))  # columns change hands
    scene.step((2, 1), (3, 1))  # the last token of a prompt, and a prompt of one token
    for _ in range(6):  # over the end of a block
        scene.step((0, 1), (1, 1), (2, 1), (3, 1))
    scene.step((3, 1))
    scene.step((2, 1), (0, 1), (1, 1))


def test_a_narrow_step_after_a_wide_one_reads_no_column_of_it(model: VersionModel) -> None:
    scene = Scene(model, [2, 14, 3], sequences=2, widest=16)
    scene.step((0, 2), (1, 14))  # asks for columns 1 and 15
    scene.step((2, 2))  # asks for none, of a graph that has two columns
    scene.step((0, 1))
    scene.step((2, 1))


def test_a_prompt_in_a_column_that_decoded_is_gone_when_that_decodes_again(model: VersionModel) -> None:
    scene = Scene(model, [2, 14], sequences=2, widest=16)
    scene.step((0, 2))
    scene.step((0, 1))
    scene.step((1, 14))
    scene.step((0, 1))


def test_a_step_without_an_end_has_no_logits(model: VersionModel) -> None:
    scene = Scene(model, [20], sequences=2, widest=8)
    scene.step((0, 8))
    scene.step((0, 8))
    scene.step((0, 4))


def test_what_fits(model: VersionModel) -> None:
    scene = Scene(model, [4, 4, 4], sequences=2, widest=8)

    def batch(*counts: int) -> SlotBatch:
        chunks = (Chunk(s, 0, n, is_last=n == 4) for s, n in zip(scene.sequences, counts, strict=False))
        return SlotBatch(0, tuple(chunks), 0)

    assert scene.graphs.fits(batch(4, 4))
    assert not scene.graphs.fits(batch(5, 4))  # nine tokens
    assert not scene.graphs.fits(batch(1, 1, 1))  # three rows of logits


def test_both_slots_leave_their_logits_in_one_place(model: VersionModel) -> None:
    recorder = Recorder()
    cache = KvCache(model.geometry, 8, BLOCK_TOKENS)
    both = [
        StepGraphs.capture(
            model, cache, cast(Captures, recorder), sequences=2, widest=4, longest=8 * BLOCK_TOKENS
        )
        for _ in range(2)
    ]
    assert both[0] is not None
    assert both[1] is not None
    assert both[0]._logits is both[1]._logits


def test_a_failed_capture_closes_what_was_captured(
    model: VersionModel, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder(fails_at=2)
    cache = KvCache(model.geometry, 8, BLOCK_TOKENS)
    graphs = StepGraphs.capture(
        model, cache, cast(Captures, recorder), sequences=4, widest=8, longest=8 * BLOCK_TOKENS
    )
    assert graphs is None
    assert [graph.is_open for graph in recorder.graphs] == [False, False]
    assert "without CUDA graphs" in caplog.text


def test_sizes() -> None:
    assert graph_sizes(1, 1) == [1]
    assert graph_sizes(8, 8) == [1, 2, 4, 8]
    assert graph_sizes(9, 128) == [1, 2, 4, 8, 9, 128]
