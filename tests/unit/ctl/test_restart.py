"""Lost events, and a daemon that goes away and comes back while a push is watched."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.errors import InvalidRequest
from tests.unit.ctl import reports
from tests.unit.ctl.command_line import OnTerminal, finish, run, spawn
from tests.unit.ctl.reports import OPERATION
from tests.unit.ctl.scripted_daemon import ScriptedDaemon


def test_a_push_is_followed_to_its_end_without_a_single_event(tmp_path: Path) -> None:
    script = iter([reports.operation(), reports.operation(stage="preparing"), reports.ended()])
    with ScriptedDaemon(tmp_path) as daemon:
        daemon.on("push", reports.push_reply()).on("operation", lambda _: next(script))
        ran = run(tmp_path, "push", "smollm2-v2")
    assert (ran.code, ran.stderr) == (0, "")


def test_a_push_is_followed_where_there_is_no_event_socket(tmp_path: Path) -> None:
    with ScriptedDaemon(tmp_path) as daemon:
        (tmp_path / "events.sock").unlink()
        daemon.on("push", reports.push_reply()).on("operation", reports.ended())
        ran = run(tmp_path, "push", "smollm2-v2")
    assert (ran.code, ran.stderr) == (0, "")


def test_events_that_cannot_be_read_do_no_harm(tmp_path: Path) -> None:
    with ScriptedDaemon(tmp_path) as daemon:
        daemon.on("push", reports.push_reply()).on("operation", reports.operation())
        process = spawn(tmp_path, "push", "smollm2-v2")
        daemon.wait_subscribed()
        daemon.publish_raw([b"operation.progress", b"\xc1 not msgpack"])
        daemon.publish_raw([b"one frame"])
        daemon.on("operation", reports.ended())
        ran = finish(process)
    assert (ran.code, ran.stderr) == (0, "")


def test_a_restart_in_mid_push_is_said_once_and_then_waited_out(tmp_path: Path) -> None:
    with ScriptedDaemon(tmp_path) as daemon:
        daemon.on("push", reports.push_reply()).play([reports.operation()])
        process = spawn(tmp_path, "push", "smollm2-v2")
        daemon.wait_asked("operation", 2)
        daemon.stop()
        assert process.stderr is not None
        said = process.stderr.readline()
    with ScriptedDaemon(tmp_path, "generation-2").play(
        [reports.operation(stage="preparing"), reports.ended()]
    ):
        ran = finish(process)
    assert said.endswith("try: systemctl status loaderd; still trying, the operation may go on\n")
    assert "sent" not in said
    assert ran.code == 0
    assert ran.stderr == "loaderd answers again\n"
    assert "done: push of smollm2-v2 serves" in ran.stdout


def test_a_restart_is_said_above_the_bars_of_a_terminal(tmp_path: Path) -> None:
    with ScriptedDaemon(tmp_path) as daemon:
        daemon.on("push", reports.push_reply()).play([reports.operation()])
        terminal = OnTerminal.spawn(tmp_path, "push", "smollm2-v2")
        daemon.wait_asked("operation", 2)
        daemon.stop()
        terminal.read_until("still trying")
    with ScriptedDaemon(tmp_path, "generation-2").play([reports.ended()]):
        ran = terminal.finish()
    assert ran.code == 0
    assert ran.screen.count("still trying") == 1
    assert "loaderd answers again" in ran.screen


@pytest.mark.parametrize("is_json", [False, True])
def test_a_push_that_the_new_daemon_does_not_know_is_exit_3(tmp_path: Path, is_json: bool) -> None:
    with ScriptedDaemon(tmp_path) as daemon:
        daemon.on("push", reports.push_reply()).play([reports.operation()])
        process = spawn(tmp_path, "push", "smollm2-v2", *(["--json"] if is_json else []))
        daemon.wait_asked("operation", 2)
        daemon.stop()
    unknown = InvalidRequest(f"no operation {OPERATION} since loaderd started")
    with ScriptedDaemon(tmp_path, "generation-2").on("operation", unknown):
        ran = finish(process)
    assert ran.code == 3
    if is_json:
        assert ran.json_lines[-1]["exit_code"] == 3
        assert "does not know" in str(ran.json_lines[-1]["message"])
    else:
        assert f"does not know {OPERATION} any more" in ran.stderr
        assert "loaderctl status" in ran.stderr
        assert "loaderctl history" in ran.stderr


def test_a_daemon_that_stays_away_until_the_timeout_is_exit_6(tmp_path: Path) -> None:
    with ScriptedDaemon(tmp_path) as daemon:
        daemon.on("push", reports.push_reply()).play([reports.operation()])
        process = spawn(tmp_path, "push", "smollm2-v2", "--timeout", "3", "--json")
        daemon.wait_asked("operation", 2)
        daemon.stop()
        ran = finish(process)
    assert ran.code == 6
    assert [line["event"] for line in ran.json_lines[-2:]] == ["unreachable", "result"]
    assert f"loaderctl wait {OPERATION}" in str(ran.json_lines[-1]["message"])
