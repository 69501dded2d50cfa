"""One daemon as a child process: started with a notify socket, watched, ended, and its log shown."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
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
{prelude}
sys.exit(main())
"""


def entry(module: str, prelude: str = "") -> list[str]:
    """The start of a command line that runs `prelude` and `module.main`, and ends with this process."""
    return [sys.executable, "-c", _ENTRY.format(module=module, prelude=prelude), str(os.getpid())]


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
        self._heard = threading.Condition()
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
        self._threads = [threading.Thread(target=work) for work in (self._listen, self._watch)]
        for thread in self._threads:
            thread.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def await_notice(self, wanted: str, within_s: float = START_WITHIN_S) -> str:
        """Wait until a notice has a line that starts with `wanted`; returns that line."""
        with self._heard:
            self._heard.wait_for(lambda: self._line(wanted) or not self.is_running, within_s)
            line = self._line(wanted)
        if line is None:
            how = (
                f"still runs after {within_s} s" if self.is_running else f"ended: {self._process.returncode}"
            )
            raise AssertionError(f"{self.name} said no {wanted}, it {how}")
        return line

    def _line(self, wanted: str) -> str | None:
        lines = (line for notice in self.notices for line in notice.splitlines())
        return next((line for line in lines if line.startswith(wanted)), None)

    def _listen(self) -> None:
        while True:
            notice = self._socket.recv(4096).decode()
            with self._heard:
                if not notice:
                    return
                self.notices.append(notice)
                self._heard.notify_all()

    def _watch(self) -> None:
        self._process.wait()
        with self._heard:
            self._heard.notify_all()

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
        self._socket.shutdown(socket.SHUT_RD)  # wakes the listener
        for thread in self._threads:
            thread.join()
        self._socket.close()
