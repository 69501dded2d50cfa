"""`DecodeGraphs`: the decoding steps of one slot as captured CUDA graphs, one for each batch size.

What a step computes is in tensors that stay where they are: `inputs` holds a column for each sequence,
and the graph of `size` reads the first `size` of them.  Columns that a smaller batch leaves over decode
one token of the padding block, whose result nobody reads.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import takewhile

import torch

from inferd.engine.attention import PagedBatch
from inferd.engine.decode_attention import KernelDecodes
from inferd.engine.forward import run_model
from inferd.engine.kv_cache import KvCache
from inferd.engine.lanes import Lane
from inferd.engine.model import VersionModel
from inferd.engine.scheduler import Chunk

_log = logging.getLogger(__name__)

_TOKEN, _POSITION, _ROW, _LENGTH, _TABLE = range(5)


def graph_sizes(most: int) -> list[int]:
    """Batch sizes to capture for up to `most` sequences: the powers of two below, and `most`."""
    return [*takewhile(lambda size: size < most, (1 << power for power in range(most.bit_length()))), most]


class DecodeGraphs:
    """Made by `capture`, used by the step thread alone; `close` gives the graphs' memory back."""

    def __init__(self, model: VersionModel, cache: KvCache, most: int, longest: int) -> None:
        device = cache.geometry.device
        width = -(-longest // cache.block_tokens)
        self._model = model
        self._cache = cache
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._host = torch.zeros((_TABLE + width, most), dtype=torch.int64, pin_memory=True)
        self._cells = self._host.numpy()
        self._inputs = torch.zeros_like(self._host, device=device)
        self._sent = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._logits = torch.empty((most, model.vocabulary), dtype=torch.float32, device=device)
        # The block list that each column of the table was filled from, and how far.
        self._filled: list[tuple[list[int] | None, int]] = [(None, 0)] * most
        self._pad(0, most)
        self._inputs.copy_(self._host)

    @classmethod
    def capture(
        cls, model: VersionModel, cache: KvCache, lane: Lane, most: int, longest: int
    ) -> DecodeGraphs | None:
        """Graphs for 1 to `most` sequences of up to `longest` tokens, on the current stream, which is
        `lane`'s; None, and a warning in the log, where the model's code cannot be captured.  Steps of the
        other slot may run meanwhile.  Blocking."""
        graphs = cls(model, cache, most, longest)
        first, *rest = graph_sizes(most)
        # The smallest as a trial, since what a failed capture took is lost.  Then from the largest on: the
        # others fit into the memory that it used.
        for size in (first, *reversed(rest)):
            # Loads the kernels that this size takes; neither that nor a true failure belongs in a capture.
            graphs._compute(size)
            lane.stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            try:
                graphs._record(graph, lane, size)
            except RuntimeError as error:
                lane.renew()
                graphs.close()
                _log.warning("%s decodes without CUDA graphs: %s", type(model.module).__name__, error)
                return None
            graphs._graphs[size] = graph
        return graphs

    @property
    def most(self) -> int:
        """The largest batch."""
        return self._logits.shape[0]

    @torch.inference_mode()
    def run(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """Decode `chunks`, one token each and `most` at most, on the current stream; float32 logits
        [chunks, vocabulary], which the next run overwrites.  Does not wait."""
        size = min(size for size in self._graphs if size >= len(chunks))
        self._sent.synchronize()  # the copy before this one has long read the host's side
        used = self._fill(chunks)
        self._pad(len(chunks), size)
        self._inputs[: _TABLE + used].copy_(self._host[: _TABLE + used], non_blocking=True)
        self._sent.record()
        self._graphs[size].replay()
        return self._logits[: len(chunks)]

    def close(self) -> None:
        """Destroy the graphs.  None of them may be running."""
        for graph in self._graphs.values():
            graph.reset()
        self._graphs.clear()

    # --- inside ----------------------------------------------------------------------------------

    @torch.inference_mode()
    def _compute(self, size: int) -> None:
        """Decode what the first `size` columns say and put the logits in their place."""
        cache = self._cache
        tables, lengths = self._inputs[_TABLE:, :size], self._inputs[_LENGTH, :size]
        paged = PagedBatch(
            cache=cache,
            rows=self._inputs[_ROW, :size],
            decodes=KernelDecodes.over(cache, tables, lengths, self._model.heads),
            prompts=(),
            longest=1,  # a window smaller than the longest context was refused with the config
        )
        logits = run_model(
            self._model,
            input_ids=self._inputs[_TOKEN, :size],
            position_ids=self._inputs[_POSITION, :size],
            paged=paged,
            logits_to_keep=0,
        )
        self._logits[:size].copy_(logits)

    def _record(self, graph: torch.cuda.CUDAGraph, lane: Lane, size: int) -> None:
        # Not `torch.cuda.graph`, which first collects garbage, waits for the whole device and empties the
        # allocator: steps of the other slot would stop.  "thread_local", since they go on meanwhile.
        graph.capture_begin(pool=lane.pool, capture_error_mode="thread_local")
        try:
            self._compute(size)
        finally:
            graph.capture_end()

    def _fill(self, chunks: Sequence[Chunk]) -> int:
        """Write the columns of `chunks` on the host's side; the table rows that are in use."""
        cells, size, count = self._cells, self._cache.block_tokens, len(chunks)
        used = 1
        rows: list[int] = []
        for column, chunk in enumerate(chunks):
            blocks = chunk.sequence.blocks
            held, filled = self._filled[column]
            # A sequence's list only grows while it runs, and it gets another one after a preemption.
            if held is not blocks:
                filled = 0
            if filled < len(blocks):
                cells[_TABLE + filled : _TABLE + len(blocks), column] = blocks[filled:]
                self._filled[column] = (blocks, len(blocks))
            used = max(used, len(blocks))
            rows.append(blocks[chunk.start // size] * size + chunk.start % size)
        starts = [chunk.start for chunk in chunks]
        cells[_TOKEN, :count] = [chunk.sequence.tokens[chunk.start] for chunk in chunks]
        cells[_POSITION, :count] = starts
        cells[_ROW, :count] = rows
        cells[_LENGTH, :count] = starts
        cells[_LENGTH, :count] += 1
        return used

    def _pad(self, first: int, end: int) -> None:
        """Let the columns from `first` to `end` decode one token that nobody reads."""
        cells = self._cells
        cells[_TOKEN, first:end] = 0
        cells[_POSITION, first:end] = 0
        cells[_ROW, first:end] = self._cache.padding_row
        cells[_LENGTH, first:end] = 1
        cells[_TABLE, first:end] = self._cache.padding_block
        self._filled[first:end] = [(None, 0)] * (end - first)
