"""uvicorn inside the daemon's own loop: no signal handlers, no loop and no log set-up of its own."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

import uvicorn

from shared.errors import InvariantError
from shared.supervisor import Supervisor


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_listening = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals belong to the process entry."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.is_listening.set()


class HttpServer:
    """Serves an ASGI app on a listening socket for the time of an `async with`.

    It answers as soon as the body is entered.  Leaving it closes the listener, lets requests in
    flight end for `grace_s`, then cancels them.  A failure of the server cancels the body.
    """

    def __init__(self, app: Any, listener: socket.socket, *, grace_s: int, **options: Any) -> None:
        """`app` is an ASGI application; `options` go to uvicorn.Config."""
        self._server = _Server(
            uvicorn.Config(
                app,
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=grace_s,
                **options,
            )
        )
        self._listener = listener
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as stack:
            tasks = await stack.enter_async_context(Supervisor())
            serving = tasks.start(self._serve(), name="http server", may_end=True)
            stack.push_async_callback(self._end, serving)
            listening = asyncio.ensure_future(self._server.is_listening.wait())
            try:
                await asyncio.wait((serving, listening), return_when=asyncio.FIRST_COMPLETED)
            finally:
                listening.cancel()
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._stack.__aexit__(kind, error, trace)

    async def _serve(self) -> None:
        try:
            await self._server.serve([self._listener])
        finally:
            # uvicorn leaves its listeners open when it fails, and a loop does not close over them.
            if self._server.started:
                for listening in self._server.servers:
                    listening.close()
        if not self._server.should_exit:
            raise InvariantError("the HTTP server ended while the daemon still needs it")

    async def _end(self, serving: asyncio.Task[None]) -> None:
        self._server.should_exit = True
        await asyncio.wait((serving,))
