"""`KvCache`: the tensors that hold keys and values, addressed by block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from inferd.engine.transfers import send


@dataclass(frozen=True, slots=True)
class KvGeometry:
    """What a version's attention layers write per token; both slots must agree on it."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype.itemsize

    def __str__(self) -> str:
        return (
            f"{self.layers} layers x {self.kv_heads} heads x {self.head_dim} in "
            f"{str(self.dtype).removeprefix('torch.')} on {self.device}"
        )


class KvCache:
    """Keys and values of `blocks` blocks, zero at first.  Only the step thread touches them; one more
    block, `padding_block`, is nobody's: what must be written and is never read goes there."""

    def __init__(self, geometry: KvGeometry, blocks: int, block_tokens: int) -> None:
        self.geometry = geometry
        self.blocks = blocks
        self.block_tokens = block_tokens
        self.padding_block = blocks
        head = (geometry.kv_heads, geometry.head_dim)
        count = blocks + 1
        # [keys and values, layers, blocks, block_tokens, kv_heads, head_dim]
        self._data = torch.zeros(
            (2, geometry.layers, count, block_tokens, *head), dtype=geometry.dtype, device=geometry.device
        )
        self._by_token = self._data.view(2, geometry.layers, count * block_tokens, *head)
        self._by_block = self._data.view(2, geometry.layers, count, -1)

    @property
    def padding_row(self) -> int:
        """The first token row of the padding block."""
        return self.padding_block * self.block_tokens

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [token rows, kv_heads, head_dim] of one layer, contiguous views."""
        return self._by_token[0, layer], self._by_token[1, layer]

    def clear(self, blocks: Sequence[int]) -> None:
        """Zero `blocks`.  Attention reads a block to its end and masks what lies beyond the sequence;
        a masked NaN that an earlier sequence left there would still make the sum NaN."""
        if blocks:
            index = send(blocks, torch.int64, self.geometry.device)
            self._by_block.index_fill_(2, index, 0)

    def write(self, layer: int, rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store `keys` and `values` [tokens, kv_heads, head_dim] at token rows `rows` [tokens]."""
        if self.geometry.device.type == "cuda" and keys.stride(2) == values.stride(2) == 1:
            from inferd.engine.decode_kernel import store  # needs Triton, which only CUDA builds bring

            store(keys, values, rows, *self.layer(layer))
            return
        self._by_token[0, layer].index_copy_(0, rows, keys)
        self._by_token[1, layer].index_copy_(0, rows, values)

    def gather(self, layer: int, table: torch.Tensor, sequences: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [sequences, kv_heads, width * block_tokens, head_dim] of the blocks in `table`
        [sequences * width], copied."""
        shape = (sequences, -1, self.geometry.kv_heads, self.geometry.head_dim)
        keys = self._by_block[0, layer].index_select(0, table).view(shape)
        values = self._by_block[1, layer].index_select(0, table).view(shape)
        return keys.transpose(1, 2), values.transpose(1, 2)
