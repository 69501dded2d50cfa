"""`Crew`: the threads of one load, which end together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import TracebackType
from typing import Self

from shared.errors import Superseded


class Crew:
    """Runs the same work on several threads.  The first error ends all of them, and so does `cancelled`, as
    far as they ask `check_going`; leaving the block waits for them."""

    def __init__(self, cancelled: threading.Event, threads: int) -> None:
        self._cancelled = cancelled
        self._has_failed = threading.Event()
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="load")
        self._futures: list[Future[None]] = []

    def start(self, threads: int, work: Callable[[], None]) -> list[Future[None]]:
        """Run `work` on so many threads at once."""
        started = [self._threads.submit(self._guarded, work) for _ in range(threads)]
        self._futures.extend(started)
        return started

    @property
    def is_ending(self) -> bool:
        """Whether the work is to end."""
        return self._cancelled.is_set() or self._has_failed.is_set()

    def check_going(self) -> None:
        """Raise Superseded where the work is to end."""
        if self.is_ending:
            raise Superseded("the load was ended")

    def wait(self, started: Sequence[Future[None]]) -> None:
        """Wait until these have ended, in whatever way.  Blocking."""
        wait(started)

    def check(self) -> None:
        """Raise what the crew's threads ended with: Superseded if the load was cancelled, else the first
        error that is a cause and not a consequence."""
        if self._cancelled.is_set():
            raise Superseded("the load was ended")
        errors = [error for future in self._futures if future.done() and (error := future.exception())]
        if errors:
            raise next((error for error in errors if not isinstance(error, Superseded)), errors[0])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._has_failed.set()
        self._threads.shutdown()

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException:
            self._has_failed.set()
            raise
