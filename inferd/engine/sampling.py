"""`Sampler`: the next token of one sequence from its logits.

A sequence draws from its own generator and is sampled on its own row, so that what it was batched with
does not show in its answer.  Order: logit bias, repetition, frequency and presence penalties, then
temperature, top-k, top-p, min-p.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from inferd.engine.protocol import SamplingParams, TokenLogprob


class Sampler:
    """The sampling state of one sequence; survives a preemption as it is."""

    def __init__(self, params: SamplingParams, prompt: Sequence[int]) -> None:
        self.params = params
        self._seen = set(prompt) if params.repetition_penalty != 1.0 else set()
        self._counts: Counter[int] = Counter()
        self._generator = torch.Generator()
        if params.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(params.seed)

    @property
    def is_argmax(self) -> bool:
        """Whether the next token is the largest logit, whatever came before."""
        return self.params.temperature == 0 and not self._has_adjustments

    @property
    def _has_adjustments(self) -> bool:
        params = self.params
        return bool(params.logit_bias) or (
            (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) != (0.0, 0.0, 1.0)
        )

    def choose(self, logits: torch.Tensor) -> int:
        """The next token from float32 `logits` [vocabulary], which stay as they are."""
        if self._has_adjustments:
            logits = self._adjust(logits.clone())
        if self.params.temperature == 0:
            return int(logits.argmax())
        return self._draw(logits)

    def note(self, token: int) -> None:
        """Count a token that was chosen."""
        if self.params.repetition_penalty != 1.0:
            self._seen.add(token)
        if self.params.presence_penalty or self.params.frequency_penalty:
            self._counts[token] += 1

    def _adjust(self, logits: torch.Tensor) -> torch.Tensor:
        params, device = self.params, logits.device
        if params.logit_bias:
            index = torch.tensor(list(params.logit_bias), device=device)
            bias = torch.tensor(list(params.logit_bias.values()), dtype=logits.dtype, device=device)
            logits.index_add_(0, index, bias)
        if self._seen:
            index = torch.tensor(sorted(self._seen), device=device)
            seen = logits[index]
            penalty = params.repetition_penalty
            logits[index] = torch.where(seen > 0, seen / penalty, seen * penalty)
        if self._counts:
            index = torch.tensor(list(self._counts), device=device)
            counts = torch.tensor(list(self._counts.values()), dtype=logits.dtype, device=device)
            logits.index_add_(0, index, -params.frequency_penalty * counts - params.presence_penalty)
        return logits

    def _draw(self, logits: torch.Tensor) -> int:
        params = self.params
        ids: torch.Tensor | None = None
        if 0 < params.top_k < logits.shape[0]:
            logits, ids = logits.topk(params.top_k, sorted=True)
        elif params.top_p < 1:
            logits, ids = logits.sort(descending=True, stable=True)
        # Shifted first, so that a tiny temperature cannot overflow.  float64, so that the sum over a
        # large vocabulary keeps the small ones.
        weights = torch.softmax((logits.double() - logits.max()) / params.temperature, dim=-1)
        if params.top_p < 1:
            weights = torch.where(weights.cumsum(-1) - weights < params.top_p, weights, 0.0)
        if params.min_p > 0:
            weights = torch.where(weights >= params.min_p * weights.max(), weights, 0.0)
        sums = weights.cumsum(-1)
        point = torch.rand((), generator=self._generator, dtype=torch.float64).to(sums.device) * sums[-1]
        # `right` skips entries of weight zero; rounding could still put the point at the very end.
        last = int(weights.nonzero()[-1])
        chosen = min(int(torch.searchsorted(sums, point, right=True)), last)
        return chosen if ids is None else int(ids[chosen])


def logprobs_of(logits: torch.Tensor, token: int, best: int) -> tuple[TokenLogprob, tuple[TokenLogprob, ...]]:
    """Log-probabilities of `token` and of the `best` likeliest, from unadjusted `logits` [vocabulary]."""
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    top: tuple[TokenLogprob, ...] = ()
    if best:
        values, ids = logprobs.topk(min(best, logprobs.shape[0]))
        top = tuple(map(TokenLogprob, ids.tolist(), values.tolist()))
    return TokenLogprob(token, float(logprobs[token])), top
