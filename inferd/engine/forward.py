"""One forward pass of a version over one slot's batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from inferd.engine.attention import page
from inferd.engine.kv_cache import KvCache
from inferd.engine.model import VersionModel
from inferd.engine.scheduler import Chunk
from shared.errors import InvalidRequest


@torch.inference_mode()
def run_forward(model: VersionModel, cache: KvCache, chunks: Sequence[Chunk], decodes: int) -> torch.Tensor:
    """Compute `chunks` (the first `decodes` are decodes) and return float32 logits [rows, vocabulary],
    a row for each chunk that ends its sequence's tokens, in order; [0, vocabulary] if none does.

    The keys and values of all tokens are in `cache` afterwards.  Blocking."""
    device = cache.geometry.device
    paged = page(cache, chunks, decodes)
    tokens: list[int] = []
    positions: list[int] = []
    last_rows: list[int] = []
    for chunk in chunks:
        tokens += chunk.sequence.tokens[chunk.start : chunk.start + chunk.count]
        positions += range(chunk.start, chunk.start + chunk.count)
        if chunk.is_last:
            last_rows.append(len(tokens) - 1)
    output = model.module(
        input_ids=torch.tensor([tokens], dtype=torch.int64, device=device),
        position_ids=torch.tensor([positions], dtype=torch.int64, device=device),
        use_cache=False,
        logits_to_keep=torch.tensor(last_rows, dtype=torch.int64, device=device),
        paged=paged,
    )
    if sorted(paged.layers_seen) != list(range(cache.geometry.layers)):
        raise InvalidRequest(
            f"{type(model.module).__name__} ran attention in {len(paged.layers_seen)} of "
            f"{cache.geometry.layers} layers through the paged cache"
        )
    logits: torch.Tensor = output.logits[0]
    return logits.float()
