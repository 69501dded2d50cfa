"""The API as one ASGI application."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ExceptionHandler, Receive, Scope, Send

from inferd.api.admission import Admission
from inferd.api.chat import ChatEndpoint
from inferd.api.completions import CompletionEndpoint
from inferd.api.endpoint import Service
from inferd.api.errors import INTERNAL, BodyTooLarge, Fault, fault_of, shown
from inferd.api.exchange import Frame, json_response
from inferd.api.generation import Generations, Mover
from inferd.api.metrics import ApiMetrics
from inferd.api.models import Models
from inferd.api.settings import ApiSettings
from inferd.engine.protocol import Engine
from shared.errors import ChangeoverError
from shared.ids import VersionTag


class Api:
    """An ASGI application that answers as OpenAI's API does, from the versions that `admission` admits.

    Serve it with `timeout_graceful_shutdown` set: the order of a shutdown is `drain`, then the server,
    then the engine, whose last outputs give the last tickets back.
    """

    def __init__(
        self, app: Starlette, generations: Generations, admission: Admission, metrics: ApiMetrics
    ) -> None:
        self._frame = Frame(app, admission, metrics)
        self._generations = generations
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._frame(scope, receive, send)

    async def drain(self, deadline_s: float) -> int:
        """Refuse new requests and wait for those that run; after `deadline_s` end the rest with an error.
        Returns how many those were."""
        return await self._generations.drain(deadline_s)

    def move(self, tag: VersionTag, mover: Mover) -> int:
        """After a flip: let every request that runs on `tag` go on with the version that serves now, by
        calling `mover` with each sequence's id and its new slot.  Returns how many were moved; their
        answers name both versions.  On the loop's thread; raises NotReady."""
        return self._generations.move(tag, mover)

    def abort(self, tag: VersionTag) -> int:
        """End every request on `tag` with an error that its client sees, and return how many.  On the
        loop's thread."""
        return self._generations.abort(tag)

    @property
    def running(self) -> int:
        """Requests that have a ticket and have not been answered in full."""
        return self._generations.running

    def forget_version(self, tag: VersionTag) -> None:
        """Drop the metrics of a retired version.  Any thread."""
        self._metrics.forget_version(tag)


def create_app(
    engine: Engine,
    admission: Admission,
    settings: ApiSettings,
    registry: CollectorRegistry,
    sequence_ids: Iterator[int] | None = None,
) -> Api:
    """The API over `engine`.  Whoever else submits to the same engine shares `sequence_ids`, which must
    not yield 0."""
    metrics = ApiMetrics(registry)
    generations = Generations(engine, admission, metrics, sequence_ids)
    service = Service(generations, admission.model, settings, metrics)
    models = Models(admission)
    app = Starlette(
        routes=[
            Route("/v1/models", models.listing),
            Route("/v1/models/{model:path}", models.one),
            Route("/v1/chat/completions", ChatEndpoint(service), methods=["POST"]),
            Route("/v1/completions", CompletionEndpoint(service), methods=["POST"]),
        ],
        exception_handlers=_Faults(settings).handlers(),
    )
    app.router.redirect_slashes = False
    return Api(app, generations, admission, metrics)


class _Faults:
    """Turns errors into responses; those that are nobody's fault but ours are logged by the server."""

    def __init__(self, settings: ApiSettings) -> None:
        self._retry_after = {"retry-after": str(math.ceil(settings.retry_after_s))}

    def handlers(self) -> dict[Any, ExceptionHandler]:
        return {HTTPException: self._routing, ChangeoverError: self._error, Exception: self._error}

    async def _error(self, request: Request, error: Exception) -> Response:
        del request
        fault = fault_of(error) if isinstance(error, ChangeoverError) else INTERNAL
        headers = dict(self._retry_after) if fault.may_retry else {}
        if isinstance(error, BodyTooLarge):
            # What is left of the body is not read, so the connection cannot be used again.
            headers["connection"] = "close"
        return json_response(fault.body(), fault.status, headers)

    async def _routing(self, request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 404
        headers = error.headers if isinstance(error, HTTPException) else None
        where = shown(request.url.path)
        if status == 405:
            code, message = "method_not_allowed", f"{request.method} is not allowed on {where}."
        else:
            code, message = "unknown_url", f"Invalid URL ({request.method} {where})."
        fault = Fault(status, "invalid_request_error", message, None, code)
        return json_response(fault.body(), status, headers)
