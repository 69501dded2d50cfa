"""A host with loaderd and inferds in a private run directory, and ways to ask and to wait for them."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgpack
import zmq

from loaderd.ctl.client import ControlClient
from loaderd.ctl.event_stream import EventStream
from loaderd.ctl.exit_codes import ExitCode, exit_code_of
from loaderd.ctl.follow import outcome
from shared.control import (
    History,
    HistoryEntry,
    HistoryReport,
    ModelReport,
    Operation,
    OperationReport,
    Push,
    PushReply,
    Rollback,
    RollbackReply,
    Status,
    StatusReport,
)
from shared.errors import ChangeoverError, DaemonUnreachable
from shared.ids import VersionTag
from shared.run_dir import RUN_DIR_VARIABLE, RunDir
from tests.support.daemon_process import ROOT, DaemonProcess, entry
from tests.support.traffic import Client

MODEL = "tiny"
WITHIN_S = 60.0


@dataclass(frozen=True, slots=True)
class CtlResult:
    """What a loaderctl command ended with."""

    code: int
    out: str
    err: str

    def json(self) -> list[dict[str, Any]]:
        """The JSON objects on stdout."""
        return [json.loads(line) for line in self.out.splitlines()]


class ServingHost:
    """The daemons of one run directory; use as made by `serving_host`."""

    def __init__(self, folder: Path, model_root: Path, loaderd_config: str = "") -> None:
        self.folder = folder
        self.model_root = model_root
        self.state_dir = folder / "state"
        self.run_dir = RunDir(folder / "run")
        self.run_dir.path.mkdir()
        self.loaderd_config = loaderd_config
        self.inferds: dict[str, DaemonProcess] = {}
        self._inferd_configs: dict[str, str] = {}
        self._loaderd: DaemonProcess | None = None
        self._client: ControlClient | None = None
        self._stream: EventStream | None = None
        self._started: list[DaemonProcess] = []

    # --- daemons ---------------------------------------------------------------------------------

    @property
    def loaderd(self) -> DaemonProcess:
        assert self._loaderd is not None
        return self._loaderd

    @property
    def journal(self) -> Path:
        return self.state_dir / "journal.jsonl"

    def start_loaderd(self, environ: Mapping[str, str] | None = None) -> DaemonProcess:
        """Start loaderd and wait until it is ready."""
        config = self.folder / "loaderd.toml"
        config.write_text(
            f'run_dir = "{self.run_dir.path}"\nstate_dir = "{self.state_dir}"\n'
            f'model_roots = ["{self.model_root}"]\n{self.loaderd_config}\n'
        )
        self._loaderd = self._start("loaderd", "loaderd.main", config, environ)
        self._loaderd.await_notice("READY=1")
        return self._loaderd

    def start_inferd(
        self,
        name: str = "a",
        *,
        more: str = "",
        engine: str = "",
        kv_cache_bytes: int = 64 << 20,
        is_awaited: bool = True,
        environ: Mapping[str, str] | None = None,
    ) -> DaemonProcess:
        """Start an inferd, with more configuration if given, and wait until it is ready."""
        config = self.folder / f"inferd-{name}.toml"
        config.write_text(
            f'name = "{name}"\nmodel = "{MODEL}"\nrun_dir = "{self.run_dir.path}"\n'
            f'listen = "unix:{self.api_socket(name)}"\n{more}\n'
            f"[engine]\nkv_cache_bytes = {kv_cache_bytes}\ntorch_threads = 1\n{engine}\n"
        )
        self.inferds[name] = self._start(f"inferd-{name}", "inferd.main", config, environ)
        if is_awaited:
            self.inferds[name].await_notice("READY=1")
        return self.inferds[name]

    def _start(
        self, name: str, module: str, config: Path, environ: Mapping[str, str] | None
    ) -> DaemonProcess:
        daemon = DaemonProcess(name, module, config, self.folder, environ)
        self._started.append(daemon)
        return daemon

    def kill_loaderd(self) -> None:
        """SIGKILL."""
        self.loaderd.kill()
        self._forget_client()

    def restart_loaderd(self) -> None:
        """SIGKILL and start again."""
        self.kill_loaderd()
        self.start_loaderd()

    def stop(self) -> None:
        """Kill everything."""
        self._forget_client()
        for daemon in reversed(self._started):
            daemon.close()

    def logs(self) -> str:
        """The end of each daemon's log."""
        parts = []
        for path in sorted(self.folder.glob("*.log")):
            tail = path.read_text(errors="replace").splitlines()[-60:]
            parts.append("\n".join([f"----- {path.name}", *tail]))
        return "\n".join(parts)

    # --- asking ----------------------------------------------------------------------------------

    def api_socket(self, name: str = "a") -> Path:
        return self.run_dir.path / f"{name}.api.sock"

    def client(self, name: str = "a") -> Client:
        """A client of an inferd's API; the caller closes it."""
        return Client(self.api_socket(name), MODEL)

    def get(self, path: Path, url: str) -> httpx.Response:
        """One GET on a Unix socket."""
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), timeout=10) as http:
            return http.get(f"http://localhost{url}")

    def ready(self, name: str = "a") -> httpx.Response:
        """What an inferd says about its readiness."""
        return self.get(self.run_dir.inferd_health(name), "/readyz?verbose")

    @property
    def control(self) -> ControlClient:
        """A client of the running loaderd, kept until that ends."""
        if self._client is None:
            self._client = ControlClient(self.run_dir)
            # Kept open too, so that waiting adds nothing to what loaderd holds.
            self._stream = self._client.events(must_listen=False)
        return self._client

    def _forget_client(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        if self._client is not None:
            self._client.close()
            self._client = None

    def _wake_up(self) -> EventStream:
        if self._stream is None:
            self.control  # noqa: B018  opens both
        assert self._stream is not None
        return self._stream

    def await_event(self, kind: str, text: str, operation: str) -> None:
        """Wait for an event of an operation.  The subscription is that of `control`, long since made."""
        end = time.monotonic() + WITHIN_S
        while time.monotonic() < end:
            for event in self._wake_up().wait(0.5):
                if (event.kind, event.text, event.operation) == (kind, text, operation):
                    return
        raise AssertionError(f"no event {kind} {text}")

    def status(self) -> StatusReport:
        return self.control.ask(Status(), StatusReport)

    def history(self, limit: int = 200) -> tuple[HistoryEntry, ...]:
        return self.control.ask(History(limit=limit), HistoryReport).entries

    def model(self, status: StatusReport | None = None) -> ModelReport:
        """The one model's report; an empty one as long as loaderd has not heard of it."""
        models = (status or self.status()).models
        return next((m for m in models if m.model == MODEL), ModelReport(model=MODEL))

    def active(self) -> VersionTag | None:
        tag = self.model().active
        return None if tag is None else tag.to_tag()

    def retained(self) -> VersionTag | None:
        tag = self.model().retained
        return None if tag is None else tag.to_tag()

    def operation(self, operation: str) -> OperationReport:
        return self.control.ask(Operation(operation=operation), OperationReport)

    def start_push(self, version: str) -> str:
        """Start a push of this version of the model; returns the operation's id."""
        return self.start_push_of(f"{MODEL}-{version}")

    def start_push_of(self, folder: str) -> str:
        """Start a push of a folder; returns the operation's id."""
        reply = self.control.ask(Push(name=folder), PushReply, WITHIN_S)
        assert reply.operation is not None, reply.plan
        return reply.operation

    def refused(self, name: str) -> tuple[ExitCode, str]:
        """Push a folder that must not come to serve: what loaderctl would exit with, and all that the
        user is told."""
        try:
            reply = self.control.ask(Push(name=name), PushReply, WITHIN_S)
        except ChangeoverError as error:
            return exit_code_of(error), f"{error.code}: {error.message}"
        if reply.operation is None:
            return ExitCode.REFUSED, "; ".join(reply.plan.reasons)
        report = self.ended(reply.operation)
        code = outcome(report)
        assert code is not None
        assert report.error is not None, report
        return code, f"{report.error.code}: {report.error.message}"

    def push(self, version: str) -> OperationReport:
        """Push and wait for the end, which must be a good one."""
        return self.done(self.start_push(version))

    def rollback(self) -> OperationReport:
        """Roll back and wait for the end, which must be a good one."""
        return self.done(self.control.ask(Rollback(), RollbackReply).operation)

    def done(self, operation: str) -> OperationReport:
        """The report of an operation that must end well."""
        report = self.ended(operation)
        assert report.state == "done", report
        return report

    def ended(self, operation: str, within_s: float = WITHIN_S) -> OperationReport:
        """The report of an operation once it has ended."""
        return self.awaited(
            lambda: (r := self.operation(operation)).state != "running" and r, f"{operation} to end", within_s
        )

    def awaited(self, look: Callable[[], Any], what: str, within_s: float = WITHIN_S) -> Any:
        """What `look` gives once it is true; it is asked again after each event and a few times a
        second, and may meet a daemon that is not there."""
        end = time.monotonic() + within_s
        while True:
            try:
                found = look()
            except (DaemonUnreachable, httpx.TransportError):
                found = None
            if found:
                return found
            if time.monotonic() > end:
                raise AssertionError(f"waited {within_s} s for {what}")
            self._wake_up().wait(0.05)

    def await_serving(self, version: str, *names: str) -> None:
        """Wait until loaderd has `version` active and the named inferds (or all) serve it, epoch and all."""

        def look() -> bool:
            status = self.status()
            model = self.model(status)
            wanted = names or tuple(self.inferds)
            reports = {report.name: report for report in status.inferds}
            return (
                model.active is not None
                and model.active.version == version
                and all(
                    name in reports
                    and reports[name].serving == model.active
                    and reports[name].epoch == model.epoch
                    for name in wanted
                )
            )

        self.awaited(look, f"{names or 'all'} to serve {version}")

    def await_attached(self, *names: str) -> None:
        """Wait until the named inferds hold leases."""
        self.awaited(lambda: {i.name for i in self.status().inferds} >= set(names), f"{names} to attach")

    # --- loaderctl -------------------------------------------------------------------------------

    def ctl(self, *arguments: str, within_s: float = WITHIN_S) -> CtlResult:
        """Run loaderctl to its end."""
        with self.start_ctl(*arguments) as process:
            out, err = process.communicate(timeout=within_s)
        return CtlResult(process.returncode, out, err)

    def start_ctl(self, *arguments: str, prelude: str = "", **popen: Any) -> subprocess.Popen[str]:
        """Start loaderctl; `prelude` is code that runs in it first."""
        return subprocess.Popen(
            [*entry("loaderd.ctl.main", prelude), *arguments],
            cwd=ROOT,
            env={**os.environ, RUN_DIR_VARIABLE: str(self.run_dir.path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **popen,
        )

    # --- speaking for oneself --------------------------------------------------------------------

    def ask_raw(self, frame: bytes, within_s: float = 10.0) -> dict[str, Any]:
        """Send any bytes to the control socket and return the reply, decoded but not checked."""
        with zmq.Context() as context, closing(context.socket(zmq.DEALER)) as dealer:
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.connect(f"ipc://{self.run_dir.control}")
            dealer.send(frame)
            assert dealer.poll(round(within_s * 1000)), "no reply"
            reply: dict[str, Any] = msgpack.unpackb(dealer.recv())
            return reply

    def seqpacket(self) -> socket.socket:
        """A connection to the handoff socket; the caller closes it."""
        end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        end.connect(str(self.run_dir.handoff))
        end.settimeout(10)
        return end


@contextmanager
def serving_host(model_root: Path, loaderd_config: str = "") -> Iterator[ServingHost]:
    """A host without running daemons; what was started is killed at the end, and the logs are shown
    if something failed inside."""
    # Socket paths are short, and pytest's own folders are not.
    folder = Path(tempfile.mkdtemp(prefix="co-"))
    host = ServingHost(folder, model_root, loaderd_config)
    try:
        yield host
    finally:
        host.stop()
        print(host.logs())
        shutil.rmtree(folder)
