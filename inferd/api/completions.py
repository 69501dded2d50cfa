"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Final

from inferd.api.endpoint import Answer, GenerationEndpoint
from inferd.api.errors import BadRequest
from inferd.api.exchange import all_versions
from inferd.api.generation import Piece
from inferd.api.metrics import Endpoint
from inferd.api.responses import Envelope, Json, Tags, Usage, completion_logprobs, finish_reason
from inferd.api.sampling import Prompt
from inferd.api.schemas import CompletionRequest
from inferd.engine.protocol import Tokenizer

_KIND: Final = "text_completion"


class CompletionEndpoint(GenerationEndpoint[CompletionRequest]):
    """Continues texts, or lists of token ids."""

    name: ClassVar[Endpoint] = "completions"
    request_type = CompletionRequest

    def prompts(self, request: CompletionRequest, tokenizer: Tokenizer) -> list[Prompt]:
        prompts = [self._prompt(given, bool(request.echo), tokenizer) for given in request.prompt]
        if not all(prompt.token_ids for prompt in prompts):
            message = "The prompt holds no tokens for this model."
            raise BadRequest(message, param="prompt", reason="invalid_value")
        return prompts

    def token_limit(self, request: CompletionRequest) -> int | None:
        return request.max_tokens

    def default_limit(self) -> int | None:
        return self._service.settings.completion_max_tokens

    def logprobs(self, request: CompletionRequest) -> int | None:
        return request.logprobs

    def answer(
        self,
        request: CompletionRequest,
        prompts: list[Prompt],
        tokenizer: Tokenizer,
        tags: Tags,
    ) -> Answer:
        echoed = [prompt.text for prompt in prompts for _ in range(request.choices_per_prompt)]
        return CompletionAnswer(Envelope("cmpl", request.model, tags), request, tokenizer, echoed)

    @staticmethod
    def _prompt(given: str | list[int], is_echoed: bool, tokenizer: Tokenizer) -> Prompt:
        if isinstance(given, str):
            token_ids = tokenizer.encode(given, add_special_tokens=True)
            return Prompt(token_ids, given if is_echoed else "", param="prompt")
        return Prompt(given, tokenizer.decode(given) if is_echoed else "", param="prompt")


class CompletionAnswer:
    """Tells the pieces of a completion request."""

    def __init__(
        self, envelope: Envelope, request: CompletionRequest, tokenizer: Tokenizer, echoed: list[str]
    ) -> None:
        self._envelope = envelope
        self._request = request
        self._tokenizer = tokenizer
        self._echoed = echoed  # per choice
        self._offsets = [0] * len(echoed)  # characters of tokens told, per choice
        self._usage: Json = {"usage": None} if request.includes_usage else {}

    def opening(self) -> list[Json]:
        """One chunk per choice that echoes its prompt."""
        pieces = [Piece(index, text) for index, text in enumerate(self._echoed) if text]
        return [self._envelope.around(_KIND, (self._choice(piece),), **self._usage) for piece in pieces]

    def chunk(self, piece: Piece) -> Json | None:
        if not piece.text and not piece.logprobs and piece.finish is None:
            return None
        more: Json = {"model_version": all_versions(self._envelope.tags)} if piece.finish is not None else {}
        return self._envelope.around(_KIND, (self._choice(piece),), **self._usage, **more)

    def closing(self, usage: Usage) -> Json:
        return self._envelope.around(_KIND, (), usage=usage.as_json())

    def whole(self, pieces: Sequence[Piece], usage: Usage) -> Json:
        choices = [self._choice(piece, self._echoed[piece.index]) for piece in pieces]
        return self._envelope.around(_KIND, choices, usage=usage.as_json())

    def _choice(self, piece: Piece, echoed: str = "") -> Json:
        return {
            "index": piece.index,
            "text": echoed + piece.text,
            "logprobs": self._logprobs(piece),
            "finish_reason": finish_reason(piece.finish),
        }

    def _logprobs(self, piece: Piece) -> Json | None:
        if self._request.logprobs is None or (self._request.stream and not piece.logprobs):
            return None
        told = completion_logprobs(piece.logprobs, self._tokenizer, self._offsets[piece.index])
        self._offsets[piece.index] += sum(len(token) for token in told["tokens"])
        return told
