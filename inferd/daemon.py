"""inferd put together: engine, slots, link to loaderd, HTTP API and health."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import assert_never

import structlog

from inferd.api.app import Api, create_app
from inferd.config import InferdConfig
from inferd.engine.protocol import Engine
from inferd.engine.transformers_engine import TransformersEngine
from inferd.link import Identity, LoaderdLink
from inferd.metrics import InferdMetrics
from inferd.preparation import Preparer
from inferd.slots import Slots
from shared.errors import ConfigError, ResourceError
from shared.gate import Gate
from shared.health import HealthServer, LoopPulse
from shared.heap import freeze_heap
from shared.http_server import HttpServer
from shared.ids import VersionTag
from shared.logs import route_library_logs
from shared.memory.selection import choose_device, open_backend
from shared.messages import InFlight
from shared.metrics import loop_lag_histogram, new_registry
from shared.notify import Notifier
from shared.progress import Progress
from shared.run_dir import RunDir
from shared.supervisor import Stop, Supervisor
from shared.unix_listener import UnixListener
from shared.verdict import OK, Verdict, combine

log = structlog.get_logger(__name__)

API_SOCKET_MODE = 0o666

UNLOAD_WITHIN_S = 30.0
"""What a shutdown takes beyond waiting for requests; systemd is told to be that patient."""


class ProgressWatch:
    """Whether an engine that has work makes steps; observed with each beat of the loop's pulse."""

    def __init__(self, engine: Engine, limit_s: float) -> None:
        self._engine = engine
        self._limit_s = limit_s
        self._progress = Progress(has_work=False, steps=0, since_ns=time.monotonic_ns())

    def observe(self, now_ns: int) -> None:
        """Look at the engine's counters."""
        load = self._engine.load()
        self._progress = self._progress.observe(load.running + load.waiting > 0, load.steps, now_ns)

    def verdict(self) -> Verdict:
        """Not well while work is pending and no step was made for too long."""
        if not self._progress.is_stuck(time.monotonic_ns(), self._limit_s):
            return OK
        return Verdict(False, f"requests are pending and no step was made for {self._limit_s:g} s")


async def serve(config: InferdConfig, stop: Stop) -> None:
    """Run inferd until `stop`: refuse, drain, unload, in that order."""
    run_dir = RunDir(config.run_dir)
    registry = new_registry("inferd")
    backend = open_backend(config.backend)
    device = choose_device(backend, config.device)
    backend.free_bytes(device)  # a GPU's context takes 0.2 s to make: now, not in the first prepare
    engine = TransformersEngine(config.engine.settings())
    route_library_logs()
    watch = ProgressWatch(engine, config.stuck_after_s)
    pulse = LoopPulse(observe_lag=loop_lag_histogram(registry).observe, on_beat=watch.observe)
    async with AsyncExitStack() as stack:
        notifier = stack.enter_context(Notifier.from_environment())
        stack.enter_context(run_dir.only_daemon(f"inferd-{config.name}"))
        supervisor = await stack.enter_async_context(Supervisor())
        engine.start()
        stack.callback(engine.stop)
        notices = _Notices(notifier)
        slots = Slots(config.model, notices.slots_changed, notices.version_retired)
        gate = Gate()
        preparer = Preparer(slots, engine, backend, gate, verify_mapped=config.verify_mapped)
        api = create_app(engine, slots, config.api.settings(), registry)
        link = LoaderdLink(
            Identity(config.name, config.model, device),
            run_dir.handoff,
            slots,
            preparer,
            engine,
            backend,
            lambda policy, before: _turn_requests(policy, before, api, engine),
            gate,
        )
        notices.connect(slots, link, api)
        InferdMetrics(registry, engine, slots, link)

        def live() -> Verdict:
            return combine({"loop": pulse.verdict(), "engine": watch.verdict()})

        def ready() -> Verdict:
            return combine({"live": live(), "version": slots.verdict()})

        listener = stack.enter_context(_listen(config.listen))
        health = HealthServer(run_dir.inferd_health(config.name), live, ready, registry)
        await stack.enter_async_context(health)
        server = HttpServer(api, listener, grace_s=int(config.shutdown_timeout_s) + 1, lifespan="off")
        freeze_heap(registry)  # before there are weights
        async with AsyncExitStack() as serving:
            await serving.enter_async_context(server)
            supervisor.start(pulse.run(), name="pulse")
            link_task = supervisor.start(link.run(), name="link", may_end=True)
            supervisor.start(notifier.feed_watchdog(lambda: live().is_ok), name="watchdog")
            log.info("inferd.started", name=config.name, model=config.model, listen=config.listen)
            notifier.ready(notices.status())
            reason = await stop.wait()
            notifier.stopping(f"stopping: {reason}")
            notifier.extend_timeout(config.shutdown_timeout_s + UNLOAD_WITHIN_S)
            slots.stop_admitting()
            cut_off = await api.drain(config.shutdown_timeout_s)
            log.info("inferd.drained", cut_off=cut_off)
        await preparer.close()
        link_task.cancel()
        await asyncio.wait((link_task,))
        engine.stop()
        await preparer.shut_down()


def _turn_requests(policy: InFlight, before: VersionTag, api: Api, engine: Engine) -> int:
    """Carry out an in-flight policy for the requests that run on `before`; returns how many it concerned."""
    match policy:
        case "finish":
            return 0
        case "switch":
            return api.move(before, lambda sequence, slot: engine.move(sequence, slot, keep_kv=True))
        case "restart":
            return api.move(before, lambda sequence, slot: engine.move(sequence, slot, keep_kv=False))
        case "abort":
            return api.abort(before)
        case _:
            assert_never(policy)


class _Notices:
    """Who hears of changed slots: loaderd through the link, systemd's status line, the metrics."""

    def __init__(self, notifier: Notifier) -> None:
        self._notifier = notifier
        self._slots: Slots | None = None
        self._link: LoaderdLink | None = None
        self._api: Api | None = None

    def connect(self, slots: Slots, link: LoaderdLink, api: Api) -> None:
        """From here on changes are passed on."""
        self._slots, self._link, self._api = slots, link, api

    def version_retired(self, tag: VersionTag) -> None:
        """A version is no longer mapped."""
        if self._api is not None:
            self._api.forget_version(tag)

    def slots_changed(self) -> None:
        """A slot changed its state."""
        if self._link is not None:
            self._link.slots_changed()
        self._notifier.status(self.status())

    def status(self) -> str:
        """One line for `systemctl status`."""
        serving = self._slots.serving() if self._slots is not None else None
        return f"serving {serving}" if serving is not None else "waiting for a version"


@contextmanager
def _listen(address: str) -> Iterator[socket.socket]:
    """The API's listening socket, on a Unix path or a TCP address."""
    if address.startswith("unix:"):
        with UnixListener(Path(address.removeprefix("unix:")), mode=API_SOCKET_MODE) as listener:
            yield listener.socket
        return
    host, _, port = address.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
        family, kind, protocol, _, where = found[0]
    except (OSError, OverflowError, UnicodeError) as error:  # UnicodeError: no such name can be
        raise ConfigError(f"listen = {address!r}: {error}") from error
    with socket.socket(family, kind | socket.SOCK_CLOEXEC, protocol) as listener_socket:
        listener_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener_socket.bind(where)
            listener_socket.listen(1024)
        except OSError as error:
            raise ResourceError(f"cannot listen on {address}: {error.strerror}", listen=address) from error
        listener_socket.setblocking(False)
        yield listener_socket
