"""loaderd and inferd as real processes: their configuration, start, readiness and end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from demo.commands import program
from demo.models import MODEL
from shared.errors import ConfigError
from shared.memory.selection import BackendName
from shared.run_dir import RUN_DIR_VARIABLE, RunDir

INFERD_NAME = "demo"
_START_S = 120.0
_STOP_S = 60.0


class DaemonLostError(Exception):
    """A daemon ended or did not become ready, or went away; the message has the end of its log."""


def make_run_dir(parent: Path) -> Path:
    """A new private directory for sockets, in `parent` or, where that path is too long, elsewhere."""
    parent.mkdir(parents=True, exist_ok=True)
    wanted = Path(tempfile.mkdtemp(prefix="run-", dir=parent))
    try:
        RunDir(wanted).check()
    except ConfigError:
        wanted.rmdir()
        return Path(tempfile.mkdtemp(prefix="changeover-"))
    return wanted


def free_port() -> int:
    """A TCP port on the loopback interface that nothing listens on now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def loaderd_config(run_dir: Path, state_dir: Path, model_root: Path, backend: BackendName) -> str:
    """loaderd.toml for the demo."""
    return f"""\
run_dir = "{run_dir}"
state_dir = "{state_dir}"
backend = "{backend}"
model_roots = ["{model_root}"]

[models.{MODEL}]
verify = "sealed"
"""


def inferd_config(run_dir: Path, port: int, backend: BackendName) -> str:
    """inferd.toml for the demo."""
    return f"""\
name = "{INFERD_NAME}"
model = "{MODEL}"
run_dir = "{run_dir}"
backend = "{backend}"
listen = "127.0.0.1:{port}"

[engine]
max_model_len = 512
max_sequences = 16
torch_threads = 2
"""


class NotifyLine:
    """The socket that NOTIFY_SOCKET names: reads what the daemon says for as long as it runs, so that
    its queue never fills.  Needs a running loop."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ready = asyncio.Event()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            self._socket.setblocking(False)
            path.unlink(missing_ok=True)
            self._socket.bind(str(path))
        except BaseException:
            self._socket.close()
            raise
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket, self._read)

    def _read(self) -> None:
        if b"READY=1" in self._socket.recv(4096).splitlines():
            self.ready.set()

    def close(self) -> None:
        """Stop listening."""
        self._loop.remove_reader(self._socket)
        self._socket.close()


@dataclass(slots=True)
class Daemon:
    """One running daemon; its output goes to a log file."""

    name: str
    process: asyncio.subprocess.Process
    log: Path
    line: NotifyLine

    def tail(self, lines: int = 30) -> str:
        """The end of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    async def stop(self) -> int:
        """Ask it to end by SIGTERM and return its exit status; SIGKILL after a minute."""
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(self.process.wait(), _STOP_S)
            except TimeoutError:
                await self.kill()
        return await self.process.wait()

    async def kill(self) -> None:
        """End it at once."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()


@dataclass(slots=True)
class Daemons:
    """Both daemons in one run directory.  Leaving the block kills what still runs, unless detached."""

    run_dir: Path
    port: int
    running: list[Daemon] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        """The environment in which loaderctl finds this run's daemons."""
        return {**os.environ, RUN_DIR_VARIABLE: str(self.run_dir)}

    @property
    def api(self) -> str:
        """Base URL of the OpenAI-compatible API."""
        return f"http://127.0.0.1:{self.port}/v1"

    async def start(self, name: str, config: str) -> None:
        """Start one daemon and wait until it says READY=1, as systemd would.

        Raises DaemonLostError if it ends or stays silent.
        """
        path = self.run_dir / f"{name}.toml"
        path.write_text(config)
        log = self.run_dir / f"{name}.log"
        line = NotifyLine(self.run_dir / f"{name}.notify.sock")
        try:
            with log.open("wb") as sink:
                process = await asyncio.create_subprocess_exec(
                    *program(name),
                    "--config",
                    str(path),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=sink,
                    stderr=sink,
                    env={**self.environment, "NOTIFY_SOCKET": str(line.path)},
                    start_new_session=True,  # a Ctrl-C is the demo's to handle, also after `detach`
                )
        except BaseException:
            line.close()
            raise
        daemon = Daemon(name, process, log, line)
        self.running.append(daemon)
        await _until_ready(daemon)

    async def stop(self) -> dict[str, int]:
        """End both by SIGTERM, the serving one first, and return their exit statuses."""
        return {daemon.name: await daemon.stop() for daemon in reversed(self.running)}

    def tails(self) -> str:
        """The end of both logs."""
        return "\n".join(f"--- {daemon.name}:\n{daemon.tail()}" for daemon in self.running)

    def detach(self) -> tuple[int, ...]:
        """Leave the daemons running; returns their process ids."""
        pids = tuple(daemon.process.pid for daemon in self.running)
        for daemon in self.running:
            daemon.line.close()
        self.running.clear()
        return pids

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for daemon in reversed(self.running):
            await daemon.kill()
            daemon.line.close()


async def _until_ready(daemon: Daemon) -> None:
    ended = asyncio.ensure_future(daemon.process.wait())
    ready = asyncio.ensure_future(daemon.line.ready.wait())
    try:
        done, _ = await asyncio.wait((ended, ready), timeout=_START_S, return_when=asyncio.FIRST_COMPLETED)
    finally:
        ready.cancel()
        ended.cancel()
    if ended in done:
        raise DaemonLostError(f"{daemon.name} ended with {ended.result()}:\n{daemon.tail()}")
    if ready not in done:
        raise DaemonLostError(f"{daemon.name} was not ready after {_START_S:.0f} s:\n{daemon.tail()}")
