"""From a request's body to its last byte, for every endpoint that generates."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, Generic, Protocol, TypeVar

import structlog
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from inferd.api.connection import ClientGone, read_body, while_connected
from inferd.api.errors import (
    CONTEXT_LENGTH_EXCEEDED,
    BadRequest,
    GenerationAborted,
    GenerationFailed,
    ModelNotFound,
    fault_of,
)
from inferd.api.exchange import Exchange, all_versions, json_response, to_json
from inferd.api.generation import Generation, Generations, Piece
from inferd.api.metrics import ApiMetrics, Endpoint
from inferd.api.responses import Json, Tags, Usage
from inferd.api.sampling import Prompt, sampling_params
from inferd.api.schemas import SESSION_ID, GenerationRequest, parse_request
from inferd.api.settings import ApiSettings
from inferd.engine.protocol import SamplingParams, Tokenizer
from shared.errors import ChangeoverError

_log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

_PARSE_APART_BYTES: Final = 64 * 1024
"""A body longer than this is parsed on another thread, so that other requests' streams go on."""

R = TypeVar("R", bound=GenerationRequest)


class Answer(Protocol):
    """How the pieces of one request are told to its client."""

    def opening(self) -> list[Json]:
        """The chunks that start a stream."""
        ...

    def chunk(self, piece: Piece) -> Json | None:
        """The chunk for what a choice gained; None when there is nothing to tell yet."""
        ...

    def closing(self, usage: Usage) -> Json:
        """The chunk with the usage, after all choices."""
        ...

    def whole(self, pieces: Sequence[Piece], usage: Usage) -> Json:
        """The answer to a request that does not stream; one piece per choice."""
        ...


@dataclass(frozen=True, slots=True)
class Service:
    """What every endpoint of the API works with."""

    generations: Generations
    model: str
    settings: ApiSettings
    metrics: ApiMetrics


class GenerationEndpoint(ABC, Generic[R]):
    """An ASGI application for one endpoint; a subclass knows its dialect."""

    name: ClassVar[Endpoint]
    request_type: type[R]

    def __init__(self, service: Service) -> None:
        self._service = service

    @abstractmethod
    def prompts(self, request: R, tokenizer: Tokenizer) -> list[Prompt]:
        """The request's prompts as tokens.  Runs on a thread of its own; raises CallerError."""

    @abstractmethod
    def token_limit(self, request: R) -> int | None:
        """Tokens that the client allows for each choice, None without a limit of its own."""

    @abstractmethod
    def default_limit(self) -> int | None:
        """The limit where the client gives none; None is as many as fit."""

    @abstractmethod
    def logprobs(self, request: R) -> int | None:
        """How many alternatives are wanted per token, None without logprobs."""

    @abstractmethod
    def answer(self, request: R, prompts: list[Prompt], tokenizer: Tokenizer, tags: Tags) -> Answer:
        """What tells the pieces to the client."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange.of(scope)
        exchange.endpoint = self.name
        try:
            body = await read_body(scope, receive, self._service.settings.max_body_bytes)
            if len(body) <= _PARSE_APART_BYTES:
                request = parse_request(self.request_type, body)
            else:
                request = await asyncio.to_thread(parse_request, self.request_type, body)
            if request.model != self._service.model:
                raise ModelNotFound(request.model)
            self._check_count(request)
            session_id = _session_id(request, Headers(scope=scope))
            await while_connected(receive, self._run(request, session_id, exchange, send))
        except ClientGone:
            exchange.outcome = "disconnected"

    async def _run(self, request: R, session_id: str | None, exchange: Exchange, send: Send) -> None:
        async with self._service.generations.open(self.name, session_id) as generation:
            exchange.tags = generation.tags
            prompts = await asyncio.to_thread(self.prompts, request, generation.tokenizer)
            sequences = self._sequences(request, prompts, generation.max_model_len)
            generation.submit(sequences, self._service.generations.sequence_ids)
            usage = Usage(sum(len(prompt.token_ids) for prompt in prompts))
            self._service.metrics.tokens("prompt", usage.prompt_tokens, generation.tag)
            answer = self.answer(request, prompts, generation.tokenizer, generation.tags)
            if request.stream:
                await _stream(request, generation, answer, usage, exchange, send)
            else:
                response = json_response(await _whole(request, generation, answer, usage, exchange))
                await send({"type": "http.response.start", "status": 200, "headers": response.raw_headers})
                await send({"type": "http.response.body", "body": response.body})

    def _check_count(self, request: R) -> None:
        prompts, choices = request.prompt_count, request.choices_per_prompt
        most = self._service.settings.max_sequences_per_request
        if prompts * choices > most:
            message = f"{prompts} prompts times 'n' = {choices} exceed {most} choices per request."
            raise BadRequest(message, param="n", reason="invalid_value")

    def _sequences(
        self, request: R, prompts: list[Prompt], max_model_len: int
    ) -> list[tuple[list[int], SamplingParams]]:
        sequences: list[tuple[list[int], SamplingParams]] = []
        for prompt in prompts:
            limit = self._limit(request, len(prompt.token_ids), max_model_len, prompt.param)
            for choice in range(request.choices_per_prompt):
                params = sampling_params(request, choice, max_tokens=limit, logprobs=self.logprobs(request))
                sequences.append((prompt.token_ids, params))
        return sequences

    def _limit(self, request: R, prompt_tokens: int, max_model_len: int, param: str) -> int:
        room = max_model_len - prompt_tokens
        wanted = self.token_limit(request)
        if room < 1 or (wanted is not None and wanted > room):
            asked = f"{prompt_tokens} in the prompt" + (f", {wanted} for the completion" if wanted else "")
            message = (
                f"This model's maximum context length is {max_model_len} tokens; the request has {asked}."
            )
            raise BadRequest(message, param=param, reason=CONTEXT_LENGTH_EXCEEDED)
        default = self.default_limit()
        if wanted is not None:
            return wanted
        return room if default is None else min(default, room)


async def _whole(
    request: GenerationRequest, generation: Generation, answer: Answer, usage: Usage, exchange: Exchange
) -> Json:
    parts: dict[int, list[Piece]] = {}
    try:
        while not generation.is_finished:
            for piece in await generation.take():
                usage.add(piece, request.choices_per_prompt)
                parts.setdefault(piece.index, []).append(piece)
    except GenerationFailed as error:
        _log_failure(error, exchange)
        raise
    pieces = [Piece.joined(index, parts[index]) for index in sorted(parts)]
    return answer.whole(pieces, usage)


async def _stream(
    request: GenerationRequest,
    generation: Generation,
    answer: Answer,
    usage: Usage,
    exchange: Exchange,
    send: Send,
) -> None:
    headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await _send_events(send, answer.opening())
    try:
        while not generation.is_finished:
            pieces = await generation.take()
            for piece in pieces:
                usage.add(piece, request.choices_per_prompt)
            chunks = [chunk for piece in pieces if (chunk := answer.chunk(piece)) is not None]
            await _send_events(send, chunks)
    except (GenerationFailed, GenerationAborted) as error:
        exchange.outcome = "interrupted"
        _log_failure(error, exchange)
        await _send_events(send, [fault_of(error).body()])
    else:
        if request.includes_usage:
            await _send_events(send, [answer.closing(usage)])
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": True})
    await send({"type": "http.response.body", "body": b""})


async def _send_events(send: Send, contents: Sequence[Json]) -> None:
    if contents:
        body = b"".join(b"data: " + to_json(content) + b"\n\n" for content in contents)
        await send({"type": "http.response.body", "body": body, "more_body": True})


def _session_id(request: GenerationRequest, headers: Headers) -> str | None:
    given = headers.get("x-session-id")
    if given is None:
        return request.session_id
    if SESSION_ID.fullmatch(given) is None:
        raise BadRequest(
            "The header x-session-id holds 1 to 128 visible ASCII characters.", param="session_id"
        )
    if request.session_id not in (None, given):
        raise BadRequest("'session_id' and the header x-session-id differ.", param="session_id")
    return given


def _log_failure(error: ChangeoverError, exchange: Exchange) -> None:
    _log.error(
        error.code,
        error=error.message,
        request_id=exchange.request_id,
        endpoint=exchange.endpoint,
        version=all_versions(exchange.tags),
    )
