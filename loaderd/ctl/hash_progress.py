"""Showing how far a folder has been hashed, and stopping between two chunks on Ctrl-C."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Self

from rich.progress import BarColumn, Progress, TaskID

from loaderd.ctl.progress_columns import Amount, Title
from loaderd.ctl.terminal import Terminal
from loaderd.ctl.text import rate, size

_REDRAW_EVERY_S = 0.1
_JSON_EVERY_S = 0.5
_LINE_EVERY_S = 2.0


class HashProgress:
    """A callback for hashing; as a context, it owns SIGINT and a bar.

    While it is entered, Ctrl-C does not interrupt the main thread, which would then wait for the
    hashing threads: it makes the next call raise KeyboardInterrupt in the thread that hashes.
    """

    def __init__(self, terminal: Terminal, title: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._terminal = terminal
        self._title = title
        self._clock = clock
        self._start = clock()
        self._told_at = self._start
        self._is_interrupted = False
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._every_s = _JSON_EVERY_S if terminal.is_json else _LINE_EVERY_S
        if terminal.is_interactive:
            self._every_s = _REDRAW_EVERY_S
            self._bar = Progress(
                Title(), BarColumn(bar_width=32), Amount(), console=terminal.out, auto_refresh=False
            )

    @property
    def elapsed_s(self) -> float:
        """Seconds since it was made."""
        return self._clock() - self._start

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGINT, self._interrupt)
        if self._bar is not None:
            self._task = self._bar.add_task(self._title, total=None, amount="")
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        signal.signal(signal.SIGINT, self._before)

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        """Note progress; one call at a time, from any thread."""
        if self._is_interrupted:
            raise KeyboardInterrupt
        now = self._clock()
        if now - self._told_at < self._every_s and done_bytes < total_bytes:
            return
        self._told_at = now
        if self._terminal.is_json:
            self._terminal.json({"event": "progress", "bytes_done": done_bytes, "bytes_total": total_bytes})
            return
        speed = rate(done_bytes, now - self._start)
        amount = f"{size(done_bytes)} of {size(total_bytes)}" + (f", {speed}" if speed else "")
        if self._bar is None:
            self._terminal.line(f"{now - self._start:7.1f} s  {self._title}  {amount}")
        else:
            self._bar.update(self._task, completed=done_bytes, total=total_bytes, amount=amount, refresh=True)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self._is_interrupted = True
