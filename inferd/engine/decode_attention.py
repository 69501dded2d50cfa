"""How the decodes of a batch attend: each is one query over the blocks of its sequence.

`GatheredDecodes` is plain torch and the reference; `KernelDecodes` reads the cache where it lies, and a
captured graph of it serves later steps, since only the contents of its tensors say what it computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention

from inferd.engine.kv_cache import KvCache
from inferd.engine.scheduler import Chunk
from inferd.engine.transfers import send


class Decodes(Protocol):
    """The decodes of one forward pass."""

    @property
    def count(self) -> int:
        """How many sequences decode."""
        ...

    def attend(self, cache: KvCache, layer: int, query: torch.Tensor, scaling: float) -> torch.Tensor:
        """Attention of `query` [count, heads, head_dim] over what `layer` keeps, in the same shape."""
        ...


@dataclass(frozen=True, slots=True)
class GatheredDecodes:
    """Copies every context to a rectangle and masks what lies beyond its end."""

    count: int
    table: torch.Tensor  # [count * width] int64
    mask: torch.Tensor  # [count, 1, 1, width * block_tokens], added to the scores

    def attend(self, cache: KvCache, layer: int, query: torch.Tensor, scaling: float) -> torch.Tensor:
        keys, values = cache.gather(layer, self.table, self.count)
        # The query heads of one KV head become its queries: no key or value is repeated.
        grouped = query.reshape(self.count, cache.geometry.kv_heads, -1, query.shape[-1])
        attended = scaled_dot_product_attention(grouped, keys, values, attn_mask=self.mask, scale=scaling)
        return attended.reshape(query.shape)


@dataclass(frozen=True, slots=True)
class KernelDecodes:
    """Attends in place by a kernel; `parts` and `weights` are scratch that the layers share."""

    count: int
    tables: torch.Tensor  # [width, count] int64
    lengths: torch.Tensor  # [count] int64, at least 1
    parts: torch.Tensor
    weights: torch.Tensor

    @classmethod
    def over(cls, cache: KvCache, tables: torch.Tensor, lengths: torch.Tensor, heads: int) -> KernelDecodes:
        """For queries of `heads` heads."""
        from inferd.engine.decode_kernel import splits_for  # needs Triton, which only CUDA builds bring

        geometry, count = cache.geometry, lengths.shape[0]
        scratch = (splits_for(count, geometry.kv_heads), count, heads)
        parts = torch.empty((*scratch, geometry.head_dim), dtype=torch.float32, device=geometry.device)
        return cls(count, tables, lengths, parts, parts.new_empty(scratch))

    def attend(self, cache: KvCache, layer: int, query: torch.Tensor, scaling: float) -> torch.Tensor:
        from inferd.engine.decode_kernel import attend

        keys, values = cache.layer(layer)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        attend(
            query,
            keys,
            values,
            self.tables,
            self.lengths,
            self.parts,
            self.weights,
            out,
            block_tokens=cache.block_tokens,
            scale=scaling,
        )
        return out


def decodes_of(cache: KvCache, chunks: Sequence[Chunk], heads: int) -> Decodes:
    """The decodes `chunks`, at least one, the way that suits the cache's device."""
    device, size = cache.geometry.device, cache.block_tokens
    lengths = [chunk.start + 1 for chunk in chunks]
    width = -(-max(lengths) // size)
    table: list[int] = []
    for chunk, length in zip(chunks, lengths, strict=True):
        blocks = chunk.sequence.blocks[: -(-length // size)]
        # Padded with the sequence's own first block: whatever is masked is at least its own.
        table += blocks + blocks[:1] * (width - len(blocks))
    by_block = send(table, torch.int64, device).view(len(chunks), width).t()
    return decodes_over(cache, by_block, send(lengths, torch.int64, device), heads)


def decodes_over(cache: KvCache, tables: torch.Tensor, lengths: torch.Tensor, heads: int) -> Decodes:
    """Decodes over the first `lengths` [count] tokens, at least one each, of the blocks `tables`
    [width, count], the way that suits the cache's device; both int64.  Blocks of the table that lie beyond a
    context must exist."""
    if cache.geometry.device.type == "cuda":
        return KernelDecodes.over(cache, tables, lengths, heads)
    width, count = tables.shape
    beyond = torch.arange(width * cache.block_tokens)[None] >= lengths[:, None]
    mask = torch.zeros(beyond.shape, dtype=cache.geometry.dtype).masked_fill_(beyond, float("-inf"))
    return GatheredDecodes(count, tables.t().reshape(-1), mask[:, None, None])
