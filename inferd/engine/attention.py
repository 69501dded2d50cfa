"""Attention over the paged cache, as a function that `transformers` models call by name.

A forward pass runs one flattened batch `[1, tokens]`: first the decodes, one token each, then the
prompt chunks one after another.  What belongs to whom travels as the keyword argument `paged`, which
`transformers` hands through to the attention function untouched.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from inferd.engine.decode_attention import Decodes, decodes_of
from inferd.engine.kv_cache import KvCache
from inferd.engine.scheduler import Chunk
from inferd.engine.transfers import send
from shared.errors import InvalidRequest, InvariantError

ATTENTION = "changeover_paged"


@dataclass(frozen=True, slots=True)
class _Prompt:
    """One prompt chunk: its rows in the batch and what its tokens attend to."""

    first: int
    count: int
    context: int  # tokens attended to by the chunk's last one
    table: torch.Tensor | None  # [blocks]; None where the chunk starts the sequence
    mask: torch.Tensor | None  # [count, context], True where attended; None for plain causal


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """Where the tokens of one forward pass lie in the cache."""

    cache: KvCache
    rows: torch.Tensor  # [tokens] int64: the cache row that each token is written to
    decodes: Decodes | None
    prompts: tuple[_Prompt, ...]
    longest: int  # tokens of the longest context
    layers_seen: list[int] = field(default_factory=list)


def page(cache: KvCache, chunks: Seq[Chunk], decodes: int, heads: int) -> PagedBatch:
    """Lay out a slot's batch for the attention function of a model with `heads` query heads."""
    size = cache.block_tokens
    rows: list[int] = []
    prompts: list[_Prompt] = []
    for number, chunk in enumerate(chunks):
        blocks, end = chunk.sequence.blocks, chunk.start + chunk.count
        if number >= decodes:
            prompts.append(_prompt(cache, chunk, first=len(rows)))
        rows += [blocks[at // size] * size + at % size for at in range(chunk.start, end)]
    return PagedBatch(
        cache=cache,
        rows=send(rows, torch.int64, cache.geometry.device),
        decodes=decodes_of(cache, chunks[:decodes], heads) if decodes else None,
        prompts=tuple(prompts),
        longest=max(chunk.start + chunk.count for chunk in chunks),
    )


def _prompt(cache: KvCache, chunk: Chunk, first: int) -> _Prompt:
    context = chunk.start + chunk.count
    if chunk.start == 0:
        return _Prompt(first, chunk.count, context, None, None)
    device = cache.geometry.device
    blocks = chunk.sequence.blocks[: -(-context // cache.block_tokens)]
    position = torch.arange(chunk.start, context, device=device)
    mask = torch.arange(context, device=device)[None] <= position[:, None]
    return _Prompt(first, chunk.count, context, send(blocks, torch.int64, device), mask)


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    paged: PagedBatch | None = None,
    sliding_window: int | None = None,
    **features: object,
) -> tuple[torch.Tensor, None]:
    """Write the new keys and values [1, kv_heads, tokens, head_dim], return the attention of `query`
    [1, heads, tokens, head_dim] as [1, tokens, heads, head_dim].  Raises InvalidRequest where the model
    asks for something else than causal softmax attention over its whole context."""
    if paged is None:
        raise InvariantError("the paged attention was called without a batch")
    cache, layer = paged.cache, module.layer_idx
    if not isinstance(layer, int):
        raise InvalidRequest(f"{type(module).__name__} does not say which layer it is")
    _refuse_features(module, attention_mask, sliding_window, paged.longest, features)
    geometry = cache.geometry
    shape = (1, geometry.kv_heads, query.shape[2], geometry.head_dim)
    if key.shape != shape or value.shape != shape or layer >= geometry.layers:
        raise InvalidRequest(
            f"layer {layer} has keys {tuple(key.shape)} and values {tuple(value.shape)}, the KV cache "
            f"expects {shape} in {geometry.layers} layers"
        )
    paged.layers_seen.append(layer)
    cache.write(layer, paged.rows, key[0].transpose(0, 1), value[0].transpose(0, 1))
    heads, tokens, head_dim = query.shape[1:]
    scale = head_dim**-0.5 if scaling is None else scaling
    decoded: torch.Tensor | None = None
    if paged.decodes is not None:
        count = paged.decodes.count
        decoded = paged.decodes.attend(cache, layer, query[0, :, :count].transpose(0, 1), scale)
        if not paged.prompts:
            return decoded[None], None
    out = query.new_empty((1, tokens, heads, head_dim))
    if decoded is not None:
        out[0, : decoded.shape[0]] = decoded
    for prompt in paged.prompts:
        span = slice(prompt.first, prompt.first + prompt.count)
        if prompt.table is None:
            keys, values = key[:, :, span], value[:, :, span]
        else:
            keys, values = cache.gather(layer, prompt.table, 1)
            keys, values = keys[:, :, : prompt.context], values[:, :, : prompt.context]
        attended = scaled_dot_product_attention(
            query[:, :, span],
            _repeat(keys, heads),
            _repeat(values, heads),
            attn_mask=prompt.mask,
            is_causal=prompt.mask is None,
            scale=scale,
        )
        out[:, span] = attended.transpose(1, 2)
    return out, None


def _repeat(heads: torch.Tensor, count: int) -> torch.Tensor:
    """[1, kv_heads, tokens, head_dim] as [1, count, tokens, head_dim], a view where one head serves all."""
    _, kv_heads, tokens, head_dim = heads.shape
    if kv_heads == count:
        return heads
    spread = heads[:, :, None].expand(1, kv_heads, count // kv_heads, tokens, head_dim)
    return spread.reshape(1, count, tokens, head_dim)


def _refuse_features(
    module: torch.nn.Module,
    attention_mask: torch.Tensor | None,
    sliding_window: int | None,
    longest: int,
    features: dict[str, object],
) -> None:
    name = type(module).__name__
    if attention_mask is not None:
        raise InvalidRequest(f"{name} makes an attention mask of its own")
    if sliding_window is not None and sliding_window < longest:
        raise InvalidRequest(f"{name} attends to a window of {sliding_window} tokens, {longest} are there")
    if not getattr(module, "is_causal", True) or features.get("is_causal") is False:
        raise InvalidRequest(f"{name} is not causal")
    asked = [feature for feature in _UNSUPPORTED if features.get(feature) is not None]
    if asked:
        raise InvalidRequest(f"{name} needs attention with {', '.join(asked)}")


_UNSUPPORTED = ("softcap", "s_aux", "sinks", "position_bias", "head_mask", "block_sequence_ids")

AttentionInterface.register(ATTENTION, paged_attention)
