"""Supervised tasks, and the process entry seen from outside."""

from __future__ import annotations

import asyncio
import json
import signal
from typing import Any

import pytest

from shared.errors import InvariantError, ResourceError
from shared.supervisor import EXIT_CLEAN, EXIT_CONFIG, EXIT_CRASHED, Stop, Supervisor
from tests.unit.small_daemon import heard, small_daemon


async def _crash(error: Exception) -> None:
    raise error


async def _forever() -> None:
    await asyncio.Event().wait()


def test_a_crash_ends_the_body_and_raises_the_error_itself() -> None:
    error = ResourceError("no more")
    error.__cause__ = OSError("full")

    async def run() -> None:
        async with Supervisor() as tasks:
            tasks.start(_crash(error), name="reader")
            await asyncio.Event().wait()

    with pytest.raises(ResourceError) as caught:
        asyncio.run(run())
    assert caught.value is error
    assert isinstance(error.__cause__, OSError)
    assert error.__notes__ == ["raised in task 'reader'"]


def test_a_crash_ends_the_other_tasks() -> None:
    ended: list[str] = []

    async def waits(started: asyncio.Event) -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("waits")

    async def run() -> None:
        async with Supervisor() as tasks:
            started = asyncio.Event()
            tasks.start(waits(started), name="waits")
            await started.wait()
            tasks.start(_crash(RuntimeError("boom")), name="crashes")
            await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="boom"):
        asyncio.run(run())
    assert ended == ["waits"]


def test_a_service_that_returns_is_a_broken_invariant() -> None:
    async def run(may_end: bool) -> None:
        async with Supervisor() as tasks:
            task = tasks.start(asyncio.sleep(0), name="accept loop", may_end=may_end)
            await asyncio.wait((task,))
            await asyncio.sleep(0)

    with pytest.raises(InvariantError, match="'accept loop' returned"):
        asyncio.run(run(may_end=False))
    asyncio.run(run(may_end=True))


def test_tasks_end_newest_first_each_before_the_next_is_asked() -> None:
    story: list[str] = []

    async def work(name: str, started: asyncio.Event) -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            story.append(f"{name} asked")
            for _turn in range(3):
                await asyncio.sleep(0)
            story.append(f"{name} ended")

    async def run(fail: bool) -> None:
        async with Supervisor() as tasks:
            for name in ("first", "second", "third"):
                started = asyncio.Event()
                tasks.start(work(name, started), name=name)
                await started.wait()
            if fail:
                raise RuntimeError("body")

    expected = [f"{name} {step}" for name in ("third", "second", "first") for step in ("asked", "ended")]
    asyncio.run(run(fail=False))
    assert story == expected
    story.clear()
    with pytest.raises(RuntimeError, match="body"):
        asyncio.run(run(fail=True))
    assert story == expected


def test_a_task_that_fails_while_it_is_ended_is_heard() -> None:
    ended: list[str] = []

    async def fails_late(started: asyncio.Event) -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            raise RuntimeError("close failed")

    async def earlier(started: asyncio.Event) -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("earlier")

    async def run() -> None:
        async with Supervisor() as tasks:
            for work in (earlier, fails_late):
                started = asyncio.Event()
                tasks.start(work(started), name=work.__name__)
                await started.wait()

    with pytest.raises(RuntimeError, match="close failed"):
        asyncio.run(run())
    assert ended == ["earlier"]


def test_an_error_of_the_body_is_raised_as_it_is() -> None:
    error = ValueError("body")

    async def run() -> None:
        async with Supervisor() as tasks:
            tasks.start(_forever(), name="forever")
            raise error

    with pytest.raises(ValueError, match="body") as caught:
        asyncio.run(run())
    assert caught.value is error


def test_two_errors_are_raised_as_a_group() -> None:
    async def stubborn(started: asyncio.Event) -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            raise RuntimeError("second")

    async def run() -> None:
        async with Supervisor() as tasks:
            started = asyncio.Event()
            tasks.start(stubborn(started), name="stubborn")
            await started.wait()
            raise ValueError("first")

    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(run())
    assert sorted(str(error) for error in caught.value.exceptions) == ["first", "second"]


def test_cancellation_from_outside_stays_cancellation() -> None:
    async def run() -> list[str]:
        ended: list[str] = []
        inside = asyncio.Event()

        async def work() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                ended.append("work")

        async def body() -> None:
            async with Supervisor() as tasks:
                tasks.start(work(), name="work")
                await asyncio.sleep(0)
                inside.set()
                await asyncio.Event().wait()

        task = asyncio.create_task(body())
        await inside.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return ended

    assert asyncio.run(run()) == ["work"]


def test_a_task_that_never_ran_leaves_no_warning() -> None:
    async def run() -> None:
        async with Supervisor() as tasks:
            tasks.start(_forever(), name="never starts")

    asyncio.run(run())  # a coroutine that was never awaited would warn, and warnings are errors


def test_stop_keeps_its_first_reason() -> None:
    async def run() -> str:
        stop = Stop()
        assert not stop.is_set
        stop.request("first")
        stop.request("second")
        return await stop.wait()

    assert asyncio.run(run()) == "first"


# --- the process entry ---------------------------------------------------------------------------

_WAITS = """
try:
    say("up")
    await stop.wait()
    say("stopping")
finally:
    say("clean")
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_daemon_cleanly(number: signal.Signals) -> None:
    with small_daemon(_WAITS) as daemon:
        assert heard(daemon) == "up"
        daemon.send_signal(number)
        out, log = daemon.communicate(timeout=30)
    assert out.split() == ["stopping", "clean"]
    assert daemon.returncode == EXIT_CLEAN
    assert _log_line(log, "daemon ended")["reason"] == number.name


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_a_daemon_whose_loop_hangs(number: signal.Signals) -> None:
    body = """
    say("up")
    await stop.wait()
    say("hanging")
    try:
        time.sleep(600)
    except KeyboardInterrupt:
        time.sleep(600)  # Python's own handler would need the hanging code to listen to it
    """
    with small_daemon(body) as daemon:
        assert heard(daemon) == "up"
        daemon.send_signal(number)
        assert heard(daemon) == "hanging"
        daemon.send_signal(number)
        assert daemon.wait(timeout=30) == -number


def test_the_crash_of_a_supervised_task_ends_the_daemon() -> None:
    body = """
    async def crash():
        raise RuntimeError("engine is gone")
    try:
        async with Supervisor() as tasks:
            tasks.start(crash(), name="engine")
            await stop.wait()
    finally:
        say("clean")
    """
    with small_daemon(body) as daemon:
        out, log = daemon.communicate(timeout=30)
    assert daemon.returncode == EXIT_CRASHED
    assert out.split() == ["clean"]
    line = _log_line(log, "daemon failed")
    assert line["error"] == "engine is gone"
    assert "raised in task 'engine'" in line["exception"]


@pytest.mark.parametrize(
    ("body", "event", "code"),
    [
        ("return", "daemon failed", EXIT_CRASHED),
        ("asyncio.current_task().cancel(); await stop.wait()", "daemon failed", EXIT_CRASHED),
        ("raise ConfigError('loaderd.toml: port: missing')", "configuration refused", EXIT_CONFIG),
        ("raise ResourceError('no GPU')", "daemon cannot run", EXIT_CRASHED),
        ("stop.request('done'); raise RuntimeError('late')", "daemon failed", EXIT_CRASHED),
        ("asyncio.get_running_loop().call_soon(lambda: 1 / 0); await stop.wait()", "daemon failed", 1),
    ],
    ids=["returns unasked", "cancelled", "bad configuration", "no resource", "fails late", "callback raises"],
)
def test_what_ends_a_daemon_without_being_asked_is_an_error(body: str, event: str, code: int) -> None:
    with small_daemon(body) as daemon:
        _out, log = daemon.communicate(timeout=30)
    assert daemon.returncode == code
    assert _log_line(log, event)["level"] == "error"


def test_a_main_that_was_asked_from_within_ends_cleanly() -> None:
    with small_daemon("stop.request('job done')") as daemon:
        _out, log = daemon.communicate(timeout=30)
    assert daemon.returncode == EXIT_CLEAN
    assert _log_line(log, "daemon ended")["reason"] == "job done"


def test_an_abort_shows_where_the_daemon_was() -> None:
    body = """
    def hangs_here():
        say("up")
        time.sleep(600)
    hangs_here()
    """
    with small_daemon(body) as daemon:
        assert heard(daemon) == "up"
        daemon.send_signal(signal.SIGABRT)  # what systemd's watchdog sends
        _out, log = daemon.communicate(timeout=30)
    assert daemon.returncode == -signal.SIGABRT
    assert "hangs_here" in log


def test_a_child_dies_with_the_process_that_started_it() -> None:
    body = """
    parent = os.getpid()
    if os.fork() == 0:
        die_with_parent(parent)
        say("child")
        time.sleep(600)
    await stop.wait()
    """
    with small_daemon(body) as daemon:
        assert heard(daemon) == "child"
        daemon.kill()
        # The child holds the other end of this pipe too: its end is the child's.
        assert heard(daemon) == ""


def test_a_child_whose_parent_is_gone_already_dies_at_once() -> None:
    body = """
    pid = os.fork()
    if pid == 0:
        die_with_parent(1 if os.getppid() != 1 else 2)
        os._exit(0)
    _pid, status = os.waitpid(pid, 0)
    say(str(os.waitstatus_to_exitcode(status)))
    await stop.wait()
    """
    with small_daemon(body) as daemon:
        assert heard(daemon) == str(-signal.SIGKILL)


def _log_line(log: str, event: str) -> dict[str, Any]:
    lines = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    (found,) = [line for line in lines if line["event"] == event]
    return dict(found)
