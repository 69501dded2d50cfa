"""One daemon as a child process: started with a notify socket, watched, ended, and its log shown."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from shared.run_dir import RUN_DIR_VARIABLE

ROOT = Path(__file__).parents[2]
START_WITHIN_S = 90.0
END_WITHIN_S = 30.0

# Killed with the tests, whatever ends those.
_ENTRY = """
import sys
from shared.supervisor import die_with_parent
die_with_parent(int(sys.argv.pop(1)))
from {module} import main
sys.exit(main())
"""


def entry(module: str) -> list[str]:
    """The start of a command line that runs `module.main` and ends with this process."""
    return [sys.executable, "-c", _ENTRY.format(module=module), str(os.getpid())]


class DaemonProcess:
    """A running daemon and the datagrams it sends to its notify socket."""

    def __init__(
        self, name: str, module: str, config: Path, folder: Path, environ: Mapping[str, str] | None = None
    ) -> None:
        """Start it; `folder` takes its log and its notify socket."""
        self.name = name
        self.log = folder / f"{name}.log"
        self.notices: list[str] = []
        address = folder / f"{name}.notify"
        address.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(address))
        kept = {key: value for key, value in os.environ.items() if key != "JOURNAL_STREAM"}
        kept.pop(RUN_DIR_VARIABLE, None)
        with self.log.open("ab") as sink:
            self._process = subprocess.Popen(
                [*entry(module), "--config", str(config)],
                cwd=ROOT,
                env={**kept, "OMP_NUM_THREADS": "1", **(environ or {}), "NOTIFY_SOCKET": str(address)},
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def await_notice(self, wanted: str, within_s: float = START_WITHIN_S) -> str:
        """Read notices until one has a line that starts with `wanted`; returns that line."""
        end = time.monotonic() + within_s
        while True:
            self._socket.settimeout(max(0.01, min(0.5, end - time.monotonic())))
            try:
                text = self._socket.recv(4096).decode()
            except TimeoutError:
                if not self.is_running:
                    raise AssertionError(f"{self.name} ended with {self._process.returncode}") from None
                if time.monotonic() >= end:
                    raise AssertionError(f"{self.name} said no {wanted} in {within_s} s") from None
                continue
            self.notices.append(text)
            line = next((line for line in text.splitlines() if line.startswith(wanted)), None)
            if line is not None:
                return line

    def read_notices(self) -> list[str]:
        """Everything that was said until now."""
        self._socket.setblocking(False)
        try:
            while True:
                self.notices.append(self._socket.recv(4096).decode())
        except BlockingIOError:
            return self.notices

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def terminate(self) -> int:
        """SIGTERM, and the exit status."""
        self.signal(signal.SIGTERM)
        return self.wait()

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        if self.is_running:
            self._process.kill()
        self._process.wait()

    def wait(self, within_s: float = END_WITHIN_S) -> int:
        """The exit status."""
        return self._process.wait(within_s)

    def close(self) -> None:
        """Kill what still runs."""
        self.kill()
        self._socket.close()
