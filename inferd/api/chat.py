"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Final

from inferd.api.endpoint import Answer, GenerationEndpoint
from inferd.api.exchange import all_versions
from inferd.api.generation import Piece
from inferd.api.metrics import Endpoint
from inferd.api.responses import Envelope, Json, Tags, Usage, chat_logprobs, finish_reason
from inferd.api.sampling import Prompt
from inferd.api.schemas import ChatRequest, Message
from inferd.engine.protocol import Tokenizer

_CHUNK: Final = "chat.completion.chunk"


class ChatEndpoint(GenerationEndpoint[ChatRequest]):
    """Answers a conversation with its next message."""

    name: ClassVar[Endpoint] = "chat"
    request_type = ChatRequest

    def prompts(self, request: ChatRequest, tokenizer: Tokenizer) -> list[Prompt]:
        return [Prompt(tokenizer.apply_chat_template([_for_template(one) for one in request.messages]))]

    def token_limit(self, request: ChatRequest) -> int | None:
        return request.token_limit

    def default_limit(self) -> int | None:
        return None

    def logprobs(self, request: ChatRequest) -> int | None:
        return (request.top_logprobs or 0) if request.logprobs else None

    def answer(self, request: ChatRequest, prompts: list[Prompt], tokenizer: Tokenizer, tags: Tags) -> Answer:
        del prompts  # a chat does not echo
        return ChatAnswer(Envelope("chatcmpl", request.model, tags), request, tokenizer)


class ChatAnswer:
    """Tells the pieces of a chat request."""

    def __init__(self, envelope: Envelope, request: ChatRequest, tokenizer: Tokenizer) -> None:
        self._envelope = envelope
        self._request = request
        self._tokenizer = tokenizer
        self._usage: Json = {"usage": None} if request.includes_usage else {}

    def opening(self) -> list[Json]:
        """One chunk per choice that says who speaks."""
        delta = {"role": "assistant", "content": ""}
        return [self._chunk(index, delta) for index in range(self._request.choices_per_prompt)]

    def chunk(self, piece: Piece) -> Json | None:
        if not piece.text and not piece.logprobs and piece.finish is None:
            return None
        delta = {"content": piece.text} if piece.text or piece.logprobs else {}
        more: Json = {"model_version": all_versions(self._envelope.tags)} if piece.finish is not None else {}
        return self._chunk(piece.index, delta, piece, **more)

    def closing(self, usage: Usage) -> Json:
        return self._envelope.around(_CHUNK, (), usage=usage.as_json())

    def whole(self, pieces: Sequence[Piece], usage: Usage) -> Json:
        choices = [
            {
                "index": piece.index,
                "message": {"role": "assistant", "content": piece.text, "refusal": None},
                "logprobs": self._logprobs(piece),
                "finish_reason": finish_reason(piece.finish),
            }
            for piece in pieces
        ]
        return self._envelope.around("chat.completion", choices, usage=usage.as_json())

    def _chunk(self, index: int, delta: Json, piece: Piece | None = None, **more: object) -> Json:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": None if piece is None else self._logprobs(piece),
            "finish_reason": None if piece is None else finish_reason(piece.finish),
        }
        return self._envelope.around(_CHUNK, (choice,), **self._usage, **more)

    def _logprobs(self, piece: Piece) -> Json | None:
        if not self._request.logprobs or (self._request.stream and not piece.logprobs):
            return None
        return chat_logprobs(piece.logprobs, self._tokenizer)


def _for_template(message: Message) -> dict[str, object]:
    # Chat templates of open models know the role only under its older name.
    role = "system" if message.role == "developer" else message.role
    return {"role": role, "content": message.text}
