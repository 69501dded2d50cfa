"""What systemd is told: ready, status, stopping, watchdog (the protocol of sd_notify(3)).

Own code, a page long: the protocol is datagrams of `KEY=value` lines.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import time
from collections.abc import Callable, MutableMapping
from typing import Self

from shared.closing import Closing
from shared.errors import ConfigError, DriverError
from shared.logs import escape_controls, get_logger

SEND_TIMEOUT_S = 2.0
"""Longest wait for a full queue of systemd's at the calls that must be heard (ready);
the caller's thread blocks meanwhile."""

STATUS_BYTES = 1024
"""Longest status text; systemd reads at most 4096 bytes of a message."""

_log = get_logger("changeover.notify")


def _timeval(seconds: float) -> bytes:
    """A struct timeval, as SO_SNDTIMEO takes it."""
    return struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))


class Notifier(Closing):
    """The line to systemd; without NOTIFY_SOCKET every call does nothing.

    `ready`, `reloading` and `main_pid` raise DriverError if systemd cannot be told: going on would end
    in a start timeout.  The others only log: nobody's requests are cut off because systemd did not
    hear that they are waited for.  `status` and `watchdog` never wait, and are said again.
    """

    def __init__(self, address: str | None, watchdog_s: float | None = None) -> None:
        """`address` as in NOTIFY_SOCKET; `watchdog_s` is the time after which systemd kills."""
        self._address: str | None = None
        self._socket: socket.socket | None = None
        self._watchdog_s = watchdog_s
        if address is None:
            return
        if address[:1] not in ("/", "@") or len(address) < 2:
            raise ConfigError(f"NOTIFY_SOCKET {address!r} is neither a path nor @name", address=address)
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        # The kernel's time limit, not Python's: that one would poll, and an unconnected datagram
        # socket always polls as writable.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(SEND_TIMEOUT_S))

    @classmethod
    def from_environment(cls, environ: MutableMapping[str, str] | None = None) -> Self:
        """Take NOTIFY_SOCKET, WATCHDOG_USEC and WATCHDOG_PID out of the environment, so that child
        processes do not speak for this one.  A watchdog meant for another pid is not ours."""
        source = os.environ if environ is None else environ
        address = source.pop("NOTIFY_SOCKET", None)
        limit = source.pop("WATCHDOG_USEC", None)
        pid = source.pop("WATCHDOG_PID", None)
        is_ours = pid is None or pid == str(os.getpid())
        watchdog_s: float | None = None
        if limit is not None and is_ours:
            if not limit.isascii() or not limit.isdigit() or int(limit) == 0:
                raise ConfigError(f"WATCHDOG_USEC {limit!r} is not a number of microseconds", value=limit)
            watchdog_s = int(limit) / 1e6
        return cls(address or None, watchdog_s)

    @property
    def is_enabled(self) -> bool:
        """Whether anyone listens."""
        return self._socket is not None

    @property
    def feed_interval_s(self) -> float | None:
        """Seconds between two signs of life: half of systemd's limit; None without a watchdog."""
        if self._socket is None or self._watchdog_s is None:
            return None
        return self._watchdog_s / 2

    def ready(self, status: str = "") -> None:
        """Start-up or a reload is complete."""
        self._send("READY=1", *self._status_lines(status))

    def status(self, text: str) -> None:
        """One line for `systemctl status`; control characters are escaped, a long text is cut."""
        self._send_or_log(*self._status_lines(text))

    def reloading(self) -> None:
        """A reload has begun; `ready` ends it."""
        self._send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self, status: str = "") -> None:
        """The shutdown has begun."""
        self._send_or_log("STOPPING=1", *self._status_lines(status))

    def extend_timeout(self, seconds: float) -> None:
        """Start-up, runtime or stop may take `seconds` more from now on; repeat while it goes on."""
        self._send_or_log(f"EXTEND_TIMEOUT_USEC={int(seconds * 1e6)}")

    def main_pid(self, pid: int) -> None:
        """`pid` is the main process of the unit."""
        self._send(f"MAINPID={pid}")

    def watchdog(self) -> None:
        """This process is alive."""
        self._send_or_log("WATCHDOG=1")

    async def feed_watchdog(self, is_live: Callable[[], bool]) -> None:
        """Give a sign of life each half limit while `is_live()`; never returns, cancel it.

        Runs in the loop on purpose: a loop that hangs gives no sign and systemd kills the process.
        Without a watchdog it waits for its cancellation.
        """
        interval_s = self.feed_interval_s
        if interval_s is None:
            await asyncio.Event().wait()
            return
        while True:
            if is_live():
                self.watchdog()
            else:
                _log.error("no sign of life given to systemd: not live")
            await asyncio.sleep(interval_s)

    def close(self) -> None:
        """Close the socket; later calls do nothing."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    @staticmethod
    def _status_lines(text: str) -> tuple[str, ...]:
        if not text:
            return ()
        line = escape_controls(text).encode("utf-8", "replace")[:STATUS_BYTES].decode("utf-8", "ignore")
        return (f"STATUS={line}",)

    def _send_or_log(self, *lines: str) -> None:
        # Never waits: a commit reports its status from the event loop, and systemd may be busy.
        try:
            self._send(*lines, flags=socket.MSG_DONTWAIT)
        except DriverError as error:
            _log.warning("systemd was not told", lines=list(lines), error=error.message)

    def _send(self, *lines: str, flags: int = 0) -> None:
        if self._socket is None or self._address is None or not lines:
            return
        try:
            self._socket.sendto("\n".join(lines).encode(), flags, self._address)
        except OSError as error:
            detail = error.strerror or str(error)
            raise DriverError(f"sendto(NOTIFY_SOCKET, {lines[0]})", error.errno or 0, detail) from error
