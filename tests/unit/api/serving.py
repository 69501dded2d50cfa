"""The API on a real server, over the fake engine and tickets that are counted."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx
import openai
import uvicorn
import uvloop
from prometheus_client import CollectorRegistry

from inferd.api.admission import NotReady, Ticket
from inferd.api.app import Api, create_app
from inferd.api.settings import ApiSettings
from inferd.engine.protocol import Engine
from shared.errors import InvariantError
from shared.ids import Digest, VersionRef, VersionTag

from ..engine.fake_engine import FakeEngine

MODEL = "smollm2"
V1 = VersionTag(VersionRef(MODEL, "v1"), Digest("sha256:" + "1" * 64))
V2 = VersionTag(VersionRef(MODEL, "v2"), Digest("sha256:" + "2" * 64))

T = TypeVar("T")


class CountedAdmission:
    """Admits to `current`; a ticket given back twice, or never taken, raises."""

    def __init__(self, *tags: VersionTag) -> None:
        self.model = MODEL
        self.tags = tags
        self.current: int | None = 0
        self.sessions: list[str | None] = []
        self._changed = threading.Condition()
        self._out: list[Ticket] = []  # compared by identity: equal tickets are different references
        self.taken = 0

    def acquire(self, session_id: str | None) -> Ticket:
        with self._changed:
            if self.current is None:
                raise NotReady("No version of the model serves yet.")
            ticket = Ticket(self.current, self.tags[self.current])
            self.sessions.append(session_id)
            self._out.append(ticket)
            self.taken += 1
            return ticket

    def release(self, ticket: Ticket) -> None:
        with self._changed:
            for at, held in enumerate(self._out):
                if held is ticket:
                    del self._out[at]
                    self._changed.notify_all()
                    return
        raise InvariantError(f"{ticket} is given back but not out")

    def serving(self) -> VersionTag | None:
        return None if self.current is None else self.tags[self.current]

    def resident(self) -> tuple[VersionTag, ...]:
        return self.tags

    @property
    def out(self) -> int:
        with self._changed:
            return len(self._out)

    def wait_none_out(self, timeout_s: float = 10) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: not self._out, timeout_s)


@dataclass
class Served:
    """An API that answers on a TCP port of this host; `call` runs a coroutine on its event loop."""

    api: Api
    engine: Engine
    admission: CountedAdmission
    registry: CollectorRegistry
    port: int
    loop: asyncio.AbstractEventLoop
    server: uvicorn.Server
    thread: threading.Thread
    _clients: list[Any] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def call(self, work: Coroutine[Any, Any, T], timeout_s: float = 20) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout_s)

    def openai(self, **options: Any) -> openai.OpenAI:
        client = openai.OpenAI(base_url=self.url + "/v1", api_key="-", max_retries=0, timeout=20, **options)
        self._clients.append(client)
        return client

    def http(self) -> httpx.Client:
        client = httpx.Client(base_url=self.url, timeout=20, trust_env=False)
        self._clients.append(client)
        return client

    def metric(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, labels) or 0.0

    def stop(self) -> None:
        """Shut the server down, as a signal would, and wait until its loop is closed."""
        self.server.should_exit = True
        self.thread.join(20)
        assert not self.thread.is_alive()

    def connect(self) -> socket.socket:
        """A bare connection, to be dropped in the middle of something."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=20)

    def close(self) -> None:
        for client in self._clients:
            client.close()


def fake_engine(*tags: VersionTag, **options: Any) -> FakeEngine:
    """A started fake engine with a version per slot."""
    engine = FakeEngine(**options)
    engine.start()
    for slot, tag in enumerate(tags):
        engine.build(slot, tag, {}, Path())
    return engine


@contextmanager
def serve(
    engine: Engine,
    admission: CountedAdmission,
    settings: ApiSettings | None = None,
    *,
    send_buffer_bytes: int | None = None,
    grace_s: int = 5,
) -> Iterator[Served]:
    """Serve the API in a thread of its own until the block ends."""
    registry = CollectorRegistry()
    api = create_app(engine, admission, settings or ApiSettings(), registry)
    listener = socket.create_server(("127.0.0.1", 0))
    if send_buffer_bytes is not None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)
    port = listener.getsockname()[1]
    config = uvicorn.Config(
        api, loop="none", http="h11", lifespan="on", log_config=None, timeout_graceful_shutdown=grace_s
    )
    server = uvicorn.Server(config)
    loops: list[asyncio.AbstractEventLoop] = []
    is_started = threading.Event()

    async def run() -> None:
        loops.append(asyncio.get_running_loop())
        loops[0].call_soon(is_started.set)
        await server.serve(sockets=[listener])

    def live() -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # as the daemons do
            runner.run(run())

    thread = threading.Thread(target=live, name="api", daemon=True)
    thread.start()
    if not is_started.wait(20):
        raise InvariantError("the server did not start")
    served = Served(api, engine, admission, registry, port, loops[0], server, thread)
    try:
        yield served
    finally:
        served.close()
        served.stop()
        engine.stop()
        listener.close()
