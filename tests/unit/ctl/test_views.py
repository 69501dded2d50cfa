"""How often something is said, with a clock that the test moves, and what the words are."""

from __future__ import annotations

import io
import json

import pytest

from loaderd.ctl.exit_codes import ExitCode, exit_code_of
from loaderd.ctl.follow import Conclusion
from loaderd.ctl.live_view import LiveView
from loaderd.ctl.operation_view import JsonView, LineView
from loaderd.ctl.summary import failure, outcome_lines, plan_lines, version_name
from loaderd.ctl.terminal import OutputClosedError, Terminal
from shared.errors import (
    ChangeoverError,
    ConfigError,
    DaemonUnreachable,
    DeadlineExceeded,
    DigestMismatch,
    InvalidName,
    InvalidRequest,
    InvariantError,
    NotPermitted,
    OutOfMemory,
    PlanRefused,
    ProtocolError,
    Superseded,
    UnknownVersion,
    WarmupFailed,
)
from tests.unit.ctl import reports
from tests.unit.ctl.reports import MIB, OPERATION


def test_lines_come_with_each_stage_and_about_every_two_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    view = LineView(Terminal(), lambda: now)
    view.report(reports.operation(stage="planning", bytes_read=0, load_s=0.0))
    for now, read in ((0.5, 1), (1.0, 2), (2.4, 3), (2.5, 4), (4.6, 4), (4.7, 5)):  # noqa: B007
        view.report(reports.operation(bytes_read=read * MIB, load_s=0.0))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [(line[0], line[2], line[3:4]) for line in lines] == [
        ("0.0", "planning", []),
        ("0.5", "loading", ["1.0"]),
        ("2.5", "loading", ["4.0"]),
        ("4.7", "loading", ["5.0"]),
    ]


def test_json_lines_come_with_news_only(capsys: pytest.CaptureFixture[str]) -> None:
    view = JsonView(Terminal())
    for _ in range(3):
        view.report(reports.operation())
    view.report(reports.operation(bytes_read=17 * MIB))
    events = [json.loads(line)["event"] for line in capsys.readouterr().out.splitlines()]
    assert events == ["stage", "progress", "progress"]


def test_each_bar_is_measured_by_its_own_bytes_and_full_when_its_stage_is_over() -> None:
    view = LiveView(Terminal())
    view.plan(reports.push_reply())
    view.report(reports.operation(stage="verifying", bytes_read=64 * MIB, bytes_verified=128 * MIB))
    read, verified, prepared = view._progress.tasks
    assert (read.percentage, prepared.percentage) == (100, 0)
    assert verified.fields["amount"] == "128.0 MiB of 257.0 MiB"
    assert verified.percentage == pytest.approx(100 * 128 / 257)
    view.report(reports.operation(stage="preparing", bytes_total=0, bytes_read=0, bytes_verified=257 * MIB))
    assert (read.percentage, verified.percentage) == (100, 100)
    view.report(reports.ended("failed", stage="loading", bytes_read=MIB, bytes_verified=0))
    assert read.percentage < 100


def test_what_only_a_signature_covers_has_a_bar_and_lines_of_its_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    hashing = reports.operation(stage="hashing", bytes_read=MIB, bytes_total=4 * MIB, load_s=0.0)
    LineView(Terminal(), lambda: 0.0).report(hashing)
    assert "0.0 s  hashing     1.0 MiB of 4.0 MiB (25 %)\n" in capsys.readouterr().out
    view = LiveView(Terminal())
    view.report(hashing)
    hashed, prepared = view._progress.tasks
    assert (hashed.description, hashed.percentage, prepared.percentage) == ("hashed", 25, 0)
    view.report(reports.operation(bytes_read=16 * MIB))
    _, _, read, _ = view._progress.tasks
    assert (hashed.percentage, read.description, read.percentage) == (100, "read", 25)


def test_a_plan_says_what_vouches_for_the_folder() -> None:
    def trust(**fields: bool) -> str:
        return list(plan_lines(reports.plan(**fields)))[1].text.rpartition("(")[2]

    assert trust(sealed=False) == "not sealed)"
    assert trust(signed=True, sealed=False) == "signed)"
    assert trust(signed=True) == "signed, sealed)"


def test_verified_bytes_are_measured_by_the_plan_or_not_at_all(capsys: pytest.CaptureFixture[str]) -> None:
    verifying = reports.operation(stage="verifying", bytes_verified=128 * MIB, verify_s=0.25)
    view = LineView(Terminal(), lambda: 0.0)
    view.plan(reports.push_reply())
    view.report(verifying)
    assert "verifying   128.0 MiB of 257.0 MiB (49 %), 256.0 MiB/s\n" in capsys.readouterr().out
    LineView(Terminal(), lambda: 0.0).report(verifying)
    assert "verifying   128.0 MiB, 256.0 MiB/s\n" in capsys.readouterr().out


def test_a_version_is_called_as_its_folder() -> None:
    assert version_name(reports.operation(version="v2")) == "smollm2-v2"
    assert version_name(reports.operation(version="smollm2-v2")) == "smollm2-v2"


def test_a_plan_that_gives_up_the_way_back_says_so() -> None:
    devices = (reports.on_device("GPU-1"), reports.on_device("GPU-2", free_bytes=MIB))
    lines = [line.text for line in plan_lines(reports.plan(devices=devices, sweep_first=True))]
    assert [line for line in lines if "memory of" in line] == [
        "  memory of GPU-1: allocate 64.0 MiB of 6.0 GiB free, peak of all weights 66.0 MiB",
        "  memory of GPU-2: allocate 64.0 MiB of 1.0 MiB free, peak of all weights 66.0 MiB",
    ]
    assert any("cannot be rolled back to" in line for line in lines)


def test_what_a_refused_push_would_release_is_not_said_to_be_released() -> None:
    lines = [line.text for line in plan_lines(reports.plan(verdict="cold", sweep_first=True))]
    assert not [line for line in lines if "released" in line]


def test_a_push_that_nobody_serves_says_so() -> None:
    alone = reports.ended("done", inferds_total=0, inferds_committed=0, flip_ns=())
    lines = [line.text for line in outcome_lines(Conclusion(ExitCode.DONE, OPERATION, alone))]
    assert "  inferds  none is attached; those that attach later are given it" in lines


def test_a_failure_without_a_cause_is_still_told() -> None:
    report = reports.ended("failed", error=None)
    assert failure(Conclusion(ExitCode.FAILED, OPERATION, report)) == (
        "push of smollm2-v2 ended as failed, no cause was given"
    )


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidName(what="version", name="x"), 2),
        (InvalidRequest("x"), 2),
        (UnknownVersion("x"), 2),
        (DigestMismatch("x", file="a"), 3),
        (WarmupFailed("x"), 3),
        (OutOfMemory(what="x", needed_bytes=2, free_bytes=1), 3),
        (ConfigError("x"), 3),
        (InvariantError("x"), 3),
        (ChangeoverError("of a class this build does not know"), 3),
        (DeadlineExceeded("x"), 4),
        (PlanRefused("x"), 5),
        (DaemonUnreachable("x"), 6),
        (ProtocolError("x"), 6),
        (NotPermitted("x"), 7),
        (Superseded("x"), 8),
    ],
)
def test_errors_have_exit_codes(error: ChangeoverError, code: int) -> None:
    assert exit_code_of(error) == code


def test_exit_codes_are_what_scripts_rely_on() -> None:
    assert {code.name: code.value for code in ExitCode} == {
        "DONE": 0,
        "USAGE": 2,
        "FAILED": 3,
        "TIMED_OUT": 4,
        "REFUSED": 5,
        "UNREACHABLE": 6,
        "NOT_PERMITTED": 7,
        "SUPERSEDED": 8,
        "INTERRUPTED": 130,
        "CLOSED_PIPE": 141,
    }


def test_a_closed_reader_is_one_kind_of_error_on_every_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr("sys.stdout", Closed())
    terminal = Terminal()
    with pytest.raises(OutputClosedError):
        terminal.json({})
    with pytest.raises(OutputClosedError):
        terminal.line("x")
