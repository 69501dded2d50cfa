"""What answers look like: OpenAI's objects, as plain dicts."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from inferd.api.generation import Logprobs, Piece
from inferd.engine.protocol import FinishReason, Tokenizer, TokenLogprob
from shared.ids import VersionTag

Json = dict[str, Any]

Tags = Sequence[VersionTag]
"""The versions that answer a request, oldest first; grows when it is moved to another one."""

_FLOOR: Final = -9999.0
"""What OpenAI writes for a logarithm of zero, which JSON cannot hold."""

_REPLACEMENT: Final = "\ufffd"


@dataclass(slots=True)
class Usage:
    """Tokens of one request.  A prompt counts once, however many choices continue it."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0

    def add(self, piece: Piece, choices_per_prompt: int) -> None:
        """Count `piece`; the prefix cache counts for a prompt's first choice, since the others find what
        that one put there."""
        self.completion_tokens += len(piece.token_ids)
        if piece.index % choices_per_prompt == 0:
            self.cached_tokens += piece.cached_tokens

    def as_json(self) -> Json:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(frozen=True, slots=True)
class Envelope:
    """What every object of one answer carries."""

    prefix: str  # of the id
    model: str
    tags: Tags
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def around(self, kind: str, choices: Sequence[Json], **more: object) -> Json:
        return {
            "id": f"{self.prefix}-{self.id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": str(self.tags[-1]),
            "choices": list(choices),
            **more,
        }


def finish_reason(finish: FinishReason | None) -> str | None:
    """As OpenAI spells it; a sequence that failed has no choice to put it in."""
    return None if finish is None else finish.value


def chat_logprobs(logprobs: Logprobs, tokenizer: Tokenizer) -> Json:
    """The `logprobs` of a chat choice."""
    content = [
        {**_token(chosen, tokenizer), "top_logprobs": [_token(other, tokenizer) for other in best]}
        for chosen, best in logprobs
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(logprobs: Logprobs, tokenizer: Tokenizer, offset: int) -> Json:
    """The `logprobs` of a completion choice whose tokens start at `offset` characters of its text."""
    tokens: list[str] = []
    offsets: list[int] = []
    for chosen, _ in logprobs:
        tokens.append(tokenizer.decode([chosen.token_id]))
        offsets.append(offset)
        offset += len(tokens[-1])
    return {
        "tokens": tokens,
        "token_logprobs": [_finite(chosen.logprob) for chosen, _ in logprobs],
        "top_logprobs": [
            {tokenizer.decode([one.token_id]): _finite(one.logprob) for one in (*best, chosen)}
            for chosen, best in logprobs
        ],
        "text_offset": offsets,
    }


def _token(entry: TokenLogprob, tokenizer: Tokenizer) -> Json:
    text = tokenizer.decode([entry.token_id])
    # A token that is a part of a character has no text of its own, and its bytes are not known here.
    is_whole = _REPLACEMENT not in text
    return {
        "token": text,
        "logprob": _finite(entry.logprob),
        "bytes": list(text.encode()) if is_whole else None,
    }


def _finite(logprob: float) -> float:
    return max(logprob, _FLOOR)
