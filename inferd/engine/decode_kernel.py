"""Attention of single queries over the paged cache, and what is written there, as Triton kernels.

Flash decoding: the context of a sequence is cut into `splits` parts that are attended to at the same
time, each with its own softmax; a second kernel weighs the parts.  Only lengths and block tables, which
lie on the device, say how much there is to do, so one captured launch serves every context length.

This module imports Triton: import it only where tensors lie on a CUDA device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Numbers that change from step to step must not make Triton compile another variant while it serves.
_CHANGING = ["tables_token_stride", "tables_row_stride", "query_row", "query_head", "sequences", "splits"]


@triton.jit(do_not_specialize=_CHANGING)  # type: ignore[untyped-decorator]
def _attend_part(  # type: ignore[no-untyped-def]
    query,  # [sequences, heads, HEAD_DIM]
    keys,  # [token rows, KV_HEADS, HEAD_DIM]
    values,  # as `keys`
    tables,  # block numbers; block n of sequence s at n * tables_token_stride + s * tables_row_stride
    lengths,  # [sequences] int64: tokens of each context
    parts,  # [splits, sequences, heads, HEAD_DIM] float32
    weights,  # [splits, sequences, heads] float32: log2 of the sum of exponentials
    out,  # [sequences, heads, HEAD_DIM], contiguous
    scale,
    tables_token_stride,
    tables_row_stride,
    query_row,
    query_head,
    sequences,
    splits,
    KV_HEADS: tl.constexpr,  # noqa: N803
    GROUP: tl.constexpr,  # noqa: N803
    HEAD_DIM: tl.constexpr,  # noqa: N803
    BLOCK_TOKENS: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    DIMS: tl.constexpr,  # noqa: N803
    TILE: tl.constexpr,  # noqa: N803
):
    sequence = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(lengths + sequence).to(tl.int32)
    share = tl.cdiv(tl.cdiv(length, splits), TILE) * TILE
    first = split * share
    end = tl.minimum(first + share, length)

    row = tl.arange(0, ROWS)
    dim = tl.arange(0, DIMS)
    head = kv_head * GROUP + row
    is_row = row < GROUP
    is_dim = dim < HEAD_DIM
    at = sequence.to(tl.int64) * query_row + head[:, None] * query_head + dim[None, :]
    q = tl.load(query + at, mask=is_row[:, None] & is_dim[None, :], other=0.0)

    most = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, DIMS], tl.float32)
    for start in range(first, end, TILE):
        token = start + tl.arange(0, TILE)
        is_token = token < end
        place = tables + (token // BLOCK_TOKENS).to(tl.int64) * tables_token_stride
        block = tl.load(place + sequence * tables_row_stride, mask=is_token, other=0).to(tl.int64)
        line = ((block * BLOCK_TOKENS + token % BLOCK_TOKENS) * KV_HEADS + kv_head) * HEAD_DIM
        cell = line[:, None] + dim[None, :]
        is_cell = is_token[:, None] & is_dim[None, :]
        k = tl.load(keys + cell, mask=is_cell, other=0.0)
        # "ieee": float32 stays float32; the default would round to TF32.
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * 1.4426950408889634)
        scores = tl.where(is_token[None, :], scores, float("-inf"))
        above = tl.maximum(most, tl.max(scores, 1))
        shrink = tl.exp2(most - above)
        p = tl.exp2(scores - above[:, None])
        total = total * shrink + tl.sum(p, 1)
        v = tl.load(values + cell, mask=is_cell, other=0.0)
        sums = sums * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        most = above

    is_out = is_row[:, None] & is_dim[None, :]
    heads = KV_HEADS * GROUP
    if splits == 1:
        place = (sequence.to(tl.int64) * heads + head)[:, None] * HEAD_DIM + dim[None, :]
        tl.store(out + place, (sums / total[:, None]).to(out.dtype.element_ty), mask=is_out)
    else:
        line = (split * sequences + sequence) * heads + head
        if first < end:
            place = line[:, None].to(tl.int64) * HEAD_DIM + dim[None, :]
            tl.store(parts + place, sums / total[:, None], mask=is_out)
            tl.store(weights + line, most + tl.log2(total), mask=is_row)
        else:
            tl.store(weights + line, tl.full([ROWS], float("-inf"), tl.float32), mask=is_row)


@triton.jit(do_not_specialize=["sequences", "splits"])  # type: ignore[untyped-decorator]
def _join_parts(  # type: ignore[no-untyped-def]
    parts,  # [splits, sequences, heads, HEAD_DIM] float32
    weights,  # [splits, sequences, heads] float32, -inf where a part is empty and was not written
    out,  # [sequences, heads, HEAD_DIM], contiguous
    sequences,
    splits,
    HEADS: tl.constexpr,  # noqa: N803
    HEAD_DIM: tl.constexpr,  # noqa: N803
    DIMS: tl.constexpr,  # noqa: N803
    SPLITS: tl.constexpr,  # noqa: N803
):
    line = tl.program_id(0) * HEADS + tl.program_id(1)
    part = tl.arange(0, SPLITS)
    dim = tl.arange(0, DIMS)
    at = part * sequences * HEADS + line
    weight = tl.load(weights + at, mask=part < splits, other=float("-inf"))
    is_there = weight > float("-inf")
    share = tl.exp2(weight - tl.max(weight, 0))
    mask = is_there[:, None] & (dim < HEAD_DIM)[None, :]
    values = tl.load(parts + at[:, None].to(tl.int64) * HEAD_DIM + dim[None, :], mask=mask, other=0.0)
    joined = tl.sum(values * share[:, None], 0) / tl.sum(share, 0)
    place = line.to(tl.int64) * HEAD_DIM + dim
    tl.store(out + place, joined.to(out.dtype.element_ty), mask=dim < HEAD_DIM)


@triton.jit(do_not_specialize=["key_token", "key_head", "value_token", "value_head"])  # type: ignore[untyped-decorator]
def _store_rows(  # type: ignore[no-untyped-def]
    key,  # [tokens, KV_HEADS, HEAD_DIM]
    value,  # as `key`
    rows,  # [tokens] int64: where in the cache
    keys,  # [token rows, KV_HEADS, HEAD_DIM]
    values,  # as `keys`
    key_token,
    key_head,
    value_token,
    value_head,
    KV_HEADS: tl.constexpr,  # noqa: N803
    HEAD_DIM: tl.constexpr,  # noqa: N803
    DIMS: tl.constexpr,  # noqa: N803
    HEADS: tl.constexpr,  # noqa: N803
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)[:, None]
    dim = tl.arange(0, DIMS)[None, :]
    mask = (head < KV_HEADS) & (dim < HEAD_DIM)
    place = (tl.load(rows + token) * KV_HEADS + head) * HEAD_DIM + dim
    tl.store(keys + place, tl.load(key + token * key_token + head * key_head + dim, mask=mask), mask=mask)
    at = token * value_token + head * value_head + dim
    tl.store(values + place, tl.load(value + at, mask=mask), mask=mask)


MAX_SPLITS = 32
_PROGRAMS = 264  # two for each multiprocessor of the largest devices in use


def splits_for(sequences: int, kv_heads: int) -> int:
    """Into how many parts contexts are cut, so that few sequences still fill the device."""
    return max(1, min(MAX_SPLITS, _PROGRAMS // (sequences * kv_heads)))


def store(
    key: torch.Tensor, value: torch.Tensor, rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> None:
    """Write `key` and `value` [tokens, kv_heads, head_dim] to rows `rows` [tokens] of the paged `keys` and
    `values` [token rows, kv_heads, head_dim]; dims must be dense.  Asynchronous."""
    tokens, kv_heads, head_dim = key.shape
    _store_rows[(tokens,)](
        key,
        value,
        rows,
        keys,
        values,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        DIMS=triton.next_power_of_2(head_dim),
        HEADS=triton.next_power_of_2(kv_heads),
        num_warps=4,
    )


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    parts: torch.Tensor,
    weights: torch.Tensor,
    out: torch.Tensor,
    *,
    block_tokens: int,
    scale: float,
) -> None:
    """Attention of `query` [sequences, heads, head_dim] over the paged `keys` and `values` [token rows,
    kv_heads, head_dim], written to the contiguous `out` of the same shape as `query`.

    Sequence s attends to its first `lengths[s]` tokens, at least one; its blocks are `tables[:, s]`.
    `parts` [splits, sequences, heads, head_dim] and `weights` [splits, sequences, heads], both float32,
    are scratch.  Asynchronous."""
    sequences, heads, head_dim = query.shape
    kv_heads, splits = keys.shape[1], parts.shape[0]
    dims = triton.next_power_of_2(head_dim)
    is_wide = query.element_size() == 4
    _attend_part[(sequences, kv_heads, splits)](
        query,
        keys,
        values,
        tables,
        lengths,
        parts,
        weights,
        out,
        scale,
        tables.stride(0),
        tables.stride(1),
        query.stride(0),
        query.stride(1),
        sequences,
        splits,
        KV_HEADS=kv_heads,
        GROUP=heads // kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_TOKENS=block_tokens,
        ROWS=max(16, triton.next_power_of_2(heads // kv_heads)),
        DIMS=max(16, dims),
        TILE=32 if is_wide else 64,
        num_warps=4,
        num_stages=1 if is_wide else 3,
    )
    if splits > 1:
        _join_parts[(sequences, heads)](
            parts,
            weights,
            out,
            sequences,
            splits,
            HEADS=heads,
            HEAD_DIM=head_dim,
            DIMS=dims,
            SPLITS=MAX_SPLITS,
            num_warps=2,
        )
