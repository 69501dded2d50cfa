"""`events`: what is shown, and that a break in the numbering is told."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from loaderd.ctl.event_stream import Numbering
from shared.control import Event
from tests.unit.ctl.command_line import finish, run, spawn
from tests.unit.ctl.scripted_daemon import ScriptedDaemon


def test_events_of_any_kind_are_shown_on_a_line_each(tmp_path: Path) -> None:
    with ScriptedDaemon(tmp_path) as daemon:
        process = spawn(tmp_path, "events")
        daemon.wait_subscribed()
        daemon.publish("operation.stage", model="smollm2", version="v2", operation="op-1", text="loading")
        daemon.publish("never.heard.of", data={"b": 2, "a": 1.5})
        assert process.stdout is not None
        lines = [process.stdout.readline(), process.stdout.readline()]
        process.send_signal(signal.SIGINT)
        ran = finish(process)
    assert lines == [
        "2025-06-15 15:06:40.000+00:00  #1  operation.stage  smollm2-v2  op-1  loading\n",
        "2025-06-15 15:06:40.000+00:00  #2  never.heard.of  a=1.5 b=2\n",
    ]
    assert (ran.code, ran.stderr) == (130, "")


def test_lost_events_and_a_restart_are_told(tmp_path: Path) -> None:
    with ScriptedDaemon(tmp_path) as daemon:
        process = spawn(tmp_path, "events")
        daemon.wait_subscribed()
        daemon.publish("a")
        daemon.publish("b", skip=3)
        assert process.stderr is not None
        lost = process.stderr.readline()
        daemon.stop()
    with ScriptedDaemon(tmp_path, "generation-2") as daemon:
        daemon.wait_subscribed()
        daemon.publish("daemon.started")
        restarted = process.stderr.readline()
        process.send_signal(signal.SIGINT)
        assert finish(process).code == 130
    assert lost == "3 events were lost before #5\n"
    assert restarted == "loaderd was restarted: generation generation-2\n"


def test_json_has_events_and_notices_and_a_filter_hides_other_operations(tmp_path: Path) -> None:
    with ScriptedDaemon(tmp_path) as daemon:
        process = spawn(tmp_path, "events", "--json", "--operation", "op-1")
        daemon.wait_subscribed()
        daemon.publish("operation.stage", operation="op-2")
        daemon.publish("operation.stage", operation="op-1", skip=1)
        daemon.publish_raw([b"junk", b"junk"])
        assert process.stdout is not None
        first = process.stdout.readline()
        second = process.stdout.readline()
        third = process.stdout.readline()
        process.send_signal(signal.SIGINT)
        ran = finish(process)
    ran.stdout = first + second + third + ran.stdout
    assert [line["event"] for line in ran.json_lines] == ["notice", "event", "notice"]
    assert ran.json_lines[0]["message"] == "1 events were lost before #3"
    assert ran.json_lines[1]["operation"] == "op-1"
    assert ran.json_lines[2]["message"] == "1 frames could not be read"


def test_nobody_to_listen_to_is_exit_6(tmp_path: Path) -> None:
    ran = run(tmp_path, "events")
    assert ran.code == 6
    assert f"{tmp_path}/events.sock" in ran.stderr


@pytest.mark.parametrize(
    ("before", "event", "notice"),
    [
        (("", 0), ("g", 17), ""),
        (("g", 17), ("g", 18), ""),
        (("g", 17), ("g", 19), "1 events were lost before #19"),
        (("g", 17), ("h", 1), "loaderd was restarted: generation h"),
    ],
)
def test_numbering(before: tuple[str, int], event: tuple[str, int], notice: str) -> None:
    numbering = Numbering(*before)
    generation, sequence = event
    seen = Event(protocol=1, generation=generation, sequence=sequence, time_ns=0, kind="k")
    assert numbering.observe(seen) == notice
    assert (numbering.generation, numbering.sequence) == event
