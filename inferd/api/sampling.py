"""From what a client asks for to what the engine is told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeVar

from inferd.api.schemas import GenerationRequest
from inferd.engine.protocol import SamplingParams

_GREEDY_BELOW: Final = 1e-4
"""Logits divided by less than this overflow; the best token wins in any case."""

_LEAST_TOP_P: Final = 1e-9

N = TypeVar("N", int, float)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as the version's tokenizer reads it."""

    token_ids: list[int]
    text: str = ""  # what `echo` gives back
    param: str = "messages"  # where it came from


def sampling_params(
    request: GenerationRequest, choice: int, *, max_tokens: int, logprobs: int | None
) -> SamplingParams:
    """How to sample choice number `choice` of a prompt.  With a seed, each choice has its own."""
    temperature = _or(request.temperature, 1.0)
    bias = None
    if request.logit_bias:
        bias = {int(token_id): value for token_id, value in request.logit_bias.items()}
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature if temperature >= _GREEDY_BELOW else 0.0,
        top_p=max(_or(request.top_p, 1.0), _LEAST_TOP_P),
        top_k=max(_or(request.top_k, 0), 0),  # -1 is off too
        min_p=_or(request.min_p, 0.0),
        presence_penalty=_or(request.presence_penalty, 0.0),
        frequency_penalty=_or(request.frequency_penalty, 0.0),
        repetition_penalty=_or(request.repetition_penalty, 1.0),
        seed=None if request.seed is None else (request.seed + choice) % 2**63,
        stop=tuple(request.stop or ()),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        ignore_eos=bool(request.ignore_eos),
        logprobs=logprobs,
        logit_bias=bias,
    )


def _or(value: N | None, default: N) -> N:
    return default if value is None else value
