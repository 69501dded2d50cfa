"""`StepGraphs`: steps of one slot as captured CUDA graphs, one for each of some numbers of tokens.

A graph computes every token as if it decoded: one query over the blocks of its sequence, up to its own
position.  The keys and values of all tokens are written before, layer by layer, so a prompt's chunk may be in
it as well, a column for each of its tokens; and a step in which some sequences decode while others bring
prompts takes hardly longer than one that only decodes.

What a step computes is in tensors that stay where they are: `inputs` holds a column for each token, and the
graph of `size` reads the first `size` of them.  Columns that a smaller step leaves over decode one token of
the padding block, whose result nobody reads.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from itertools import takewhile

import torch

from inferd.engine.attention import PagedBatch
from inferd.engine.decode_attention import decodes_over
from inferd.engine.forward import run_model
from inferd.engine.kv_cache import KvCache
from inferd.engine.lanes import Captures
from inferd.engine.model import VersionModel
from inferd.engine.scheduler import Chunk, SlotBatch

_log = logging.getLogger(__name__)

# _ASKED holds the columns whose logits are wanted, in order; the others are one number for each token.
_TOKEN, _POSITION, _ROW, _LENGTH, _ASKED, _TABLE = range(6)


def graph_sizes(sequences: int, widest: int) -> list[int]:
    """Numbers of tokens to capture: the powers of two below `sequences`, that, and `widest`."""
    powers = takewhile(lambda size: size < sequences, (1 << power for power in range(sequences.bit_length())))
    return [*powers, sequences, *([widest] if widest > sequences else [])]


class StepGraphs:
    """Made by `capture`, used by the step thread alone; `close` gives the graphs' memory back."""

    def __init__(
        self, model: VersionModel, cache: KvCache, logits: torch.Tensor, widest: int, longest: int
    ) -> None:
        device = cache.geometry.device
        width = -(-longest // cache.block_tokens)
        self._model = model
        self._cache = cache
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        is_cuda = device.type == "cuda"
        self._host = torch.zeros((_TABLE + width, widest), dtype=torch.int64, pin_memory=is_cuda)
        self._cells = self._host.numpy()
        self._inputs = torch.zeros_like(self._host, device=device)
        self._sent = torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]
        self._logits = logits
        # The block list that each column of the table was filled from, and how far.
        self._filled: list[tuple[list[int] | None, int]] = [(None, 0)] * widest
        self._pad(0, widest)
        self._inputs.copy_(self._host)

    @classmethod
    def capture(
        cls,
        model: VersionModel,
        cache: KvCache,
        captures: Captures,
        *,
        sequences: int,
        widest: int,
        longest: int,
    ) -> StepGraphs | None:
        """Graphs for steps of 1 to `widest` tokens of up to `sequences` sequences of up to `longest` tokens;
        None, and a warning in the log, where the model's code cannot be captured.  On the stream of
        preparations; steps of the other slot may run meanwhile.  Blocking."""
        logits = captures.logits(sequences, model.vocabulary, model.geometry.dtype)
        graphs = cls(model, cache, logits, widest, longest)
        first, *rest = graph_sizes(sequences, widest)
        # The smallest as a trial, since what a failed capture took is lost.  Then from the largest on: the
        # others fit into the memory that it used.
        for size in (first, *reversed(rest)):
            # Loads the kernels that this size takes; neither that nor a true failure belongs in a capture.
            graphs._compute(size)
            try:
                graphs._graphs[size] = captures.record(partial(graphs._compute_in_place, size))
            except RuntimeError as error:
                graphs.close()
                _log.warning("%s runs without CUDA graphs: %s", type(model.module).__name__, error)
                return None
        return graphs

    def fits(self, batch: SlotBatch) -> bool:
        """Whether `run` can do it."""
        return len(batch.chunks) <= self._logits.shape[0] and batch.tokens <= self._host.shape[1]

    @torch.inference_mode()
    def run(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """Compute `chunks` on the current stream; logits [rows, vocabulary] in the model's dtype, a row for
        each chunk that ends its sequence's tokens, in order.  The next run, of either slot, overwrites them.
        Does not wait."""
        if self._sent is not None:
            self._sent.synchronize()  # the copy before this one has long read the host's side
        count, asked, used = self._fill(chunks)
        size = min(size for size in self._graphs if size >= count)
        self._pad(count, size)
        self._inputs[: _TABLE + used].copy_(self._host[: _TABLE + used], non_blocking=True)
        if self._sent is not None:
            self._sent.record()
        self._graphs[size].replay()
        return self._logits[:asked]

    def close(self) -> None:
        """Destroy the graphs.  None of them may be running."""
        for graph in self._graphs.values():
            graph.reset()
        self._graphs.clear()

    # --- inside ----------------------------------------------------------------------------------

    @torch.inference_mode()
    def _compute(self, size: int) -> torch.Tensor:
        """Compute what the first `size` columns say; logits of the columns that are asked for."""
        cache = self._cache
        tables, lengths = self._inputs[_TABLE:, :size], self._inputs[_LENGTH, :size]
        paged = PagedBatch(
            cache=cache,
            rows=self._inputs[_ROW, :size],
            decodes=decodes_over(cache, tables, lengths, self._model.heads),
            prompts=(),
            longest=1,  # a window smaller than the longest context was refused with the config
        )
        return run_model(
            self._model,
            input_ids=self._inputs[_TOKEN, :size],
            position_ids=self._inputs[_POSITION, :size],
            paged=paged,
            logits_to_keep=self._inputs[_ASKED, : self._rows(size)],
        )

    @torch.inference_mode()
    def _compute_in_place(self, size: int) -> None:
        self._logits[: self._rows(size)].copy_(self._compute(size))

    def _rows(self, size: int) -> int:
        return min(size, self._logits.shape[0])

    def _fill(self, chunks: Sequence[Chunk]) -> tuple[int, int, int]:
        """Write the columns of `chunks` on the host's side: how many, how many of them have logits that are
        asked for, and the table rows in use."""
        cells, size = self._cells, self._cache.block_tokens
        column = asked = used = 0
        for chunk in chunks:
            end, after = chunk.start + chunk.count, column + chunk.count
            blocks, needed = chunk.sequence.blocks, -(-end // size)
            self._fill_table(column, after, blocks, needed)
            positions = range(chunk.start, end)
            cells[_TOKEN, column:after] = chunk.sequence.tokens[chunk.start : end]
            cells[_POSITION, column:after] = positions
            cells[_LENGTH, column:after] = range(chunk.start + 1, end + 1)
            cells[_ROW, column:after] = [blocks[at // size] * size + at % size for at in positions]
            if chunk.is_last:
                cells[_ASKED, asked] = after - 1
                asked += 1
            used = max(used, needed)
            column = after
        cells[_ASKED, asked:] = 0  # not what a wider step left, which a smaller graph has no column for
        return column, asked, used

    def _fill_table(self, first: int, end: int, blocks: list[int], needed: int) -> None:
        """The first `needed` of `blocks` for the columns from `first` to `end`."""
        held, filled = self._filled[first]
        if end - first > 1:
            self._cells[_TABLE : _TABLE + needed, first:end] = [[block] for block in blocks[:needed]]
            self._filled[first:end] = [(None, 0)] * (end - first)
            return
        # A sequence's list only grows while it runs, and it gets another one after a preemption.
        if held is not blocks:
            filled = 0
        if filled < needed:
            self._cells[_TABLE + filled : _TABLE + needed, first] = blocks[filled:needed]
            self._filled[first] = (blocks, needed)

    def _pad(self, first: int, end: int) -> None:
        """Let the columns from `first` to `end` decode one token that nobody reads."""
        cells = self._cells
        cells[_TOKEN, first:end] = 0
        cells[_POSITION, first:end] = 0
        cells[_ROW, first:end] = self._cache.padding_row
        cells[_LENGTH, first:end] = 1
        cells[_TABLE, first:end] = self._cache.padding_block
        self._filled[first:end] = [(None, 0)] * (end - first)
