"""What is true of every request, whatever answers it: an id, a version, a count, and errors of one shape."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, cast

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from inferd.api.admission import Admission
from inferd.api.metrics import ApiMetrics, Endpoint, Outcome
from shared.ids import VersionTag

_SCOPE_KEY: Final = "changeover.exchange"
_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,128}")


@dataclass(slots=True)
class Exchange:
    """One request and what has been said to it so far."""

    request_id: str
    endpoint: Endpoint = "other"
    tags: Sequence[VersionTag] = ()  # the versions that answer, once there is a ticket
    status: int | None = None  # once the headers were sent
    outcome: Outcome | None = None  # where the status does not tell

    @classmethod
    def of(cls, scope: Scope) -> Exchange:
        """The exchange that `Frame` put into `scope`."""
        return cast(Exchange, scope[_SCOPE_KEY])


class Frame:
    """Puts `x-request-id` and `x-model-version` on every response of `app`, and counts it.

    A client's own `x-request-id` is kept if it is harmless in a header and in a log."""

    def __init__(self, app: ASGIApp, admission: Admission, metrics: ApiMetrics) -> None:
        self._app = app
        self._admission = admission
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = scope[_SCOPE_KEY] = Exchange(_request_id(Headers(scope=scope)))

        async def framed(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                message["headers"] = [*message.get("headers", ()), *self._headers(exchange)]
            await send(message)

        try:
            await self._app(scope, receive, framed)
        finally:
            tag = exchange.tags[-1] if exchange.tags else None
            self._metrics.answered(exchange.endpoint, _outcome(exchange), tag)

    def _headers(self, exchange: Exchange) -> list[tuple[bytes, bytes]]:
        headers = [(b"x-request-id", exchange.request_id.encode("ascii"))]
        serving = self._admission.serving()
        tags = exchange.tags or (() if serving is None else (serving,))
        if tags:
            headers.append((b"x-model-version", all_versions(tags).encode("ascii")))
        return headers


def _request_id(headers: Headers) -> str:
    given = headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else f"req-{uuid.uuid4().hex}"


def all_versions(tags: Sequence[VersionTag]) -> str:
    """`v7@sha256:…`, or several in the order in which they answered."""
    return ", ".join(map(str, tags))


def _outcome(exchange: Exchange) -> Outcome:
    if exchange.outcome is not None:
        return exchange.outcome
    match exchange.status:
        case None:
            return "5xx"
        case status if status < 400:
            return "2xx"
        case status if status < 500:
            return "4xx"
        case _:
            return "5xx"


def to_json(content: Mapping[str, object]) -> bytes:
    """`content` as compact JSON in UTF-8; NaN and infinities are errors."""
    return json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def json_response(
    content: Mapping[str, object], status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """A whole response."""
    return Response(to_json(content), status, headers, media_type="application/json")
