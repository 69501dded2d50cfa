"""The line to systemd, heard on a real datagram socket."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from shared import notify
from shared.errors import ConfigError, DriverError
from shared.notify import STATUS_BYTES, Notifier
from tests.unit.small_daemon import small_daemon


class Ear:
    """systemd's end of the notification socket."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind("\0" + address[1:] if address.startswith("@") else address)
        self._socket.settimeout(30)

    def hear(self) -> str:
        """The next message; waits for it."""
        return self._socket.recv(4096).decode()

    def pending(self) -> list[str]:
        """The messages that are there now."""
        found: list[str] = []
        self._socket.setblocking(False)
        try:
            while True:
                found.append(self._socket.recv(4096).decode())
        except BlockingIOError:
            return found
        finally:
            self._socket.settimeout(30)

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def ear(tmp_path: Path) -> Iterator[Ear]:
    found = Ear(str(tmp_path / "notify"))
    yield found
    found.close()


def test_messages_are_those_of_sd_notify(ear: Ear) -> None:
    with Notifier(ear.address) as notifier:
        assert notifier.is_enabled
        notifier.ready("serving")
        assert ear.hear() == "READY=1\nSTATUS=serving"
        notifier.ready()
        assert ear.hear() == "READY=1"
        notifier.status("2 of 4 shards")
        assert ear.hear() == "STATUS=2 of 4 shards"
        notifier.stopping("draining")
        assert ear.hear() == "STOPPING=1\nSTATUS=draining"
        notifier.extend_timeout(1.5)
        assert ear.hear() == "EXTEND_TIMEOUT_USEC=1500000"
        notifier.main_pid(42)
        assert ear.hear() == "MAINPID=42"
        notifier.watchdog()
        assert ear.hear() == "WATCHDOG=1"


def test_reloading_carries_the_monotonic_time(ear: Ear) -> None:
    before = time.monotonic_ns() // 1000
    with Notifier(ear.address) as notifier:
        notifier.reloading()
    first, second = ear.hear().splitlines()
    assert first == "RELOADING=1"
    key, _, value = second.partition("=")
    assert key == "MONOTONIC_USEC"
    assert before <= int(value) <= time.monotonic_ns() // 1000


def test_an_abstract_address() -> None:
    ear = Ear(f"@changeover-test-{os.getpid()}")
    try:
        with Notifier(ear.address) as notifier:
            notifier.ready()
        assert ear.hear() == "READY=1"
    finally:
        ear.close()


def test_without_a_listener_nothing_happens() -> None:
    with Notifier.from_environment({}) as notifier:
        assert not notifier.is_enabled
        assert notifier.feed_interval_s is None
        notifier.ready("up")
        notifier.status("fine")
        notifier.watchdog()
        notifier.stopping()


@pytest.mark.parametrize("address", ["relative", "vsock:2:1234", "/", "@"])
def test_an_address_that_cannot_be_used_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="NOTIFY_SOCKET"):
        Notifier(address)


def test_a_status_cannot_carry_another_message(ear: Ear) -> None:
    with Notifier(ear.address) as notifier:
        notifier.status("loading\nREADY=1\x1b[31m")
    assert ear.hear() == r"STATUS=loading\nREADY=1\x1b[31m"


def test_a_long_status_is_cut_between_characters(ear: Ear) -> None:
    with Notifier(ear.address) as notifier:
        notifier.status("é" * STATUS_BYTES + "x")
        text = ear.hear().removeprefix("STATUS=")
        assert text == "é" * (STATUS_BYTES // 2)
        notifier.status("x" + "é" * STATUS_BYTES)
        text = ear.hear().removeprefix("STATUS=")
        assert text == "x" + "é" * ((STATUS_BYTES - 1) // 2)


def test_the_environment_is_taken_so_that_children_do_not_inherit_it(ear: Ear) -> None:
    environ = {
        "NOTIFY_SOCKET": ear.address,
        "WATCHDOG_USEC": "3000000",
        "WATCHDOG_PID": str(os.getpid()),
        "PATH": "/bin",
    }
    with Notifier.from_environment(environ) as notifier:
        assert environ == {"PATH": "/bin"}
        assert notifier.feed_interval_s == 1.5


def test_a_watchdog_for_another_process_is_not_fed(ear: Ear) -> None:
    environ = {"NOTIFY_SOCKET": ear.address, "WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "1"}
    with Notifier.from_environment(environ) as notifier:
        assert notifier.feed_interval_s is None


def test_a_watchdog_without_a_pid_is_for_this_process(ear: Ear) -> None:
    environ = {"NOTIFY_SOCKET": ear.address, "WATCHDOG_USEC": "3000000"}
    with Notifier.from_environment(environ) as notifier:
        assert notifier.feed_interval_s == 1.5


@pytest.mark.parametrize("limit", ["0", "-5", "soon", "", "٣"])
def test_a_watchdog_limit_that_is_no_time_is_refused(limit: str, ear: Ear) -> None:
    with pytest.raises(ConfigError, match="WATCHDOG_USEC"):
        Notifier.from_environment({"NOTIFY_SOCKET": ear.address, "WATCHDOG_USEC": limit})


def test_ready_must_arrive_and_status_need_not(tmp_path: Path) -> None:
    with Notifier(str(tmp_path / "nobody")) as notifier:
        notifier.status("fine")
        notifier.watchdog()
        notifier.stopping()  # a drain goes on, whether systemd hears of it or not
        notifier.extend_timeout(5)
        with pytest.raises(DriverError, match=r"READY=1.* failed with 2"):
            notifier.ready()


def test_what_is_said_while_requests_are_answered_never_waits(
    ear: Ear, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Notifier(ear.address) as notifier:
        refused: list[str] = []
        monkeypatch.setattr(notify, "_log", _Warnings(refused))
        # With no time limit, a call that waits for the full queue would never return.
        assert notifier._socket is not None
        notifier._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, notify._timeval(0))
        while not refused:
            notifier.status("again")
        notifier.watchdog()
        assert len(refused) == 2
    assert set(ear.pending()) == {"STATUS=again"}


class _Warnings:
    """A log that keeps the warnings."""

    def __init__(self, kept: list[str]) -> None:
        self._kept = kept

    def warning(self, event: str, **_: object) -> None:
        self._kept.append(event)


def test_a_full_queue_blocks_for_a_bounded_time(ear: Ear, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as filler:
        with suppress(BlockingIOError):
            while True:
                filler.sendto(b"X=1", ear.address)
        monkeypatch.setattr(notify, "SEND_TIMEOUT_S", 0.01)
        with Notifier(ear.address) as notifier:
            notifier.status("dropped")
            with pytest.raises(DriverError, match="READY=1"):
                notifier.ready()


def test_the_watchdog_is_fed_only_while_live(ear: Ear) -> None:
    async def run() -> int:
        answers = [True, False, False, True]
        asked = asyncio.Event()

        def is_live() -> bool:
            if len(answers) == 1:
                asked.set()
            return answers.pop(0) if len(answers) > 1 else answers[0]

        with Notifier(ear.address, watchdog_s=0.01) as notifier:
            feeding = asyncio.create_task(notifier.feed_watchdog(is_live))
            first = await asyncio.to_thread(ear.hear)
            assert first == "WATCHDOG=1"
            await asked.wait()
            silent = 4 - len(answers)
            await asyncio.to_thread(ear.hear)
            feeding.cancel()
            await asyncio.wait((feeding,))
            return silent

    assert asyncio.run(run()) == 3


def test_nothing_is_fed_while_not_live(ear: Ear) -> None:
    async def run() -> None:
        asked = asyncio.Event()
        times = 0

        def is_live() -> bool:
            nonlocal times
            times += 1
            if times == 5:
                asked.set()
            return False

        with Notifier(ear.address, watchdog_s=0.002) as notifier:
            feeding = asyncio.create_task(notifier.feed_watchdog(is_live))
            await asked.wait()
            feeding.cancel()
            await asyncio.wait((feeding,))

    asyncio.run(run())
    assert ear.pending() == []


def test_a_loop_that_hangs_gives_no_sign_of_life(ear: Ear) -> None:
    async def run() -> list[str]:
        with Notifier(ear.address, watchdog_s=0.01) as notifier:
            feeding = asyncio.create_task(notifier.feed_watchdog(lambda: True))
            await asyncio.to_thread(ear.hear)
            await asyncio.to_thread(ear.hear)
            ear.pending()
            time.sleep(0.1)  # noqa: ASYNC251  the hang
            said = ear.pending()
            feeding.cancel()
            await asyncio.wait((feeding,))
            return said

    assert asyncio.run(run()) == []


def test_without_a_watchdog_feeding_waits_for_its_cancellation(ear: Ear) -> None:
    async def run() -> bool:
        with Notifier(ear.address) as notifier:
            feeding = asyncio.create_task(notifier.feed_watchdog(lambda: True))
            await asyncio.wait((feeding,), timeout=0)
            has_ended = feeding.done()
            feeding.cancel()
            await asyncio.wait((feeding,))
            return has_ended

    assert asyncio.run(run()) is False
    assert ear.pending() == []


# --- a daemon under it ---------------------------------------------------------------------------

_DAEMON = """
with Notifier.from_environment() as notifier:
    async with Supervisor() as tasks:
        notifier.ready("up")
        tasks.start(notifier.feed_watchdog(lambda: True), name="watchdog")
        notifier.status("environment " + str(sorted(set(os.environ) & {"NOTIFY_SOCKET", "WATCHDOG_USEC"})))
        await stop.wait()
        notifier.stopping("asked by " + stop.reason)
"""


def test_a_daemon_tells_its_life_to_systemd(ear: Ear) -> None:
    environ = {"NOTIFY_SOCKET": ear.address, "WATCHDOG_USEC": "20000"}
    with small_daemon(_DAEMON, environ) as daemon:
        assert ear.hear() == "READY=1\nSTATUS=up"
        assert ear.hear() == "STATUS=environment []"
        assert [ear.hear() for _tick in range(3)] == ["WATCHDOG=1"] * 3
        daemon.send_signal(signal.SIGTERM)
        while (last := ear.hear()) == "WATCHDOG=1":
            pass
        assert last == "STOPPING=1\nSTATUS=asked by SIGTERM"
        assert daemon.wait(timeout=30) == 0


def test_a_daemon_that_crashes_says_nothing_and_exits_with_an_error(ear: Ear) -> None:
    body = """
    with Notifier.from_environment() as notifier:
        notifier.ready()
        raise RuntimeError("boom")
    """
    with small_daemon(body, {"NOTIFY_SOCKET": ear.address}) as daemon:
        assert daemon.wait(timeout=30) == 1
    assert ear.pending() == ["READY=1"]
