"""The process entry of both daemons: signals, supervised tasks and exit codes.

Clean-up order is the nesting of context managers in `main`; within one Supervisor the newest task
ends before the one started before it is asked to.  This is the only module with a broad `except`.
"""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import os
import signal
from collections.abc import Awaitable, Callable, Coroutine
from types import TracebackType
from typing import Any, Self

import uvloop

from shared.errors import ChangeoverError, ConfigError, DriverError, InvariantError, ResourceError
from shared.logs import configure_logs, get_logger

EXIT_CLEAN = 0
EXIT_CRASHED = 1
EXIT_CONFIG = 78
"""EX_CONFIG of sysexits.h: a restart alone will not help."""

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_PR_SET_PDEATHSIG = 1

_log = get_logger("changeover.supervisor")


class Stop:
    """The request to end, set once; it stays set."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self._reason = ""

    @property
    def is_set(self) -> bool:
        """Whether the daemon was asked to end."""
        return self._event.is_set()

    @property
    def reason(self) -> str:
        """Why the daemon shall end; empty while it shall not."""
        return self._reason

    def request(self, reason: str) -> None:
        """Ask the daemon to end; the first reason is kept."""
        if not self._event.is_set():
            self._reason = reason
            self._event.set()

    async def wait(self) -> str:
        """Wait for the request and return its reason."""
        await self._event.wait()
        return self._reason


class Supervisor:
    """Tasks that live as long as the `async with` body, and end it if one of them fails.

    The body is cancelled when a task raises, and the `async with` raises that error itself, not a
    group around it; several errors raise as a group.  Leaving the body cancels the tasks, newest
    first, each awaited before the next.
    """

    def __init__(self) -> None:
        self._group = asyncio.TaskGroup()
        self._tasks: dict[asyncio.Task[None], None] = {}  # ordered by start
        self._is_closing = False

    def start(
        self, work: Coroutine[Any, Any, None], *, name: str, may_end: bool = False
    ) -> asyncio.Task[None]:
        """Run `work` as a task.  Unless `may_end`, returning before the body has ended is an
        InvariantError: a daemon whose accept loop is gone must not look alive."""
        task = self._group.create_task(self._watch(work, name, may_end), name=name)
        self._tasks[task] = None

        def forget(done: asyncio.Task[None]) -> None:
            del self._tasks[done]
            work.close()  # a task cancelled before its first step has not awaited it

        task.add_done_callback(forget)
        return task

    async def _watch(self, work: Coroutine[Any, Any, None], name: str, may_end: bool) -> None:
        try:
            await work
        except Exception as error:
            error.add_note(f"raised in task {name!r}")
            raise
        if not may_end and not self._is_closing:
            raise InvariantError(f"task {name!r} returned while the daemon still needs it")

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_closing = True
        end: BaseException | None = error
        try:
            for task in reversed(tuple(self._tasks)):
                task.cancel()
                await asyncio.wait((task,))
        except asyncio.CancelledError as cancelled:
            # A task failed while it was ended (the group then cancels us), or we are cancelled from
            # outside; the group knows which.  An error of the body is the more telling one.
            if error is None or isinstance(error, asyncio.CancelledError):
                end = cancelled
        failure: BaseException | None = None
        try:
            await self._group.__aexit__(type(end) if end else None, end, end.__traceback__ if end else None)
        except BaseExceptionGroup as group:
            failure = group.exceptions[0] if len(group.exceptions) == 1 else group
        if failure is not None and failure is not error:
            # Raised outside the handler, so that the error keeps its own cause and context.
            raise failure


def run_daemon(main: Callable[[Stop], Awaitable[None]], *, log_level: str = "info") -> int:
    """Run `main` on a new uvloop until it returns and give the exit code of the process.

    The first SIGTERM or SIGINT sets Stop; a second one ends the process at once, by the kernel, so
    that it also ends one whose loop hangs.  0 is returned only if `main` returned after Stop was
    set: an error, an unhandled exception in a loop callback, or an end that nobody asked for give
    EXIT_CRASHED, a ConfigError gives EXIT_CONFIG; each is logged.  Call it from the main thread.
    """
    configure_logs(log_level)
    # Stacks of all threads on SIGSEGV and on the SIGABRT that systemd's watchdog sends.
    faulthandler.enable()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_run(main))
    except ConfigError as error:
        _log.error("configuration refused", error=error.message)
        return EXIT_CONFIG
    except ResourceError as error:
        _log.error("daemon cannot run", code=error.code, error=error.message, facts=error.facts)
        return EXIT_CRASHED
    except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001  the process entry
        code = error.code if isinstance(error, ChangeoverError) else type(error).__name__
        _log.error("daemon failed", code=code, error=str(error), exc_info=error)
        return EXIT_CRASHED
    return EXIT_CLEAN


async def _run(main: Callable[[Stop], Awaitable[None]]) -> None:
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    if task is None:
        raise InvariantError("a coroutine runs outside a task")
    stop = Stop()
    crashes: list[BaseException] = []

    def on_loop_error(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        _log.error("event loop error", text=str(context.get("message", "")), exc_info=error)
        # A callback of our own raised (a reader, a timer): what it served is deaf from now on.
        # Transports that report a lost connection come without a handle and end by themselves.
        if isinstance(error, Exception) and "handle" in context and not crashes:
            crashes.append(error)
            task.cancel()

    loop.set_exception_handler(on_loop_error)
    _stop_on_signals(loop, stop)
    try:
        await main(stop)
    except asyncio.CancelledError:
        if not crashes:
            raise
        task.uncancel()
    if crashes:
        raise crashes[0]
    if not stop.is_set:
        raise InvariantError("the daemon's main returned though nobody asked it to end")
    _log.info("daemon ended", reason=stop.reason)


def _stop_on_signals(loop: asyncio.AbstractEventLoop, stop: Stop) -> None:
    def on_signal(number: signal.Signals) -> None:
        for each in _SIGNALS:
            loop.remove_signal_handler(each)
            signal.signal(each, signal.SIG_DFL)
        _log.info("stopping", signal=number.name)
        stop.request(number.name)

    for number in _SIGNALS:
        loop.add_signal_handler(number, on_signal, number)


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel SIGKILL this process when the thread that started it ends.

    For child processes of tests and tools, called first thing in the child with the parent's pid;
    daemons outlive whoever started them and must not call it.  Raises DriverError if prctl fails.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise DriverError("prctl(PR_SET_PDEATHSIG)", number, os.strerror(number))
    if os.getppid() != parent_pid:
        # The parent died before the kernel knew what to do about it.
        os.kill(os.getpid(), signal.SIGKILL)
