"""Liveness, readiness and metrics over HTTP on a Unix socket.

    curl --unix-socket /run/changeover/inferd-a.health.sock 'http://localhost/readyz?verbose'

The handlers run in the daemon's own loop, so a loop that hangs answers nothing: give probes a time
limit.  systemd's watchdog, fed from the same loop, ends such a process.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from shared.http_server import HttpServer
from shared.progress import NS_PER_S
from shared.unix_listener import UnixListener
from shared.verdict import OK, Verdict

SOCKET_MODE = 0o666
"""Whoever may enter the directory may look: there is nothing here to change and nothing secret."""

CONNECTIONS = 64
"""Connections at a time; more are closed at once, so that idle ones cannot use up the daemon's fds."""

CONNECTION_S = 30.0
"""Longest life of a connection, answered or not."""

_PATHS = {
    "/livez": "200 while the process works, 503 when a restart would help",
    "/readyz": "200 while requests are welcome",
    "/metrics": "Prometheus metrics",
}
_NO_STORE = {"cache-control": "no-store"}


class LoopPulse:
    """Stamps the time every INTERVAL_S from a task of the loop.

    A young stamp shows that timers run; while the loop hangs nobody can ask.  After a hang the
    first answer may still say so.
    """

    INTERVAL_S = 0.25

    def __init__(
        self,
        *,
        limit_s: float = 5.0,
        on_beat: Callable[[int], None] | None = None,
        observe_lag: Callable[[float], object] | None = None,
    ) -> None:
        """`on_beat` gets the monotonic time in ns of each beat, `observe_lag` how late it came in s."""
        self._limit_s = limit_s
        self._on_beat = on_beat
        self._observe_lag = observe_lag
        self._last_ns = time.monotonic_ns()

    async def run(self) -> None:
        """Beat until cancelled."""
        while True:
            before_ns = time.monotonic_ns()
            await asyncio.sleep(self.INTERVAL_S)
            self._last_ns = time.monotonic_ns()
            if self._observe_lag is not None:
                self._observe_lag(max(0.0, (self._last_ns - before_ns) / NS_PER_S - self.INTERVAL_S))
            if self._on_beat is not None:
                self._on_beat(self._last_ns)

    def verdict(self, now_ns: int | None = None) -> Verdict:
        """Well while the last beat is younger than the limit; `now_ns` is the monotonic clock's."""
        now = time.monotonic_ns() if now_ns is None else now_ns
        age_s = (now - self._last_ns) / NS_PER_S
        details = {"age_s": round(age_s, 3), "limit_s": self._limit_s}
        if age_s < self._limit_s:
            return Verdict(True, details=details)
        return Verdict(False, f"the event loop has not turned for {age_s:.1f} s", details)


class HealthServer:
    """Serves `/livez`, `/readyz` and `/metrics` on the Unix socket `path` during an `async with`.

    `live` and `ready` are called in the loop for each request and must not block; what they raise
    gives a 500, which no prober takes for health.  The socket file is removed at the end.  Entering
    raises ResourceError if another process serves the path.
    """

    def __init__(
        self,
        path: Path,
        live: Callable[[], Verdict],
        ready: Callable[[], Verdict],
        registry: CollectorRegistry,
        *,
        socket_mode: int = SOCKET_MODE,
    ) -> None:
        self._path = path
        self._socket_mode = socket_mode
        self._app = _health_app(live, ready, registry)
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            listener = stack.enter_context(UnixListener(self._path, mode=self._socket_mode))
            server = HttpServer(
                self._app, listener.socket, grace_s=1, http=_BoundedConnection, ws="none", lifespan="off"
            )
            await stack.enter_async_context(server)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._stack.__aexit__(kind, error, trace)


class _BoundedConnection(H11Protocol):
    """A connection that ends after CONNECTION_S, and at once if there are CONNECTIONS already."""

    _end: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > CONNECTIONS:
            transport.abort()
            return
        self._end = asyncio.get_running_loop().call_later(CONNECTION_S, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._end is not None:
            self._end.cancel()
        super().connection_lost(exc)


def _health_app(
    live: Callable[[], Verdict], ready: Callable[[], Verdict], registry: CollectorRegistry
) -> Starlette:
    async def livez(request: Request) -> Response:
        return _answer(live(), "verbose" in request.query_params)

    async def readyz(request: Request) -> Response:
        return _answer(ready(), "verbose" in request.query_params)

    async def metrics(request: Request) -> Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry), headers={**_NO_STORE, "content-type": content_type})

    async def index(_request: Request) -> Response:
        return JSONResponse({"paths": _PATHS}, headers=_NO_STORE)

    return Starlette(
        routes=[
            Route("/", index),
            Route("/livez", livez),
            Route("/readyz", readyz),
            Route("/metrics", metrics),
        ]
    )


def _answer(verdict: Verdict, is_verbose: bool) -> JSONResponse:
    body = _verdict_body(verdict)
    if is_verbose and verdict.checks:
        body["checks"] = [{"name": name, **_verdict_body(part)} for name, part in verdict.checks]
    return JSONResponse(body, status_code=200 if verdict.is_ok else 503, headers=_NO_STORE)


def _verdict_body(verdict: Verdict) -> dict[str, Any]:
    body: dict[str, Any] = {"status": "ok" if verdict.is_ok else "unavailable"}
    if verdict.reason:
        body["reason"] = verdict.reason
    if verdict.details:
        body["details"] = dict(verdict.details)
    return body


__all__ = ["OK", "HealthServer", "LoopPulse", "Verdict"]
