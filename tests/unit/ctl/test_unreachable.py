"""A daemon that is not there, does not answer or speaks another language: exit 6 and what to try."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from loaderd.ctl.client import ControlClient
from shared.codec import CONTROL_FRAME_BYTES, PROTOCOL_VERSION, encode
from shared.control import Push, PushReply, Reply, Rollback, RollbackReply, Status, StatusReport, Verb
from shared.errors import DaemonUnreachable, NotPermitted, ProtocolError
from shared.messages import WireError
from shared.run_dir import RunDir
from tests.unit.ctl import reports
from tests.unit.ctl.command_line import environment, run
from tests.unit.ctl.scripted_daemon import WAIT_S, ScriptedDaemon


@pytest.fixture
def client(tmp_path: Path) -> Iterator[ControlClient]:
    with ControlClient(RunDir(tmp_path)) as client:
        yield client


@pytest.mark.parametrize(
    "command", [("status",), ("push", "v2"), ("rollback",), ("wait", "x"), ("verify", "v2")]
)
def test_no_socket_is_exit_6_and_says_which(tmp_path: Path, command: tuple[str, ...]) -> None:
    ran = run(tmp_path, *command)
    assert (ran.code, ran.stdout) == (6, "")
    assert f"{tmp_path}/control.sock does not exist" in ran.stderr
    assert "systemctl status loaderd" in ran.stderr


def test_with_json_an_error_is_json_too(tmp_path: Path) -> None:
    ran = run(tmp_path, "status", "--json")
    assert ran.code == 6
    assert [(line["event"], line["code"], line["exit_code"]) for line in ran.json_lines] == [
        ("error", "unreachable", 6)
    ]


def test_the_run_directory_comes_from_the_environment_and_the_option_wins(tmp_path: Path) -> None:
    ran = run(tmp_path, "status", env=environment(CHANGEOVER_RUN_DIR="/nonexistent"))
    assert f"{tmp_path}/control.sock" in ran.stderr


def test_a_socket_that_was_left_behind_is_exit_6(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(tmp_path / "control.sock"))
    ran = run(tmp_path, "status")
    assert ran.code == 6
    assert "left behind" in ran.stderr


def test_a_path_that_no_socket_can_have_is_exit_6(tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 120)
    deep.mkdir()
    ran = run(tmp_path, "--run-dir", str(deep), "status")
    assert ran.code == 6
    assert "too long" in ran.stderr


def test_something_else_that_listens_is_unreachable(tmp_path: Path, client: ControlClient) -> None:
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(tmp_path / "control.sock"))
        other.listen()
        with pytest.raises(DaemonUnreachable, match="nobody speaks ZeroMQ"):
            client.ask(Status(), StatusReport, 0.2)


def test_silence_is_unreachable_after_the_deadline_and_a_late_answer_is_dropped(
    tmp_path: Path, client: ControlClient
) -> None:
    with ScriptedDaemon(tmp_path) as daemon:
        daemon.on("status", None)
        with pytest.raises(
            DaemonUnreachable, match=r"no answer on .* within 0\.2 s; try: \S+ status loaderd$"
        ):
            client.ask(Status(), StatusReport, 0.2)
        daemon.on("status", reports.status(pid=1))
        assert client.ask(Status(), StatusReport).pid == 1


def test_of_what_changes_something_it_is_said_that_it_may_be_carried_out(
    tmp_path: Path, client: ControlClient
) -> None:
    with ScriptedDaemon(tmp_path) as daemon:
        daemon.on("rollback", None)
        with pytest.raises(DaemonUnreachable, match=r"the rollback was sent and not answered, and may be"):
            client.ask(Rollback(), RollbackReply, 0.2)


def test_a_late_error_without_an_id_is_not_taken_for_the_next_answer(
    tmp_path: Path, client: ControlClient
) -> None:
    late = Reply(protocol=PROTOCOL_VERSION, request_id="", error=WireError(code="protocol", message="late"))
    is_given_up = threading.Event()

    def answer_late(_: Verb) -> bytes:
        is_given_up.wait(WAIT_S)
        daemon.on("status", reports.status())
        return encode(late, CONTROL_FRAME_BYTES)

    with ScriptedDaemon(tmp_path) as daemon:
        daemon.on("status", answer_late)
        with pytest.raises(DaemonUnreachable):
            client.ask(Status(), StatusReport, 0.2)
        is_given_up.set()
        assert client.ask(Status(), StatusReport) == reports.status()


def test_a_daemon_that_went_away_since_the_last_request_is_said_to_be_away(
    tmp_path: Path, client: ControlClient
) -> None:
    with ScriptedDaemon(tmp_path) as daemon:
        daemon.on("status", reports.status())
        client.ask(Status(), StatusReport)
    with pytest.raises(DaemonUnreachable, match="loaderd is not there"):
        client.ask(Status(), StatusReport, 0.2)


def test_a_reply_to_another_request_is_not_taken(tmp_path: Path, client: ControlClient) -> None:
    reply = Reply(protocol=PROTOCOL_VERSION, request_id="another", result=reports.status())
    with ScriptedDaemon(tmp_path) as daemon:
        daemon.on("status", encode(reply, CONTROL_FRAME_BYTES))
        with pytest.raises(DaemonUnreachable):
            client.ask(Status(), StatusReport, 0.2)


def test_a_request_that_the_daemon_could_not_read_gets_its_error(
    tmp_path: Path, client: ControlClient
) -> None:
    refused = WireError(code="protocol", message="message refused at body: unknown verb")
    reply = Reply(protocol=PROTOCOL_VERSION, request_id="", error=refused)
    with ScriptedDaemon(tmp_path) as daemon:
        daemon.on("status", encode(reply, CONTROL_FRAME_BYTES))
        with pytest.raises(ProtocolError, match="unknown verb"):
            client.ask(Status(), StatusReport)


@pytest.mark.parametrize(
    ("frame", "said"),
    [
        (b"\xc1", "not msgpack"),
        (
            encode(
                Reply(protocol=99, request_id="x", error=WireError(code="e", message="m")),
                CONTROL_FRAME_BYTES,
            ),
            "speaks protocol 99",
        ),
    ],
)
def test_another_language_is_exit_6(tmp_path: Path, frame: bytes, said: str) -> None:
    with ScriptedDaemon(tmp_path) as daemon:
        daemon.on("status", frame)
        ran = run(tmp_path, "status")
    assert ran.code == 6
    assert said in ran.stderr


def test_an_answer_of_the_wrong_kind_is_a_protocol_error(tmp_path: Path, client: ControlClient) -> None:
    with ScriptedDaemon(tmp_path) as daemon:
        daemon.on("status", reports.history())
        with pytest.raises(ProtocolError, match="answered status with HistoryReport"):
            client.ask(Status(), StatusReport)


def test_a_request_that_was_given_up_is_not_kept_for_a_later_daemon(
    tmp_path: Path, client: ControlClient
) -> None:
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(tmp_path / "control.sock"))
        other.listen()
        with pytest.raises(DaemonUnreachable):
            client.ask(Push(name="smollm2-v2"), PushReply, 0.1)
    (tmp_path / "control.sock").unlink()
    with ScriptedDaemon(tmp_path) as daemon:
        daemon.on("status", reports.status())
        client.ask(Status(), StatusReport)
        assert [request.body.verb for request in daemon.asked] == ["status"]


def test_a_request_carries_protocol_and_deadline(tmp_path: Path, client: ControlClient) -> None:
    before_ns = time.monotonic_ns()
    with ScriptedDaemon(tmp_path) as daemon:
        daemon.on("status", reports.status())
        client.ask(Status(), StatusReport, 20.0)
        request = daemon.asked[0]
    assert request.protocol == PROTOCOL_VERSION
    assert before_ns + 20_000_000_000 <= request.deadline_ns <= time.monotonic_ns() + 20_000_000_000


def test_a_socket_that_may_not_be_opened_says_who_may(
    tmp_path: Path, client: ControlClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "control.sock").touch()
    monkeypatch.setattr(socket.socket, "connect", refuse)
    with pytest.raises(NotPermitted, match=r"may not open .*control\.sock; root, .* and group .* may"):
        client.ask(Status(), StatusReport)
