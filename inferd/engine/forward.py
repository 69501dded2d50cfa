"""One forward pass of a version over one slot's batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from inferd.engine.attention import PagedBatch, page
from inferd.engine.kv_cache import KvCache
from inferd.engine.model import VersionModel
from inferd.engine.scheduler import Chunk
from inferd.engine.transfers import send
from shared.errors import InvalidRequest


@torch.inference_mode()
def run_forward(model: VersionModel, cache: KvCache, chunks: Sequence[Chunk], decodes: int) -> torch.Tensor:
    """Compute `chunks` (the first `decodes` are decodes) and return logits [rows, vocabulary] in the model's
    dtype, a row for each chunk that ends its sequence's tokens, in order; [0, vocabulary] if none does.

    The keys and values of all tokens are in `cache` afterwards.  On a GPU the work is queued on the
    current stream, and this does not wait for it."""
    device = cache.geometry.device
    paged = page(cache, chunks, decodes, model.heads)
    tokens: list[int] = []
    positions: list[int] = []
    last_rows: list[int] = []
    for chunk in chunks:
        tokens += chunk.sequence.tokens[chunk.start : chunk.start + chunk.count]
        positions += range(chunk.start, chunk.start + chunk.count)
        if chunk.is_last:
            last_rows.append(len(tokens) - 1)
    return run_model(
        model,
        input_ids=send(tokens, torch.int64, device),
        position_ids=send(positions, torch.int64, device),
        paged=paged,
        logits_to_keep=send(last_rows, torch.int64, device),
    )


def run_model(
    model: VersionModel,
    *,
    input_ids: torch.Tensor,
    position_ids: torch.Tensor,
    paged: PagedBatch,
    logits_to_keep: torch.Tensor,
) -> torch.Tensor:
    """Logits [rows, vocabulary] in the model's dtype, for the tokens `logits_to_keep` [rows] int64 of the
    flattened `input_ids` and `position_ids` [tokens]."""
    output = model.module(
        input_ids=input_ids[None],
        position_ids=position_ids[None],
        use_cache=False,
        logits_to_keep=logits_to_keep,
        paged=paged,
    )
    layers = paged.cache.geometry.layers
    if sorted(paged.layers_seen) != list(range(layers)):
        raise InvalidRequest(
            f"{type(model.module).__name__} ran attention in {len(paged.layers_seen)} of "
            f"{layers} layers through the paged cache"
        )
    logits: torch.Tensor = output.logits[0]
    return logits
