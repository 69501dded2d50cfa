"""loaderctl as a process: with pipes, or on a terminal of its own."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
DEADLINE_S = 60.0

# A test run in the background has SIGINT ignored, and children inherit that; a terminal sends ^C
# only to a process whose controlling terminal it is.
_ENTRY = """
import fcntl, os, signal, sys, termios
signal.signal(signal.SIGINT, signal.SIG_DFL)
if os.isatty(0):
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, "-m", "loaderd.ctl.main", *sys.argv[1:]])
"""


@dataclass(slots=True)
class Ran:
    """How a run ended and what it wrote; on a terminal, `stdout` holds both streams."""

    code: int
    stdout: str
    stderr: str = ""

    @property
    def screen(self) -> str:
        """What a terminal was sent, without colours and cursor movement: every redraw, in order."""
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.stdout).replace("\r", "")

    @property
    def json_lines(self) -> list[dict[str, object]]:
        """stdout, which must be JSON objects and nothing else."""
        lines = [json.loads(line) for line in self.stdout.splitlines()]
        assert all(isinstance(line, dict) for line in lines)
        return lines


def environment(**changes: str) -> dict[str, str]:
    """Variables of a run: without what a developer's shell might set for colours, sockets and buffers."""
    unset = {
        "CHANGEOVER_RUN_DIR",
        "NO_COLOR",
        "FORCE_COLOR",
        "COLUMNS",
        "LINES",
        "TTY_COMPATIBLE",
        "PYTHONUNBUFFERED",
    }
    kept = {name: value for name, value in os.environ.items() if name not in unset}
    return {**kept, "TERM": "xterm-256color", "TZ": "UTC", "PYTHONPATH": str(ROOT), **changes}


def spawn(
    run_dir: Path, *arguments: str, env: Mapping[str, str] | None = None, stdout: int = subprocess.PIPE
) -> subprocess.Popen[str]:
    """Start loaderctl with pipes, or with `stdout` as it is."""
    return subprocess.Popen(
        [sys.executable, "-c", _ENTRY, "--run-dir", str(run_dir), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        env=environment() if env is None else dict(env),
        cwd=run_dir,
    )


def finish(process: subprocess.Popen[str]) -> Ran:
    """Read to the end and reap."""
    with process:
        try:
            out, err = process.communicate(timeout=DEADLINE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    return Ran(process.returncode, out, err)


def run(run_dir: Path, *arguments: str, env: Mapping[str, str] | None = None) -> Ran:
    """loaderctl with pipes, from start to end."""
    return finish(spawn(run_dir, *arguments, env=env))


@dataclass(slots=True)
class OnTerminal:
    """loaderctl on a pseudo-terminal of 100 columns."""

    process: subprocess.Popen[bytes]
    master: int
    seen: bytearray = field(default_factory=bytearray)

    @classmethod
    def spawn(cls, run_dir: Path, *arguments: str, env: Mapping[str, str] | None = None) -> OnTerminal:
        """Start it in a session whose controlling terminal the pseudo-terminal is."""
        master, slave = pty.openpty()
        try:
            fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
            process = subprocess.Popen(
                [sys.executable, "-c", _ENTRY, "--run-dir", str(run_dir), *arguments],
                stdin=slave,
                stdout=slave,
                stderr=slave,
                start_new_session=True,
                env=environment() if env is None else dict(env),
                cwd=run_dir,
            )
        finally:
            os.close(slave)
        return cls(process, master)

    def press_ctrl_c(self) -> None:
        """What the key does: the line discipline sends SIGINT to the foreground group."""
        os.write(self.master, b"\x03")

    def read_until(self, text: str) -> None:
        """Return once `text` was written."""
        while text.encode() not in self.seen:
            if not self._read():
                raise AssertionError(f"the terminal closed before {text!r}: {bytes(self.seen)!r}")

    def finish(self) -> Ran:
        """Read to the end and reap."""
        with self.process:
            while self._read():
                pass
            os.close(self.master)
            code = self.process.wait(DEADLINE_S)
        return Ran(code, self.seen.decode())

    def _read(self) -> bool:
        ready, _, _ = select.select([self.master], [], [], DEADLINE_S)
        if not ready:
            self.process.send_signal(signal.SIGKILL)
            raise AssertionError(f"nothing was written for {DEADLINE_S} s: {bytes(self.seen)!r}")
        try:
            piece = os.read(self.master, 65536)
        except OSError:  # EIO: the other side was closed
            return False
        self.seen += piece
        return bool(piece)
