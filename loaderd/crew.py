"""`Crew`: the threads of one load, which end together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from shared.errors import ResourceError, Superseded


class Crew:
    """Runs the same work on several threads.  The first error ends all of them, and so does `cancelled`, as
    far as they ask `check_going`; leaving the block waits for them."""

    def __init__(self, cancelled: threading.Event) -> None:
        self._cancelled = cancelled
        self._has_failed = threading.Event()
        self._threads: list[threading.Thread] = []
        self._errors: list[BaseException] = []  # in the order in which they came
        self._changed = threading.Condition()
        self._ended: set[threading.Thread] = set()

    def start(self, threads: int, work: Callable[[], None]) -> Sequence[threading.Thread]:
        """Run `work` on so many threads at once.  Raises ResourceError where the host gives no more of them;
        those that were started run on."""
        before = len(self._threads)
        for number in range(before, before + threads):
            thread = threading.Thread(target=self._guarded, args=(work,), name=f"load-{number}")
            self._threads.append(thread)  # first, for a `start` that is interrupted has started it
            try:
                thread.start()
            except RuntimeError as error:
                self._threads.pop()
                raise ResourceError(f"a thread of the load cannot be started: {error}") from error
        return self._threads[before:]

    @property
    def is_ending(self) -> bool:
        """Whether the work is to end."""
        return self._cancelled.is_set() or self._has_failed.is_set()

    def check_going(self) -> None:
        """Raise Superseded where the work is to end."""
        if self.is_ending:
            raise Superseded("the load was ended")

    def wait(self, started: Sequence[threading.Thread]) -> None:
        """Wait until these have ended, in whatever way.  Blocking."""
        # Not by `join` alone: interrupted by SIGINT, it takes the thread for ended (before Python 3.13).
        with self._changed:
            self._changed.wait_for(lambda: self._ended.issuperset(started))
        for thread in started:
            thread.join()

    def check(self) -> None:
        """Raise what the crew's threads ended with: Superseded if the load was cancelled, else the first
        error that is a cause and not a consequence."""
        if self._cancelled.is_set():
            raise Superseded("the load was ended")
        if self._errors:
            # Not from a variable: the error holds this frame, which would hold the error.
            raise min(self._errors, key=lambda error: isinstance(error, Superseded))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._has_failed.set()
        self.wait(self._threads)
        self._errors.clear()  # their frames hold this crew, and slabs

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised by `check`, on the thread that waits
            self._errors.append(error)
            self._has_failed.set()
        finally:
            with self._changed:
                self._ended.add(threading.current_thread())
                self._changed.notify_all()
