"""The next tokens of a batch from its logits.

A `Sampler` is the state of one sequence; each step it gives a `Draft` of what to do to its row, random
number included, and `pick` carries all drafts out at once on the logits' device.  A sequence draws from
its own generator and rows do not mix, so what it was batched with does not show in its answer.  Order:
logit bias, repetition, frequency and presence penalties, then temperature, top-k, top-p, min-p.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import torch

from inferd.engine.protocol import SamplingParams, TokenLogprob
from inferd.engine.transfers import fetch, send
from shared.errors import InvariantError

Logprobs = tuple[TokenLogprob, tuple[TokenLogprob, ...]]
"""Of the chosen token, and of the likeliest."""


@dataclass(frozen=True, slots=True)
class Draft:
    """How to choose the next token of one row."""

    params: SamplingParams
    point: float = 0.0  # in [0, 1): where in the cumulated distribution to draw
    repeated: tuple[int, ...] = ()  # tokens that the repetition penalty is for
    counted: tuple[tuple[int, int], ...] = ()  # tokens chosen before, and how often

    @property
    def is_argmax(self) -> bool:
        """Whether the next token is the largest logit."""
        return self.params.temperature == 0 and not (self.params.logit_bias or self.repeated or self.counted)

    @property
    def is_ranked(self) -> bool:
        """Whether tokens must be sorted by logit to know which may be drawn."""
        return self.params.top_k > 0 or self.params.top_p < 1


@dataclass(frozen=True, slots=True)
class Pick:
    """What became of one row."""

    token: int
    is_sound: bool  # whether the logits were finite; if not, the token means nothing
    logprobs: tuple[Logprobs, ...] = ()  # none or one


class Sampler:
    """The sampling state of one sequence; survives a preemption as it is."""

    def __init__(self, params: SamplingParams, prompt: Sequence[int]) -> None:
        self.params = params
        self._seen = set(prompt) if params.repetition_penalty != 1.0 else set()
        self._counts: Counter[int] = Counter()
        # On the host whatever the device: a seed means the same everywhere.
        self._generator = torch.Generator()
        if params.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(params.seed)

    def draft(self, vocabulary: int) -> Draft:
        """What to do to the next row of `vocabulary` logits; advances the generator of a sequence that
        is not greedy.  Raises InvariantError for a bias on a token that is not there."""
        params = self.params
        bias = params.logit_bias
        if bias and not (min(bias) >= 0 and max(bias) < vocabulary):
            raise InvariantError(f"a logit bias is outside the vocabulary of {vocabulary}")
        point = 0.0
        if params.temperature > 0:
            point = float(torch.rand((), generator=self._generator, dtype=torch.float64))
        return Draft(params, point, tuple(sorted(self._seen)), tuple(self._counts.items()))

    def note(self, token: int) -> None:
        """Count a token that was chosen."""
        if self.params.repetition_penalty != 1.0:
            self._seen.add(token)
        if self.params.presence_penalty or self.params.frequency_penalty:
            self._counts[token] += 1


def pick(logits: torch.Tensor, drafts: Sequence[Draft]) -> list[Pick]:
    """Choose for each row of `logits` [rows, vocabulary], which stay as they are; float32 or narrower, and
    what is more than a comparison is computed in float32.  Waits for the device once, after everything is
    queued."""
    if not drafts:
        return []
    # A NaN anywhere in a row makes its largest value NaN.
    best, tokens = logits.max(dim=-1)
    others = [row for row, draft in enumerate(drafts) if not draft.is_argmax]
    if others:
        chosen = _choose(_rows(logits, others), [drafts[row] for row in others])
        tokens = tokens.index_copy(0, send(others, torch.int64, logits.device), chosen)
    asked = [row for row, draft in enumerate(drafts) if draft.params.logprobs is not None]
    if not asked:
        found, sound = fetch(tokens, torch.isfinite(best))
        return list(map(Pick, found.tolist(), sound.tolist()))
    counts = [drafts[row].params.logprobs or 0 for row in asked]
    index = send(asked, torch.int64, logits.device)
    logprobs = torch.log_softmax(logits.index_select(0, index).float(), dim=-1)
    own = logprobs.gather(1, tokens.index_select(0, index)[:, None])[:, 0]
    values, ids = logprobs.topk(min(max(counts), logits.shape[1]), dim=-1)
    host = fetch(tokens, torch.isfinite(best), own, values, ids)
    found, sound, own, values, ids = host
    said: dict[int, tuple[Logprobs, ...]] = {}
    for number, (row, count) in enumerate(zip(asked, counts, strict=True)):
        top = tuple(map(TokenLogprob, ids[number, :count].tolist(), values[number, :count].tolist()))
        said[row] = ((TokenLogprob(int(found[row]), float(own[number])), top),)
    return [
        Pick(token, is_sound, said.get(row, ()))
        for row, (token, is_sound) in enumerate(zip(found.tolist(), sound.tolist(), strict=True))
    ]


def _rows(logits: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """A float32 copy of some rows."""
    return logits.index_select(0, send(rows, torch.int64, logits.device)).float()


def _choose(logits: torch.Tensor, drafts: Sequence[Draft]) -> torch.Tensor:
    """Tokens [rows] for `logits` [rows, vocabulary], which are overwritten."""
    _adjust(logits, drafts)
    tokens = logits.argmax(dim=-1)
    for is_ranked in (False, True):
        # Which way a row goes depends on its own parameters alone.
        rows = [
            row
            for row, draft in enumerate(drafts)
            if draft.params.temperature > 0 and draft.is_ranked == is_ranked
        ]
        if rows:
            drawn = _draw(_rows(logits, rows), [drafts[row] for row in rows], is_ranked=is_ranked)
            tokens.index_copy_(0, send(rows, torch.int64, logits.device), drawn)
    return tokens


def _adjust(logits: torch.Tensor, drafts: Sequence[Draft]) -> None:
    """Bias and penalties, in place."""
    biases = [
        (row, token, bias)
        for row, draft in enumerate(drafts)
        for token, bias in (draft.params.logit_bias or {}).items()
    ]
    if biases:
        _add(logits, biases)
    repeated = [(row, token) for row, draft in enumerate(drafts) for token in draft.repeated]
    if repeated:
        rows, tokens = zip(*repeated, strict=True)
        at = (send(rows, torch.int64, logits.device), send(tokens, torch.int64, logits.device))
        strengths = [drafts[row].params.repetition_penalty for row in rows]
        strength = send(strengths, logits.dtype, logits.device)
        seen = logits[at]
        logits.index_put_(at, torch.where(seen > 0, seen / strength, seen * strength))
    penalties = [
        (row, token, -draft.params.frequency_penalty * count - draft.params.presence_penalty)
        for row, draft in enumerate(drafts)
        for token, count in draft.counted
    ]
    if penalties:
        _add(logits, penalties)


def _add(logits: torch.Tensor, changes: list[tuple[int, int, float]]) -> None:
    rows, tokens, values = zip(*changes, strict=True)
    at = (send(rows, torch.int64, logits.device), send(tokens, torch.int64, logits.device))
    # No place comes twice, so nothing depends on the order in which the device adds.
    logits.index_put_(at, logits[at] + send(values, logits.dtype, logits.device))


def _draw(logits: torch.Tensor, drafts: Sequence[Draft], *, is_ranked: bool) -> torch.Tensor:
    """Tokens [rows] drawn from `logits` [rows, vocabulary]; `is_ranked` honours top-k and top-p."""
    device = logits.device

    def column(values: list[float]) -> torch.Tensor:
        return send(values, torch.float64, device)[:, None]

    ids: torch.Tensor | None = None
    if is_ranked:
        # All of them, in a stable order: how ties are ranked must not depend on the batch.
        logits, ids = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[1], device=device)
    # Shifted first, so that a tiny temperature cannot overflow.  float64, so that the sum over a large
    # vocabulary keeps the small ones.
    shifted = logits.double() - logits.amax(dim=-1, keepdim=True)
    weights = torch.softmax(shifted / column([draft.params.temperature for draft in drafts]), dim=-1)
    if is_ranked:
        most = column([draft.params.top_k or inf for draft in drafts])
        weights = torch.where(rank < most, weights, 0.0)
        before = weights.cumsum(-1) - weights
        kept = column([draft.params.top_p if draft.params.top_p < 1 else inf for draft in drafts])
        weights = torch.where(before < kept * weights.sum(-1, keepdim=True), weights, 0.0)
    least = column([draft.params.min_p for draft in drafts])
    weights = torch.where(weights >= least * weights.amax(dim=-1, keepdim=True), weights, 0.0)
    sums = weights.cumsum(-1)
    point = column([draft.point for draft in drafts]) * sums[:, -1:]
    # `right` skips entries of weight zero; rounding could still put the point at the very end.  A row
    # that is not finite has no last entry and may say anything that is a token.
    last = torch.where(weights > 0, rank, 0).amax(dim=-1, keepdim=True)
    chosen = torch.minimum(torch.searchsorted(sums, point, right=True), last)
    return (chosen if ids is None else ids.gather(1, chosen))[:, 0]
