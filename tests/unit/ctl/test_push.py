"""`push`, `rollback` and `wait` as processes against a scripted daemon: every exit code."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from shared.control import OperationReport, Push, RollbackReply
from shared.errors import InvalidRequest, NotPermitted, UnknownVersion
from tests.unit.ctl import reports
from tests.unit.ctl.command_line import OnTerminal, environment, finish, run, spawn
from tests.unit.ctl.reports import OPERATION
from tests.unit.ctl.scripted_daemon import ScriptedDaemon


def test_push_shows_the_plan_each_stage_and_the_outcome(tmp_path: Path) -> None:
    with ScriptedDaemon(tmp_path) as daemon:
        daemon.on("push", reports.push_reply(warnings=("no tensor changed",)))
        done = reports.ended(warnings=("no tensor changed", "a straggler was fenced"))
        daemon.play([*reports.a_whole_push()[:-1], done])
        ran = run(tmp_path, "push", "smollm2-v2")
    assert (ran.code, ran.stderr) == (0, "")
    assert ran.stdout.splitlines()[:3] == [
        "plan for smollm2-v2: hot",
        "  read 64.0 MiB, share 193.0 MiB already resident, of 257.0 MiB in 272 tensors (sealed)",
        "  memory of host: allocate 64.0 MiB of 6.0 GiB free, peak of all weights 66.0 MiB",
    ]
    assert ran.stdout.count("  warning: no tensor changed\n") == 1
    stages = [line.split()[2] for line in ran.stdout.splitlines() if " s  " in line]
    assert stages == ["planning", "loading", "verifying", "preparing", "committing"]
    assert ran.stdout.splitlines()[-7:] == [
        f"done: push of smollm2-v2 serves ({OPERATION})",
        f"  digest   {reports.DIGEST_2}",
        "  epoch    7",
        "  times    load 500 ms (128.0 MiB/s), verify 125 ms (512.0 MiB/s), prepare 1.5 s, commit 2.1 ms",
        "  inferds  2 of 2 committed",
        "  flips    18.4 µs, 21.9 µs",
        "  warning: a straggler was fenced",
    ]


def test_push_sends_what_was_asked(tmp_path: Path) -> None:
    with ScriptedDaemon(tmp_path) as daemon:
        daemon.on("push", reports.push_reply(None))
        run(tmp_path, "push", "smollm2-v2", "--model", "smollm2", "--dry-run")
        body = daemon.asked[0].body
    assert body == Push(name="smollm2-v2", model="smollm2", dry_run=True)


def test_json_is_one_object_per_line_and_the_last_is_the_result(tmp_path: Path) -> None:
    with ScriptedDaemon(tmp_path) as daemon:
        daemon.on("push", reports.push_reply()).play(reports.a_whole_push())
        ran = run(tmp_path, "push", "smollm2-v2", "--json")
    assert (ran.code, ran.stderr) == (0, "")
    lines = ran.json_lines
    assert lines[0]["event"] == "plan"
    assert lines[0]["operation"] == OPERATION
    assert [line["stage"] for line in lines if line["event"] == "stage"] == [
        "planning",
        "loading",
        "verifying",
        "preparing",
        "committing",
        "finished",
    ]
    assert sum(line["event"] == "progress" for line in lines) == len(reports.a_whole_push())
    assert lines[-1] == {
        "event": "result",
        "operation": OPERATION,
        "outcome": "done",
        "exit_code": 0,
        "message": "",
        "report": reports.ended().model_dump(mode="json"),
    }


@pytest.mark.parametrize("is_json", [False, True])
def test_a_dry_run_starts_nothing(tmp_path: Path, is_json: bool) -> None:
    with ScriptedDaemon(tmp_path) as daemon:
        daemon.on("push", reports.push_reply(None))
        ran = run(tmp_path, "push", "smollm2-v2", "--dry-run", *(["--json"] if is_json else []))
        assert daemon.count("operation") == 0
    assert (ran.code, ran.stderr) == (0, "")
    if is_json:
        assert [line["event"] for line in ran.json_lines] == ["plan", "result"]


@pytest.mark.parametrize(("verdict", "dry_run"), [("refuse", False), ("cold", False), ("refuse", True)])
def test_a_refusal_is_exit_5_with_each_reason_on_its_line(
    tmp_path: Path, verdict: str, dry_run: bool
) -> None:
    reasons = ("tensor lm_head.weight is missing", "needs 80 GiB, 12 GiB are free")
    with ScriptedDaemon(tmp_path) as daemon:
        daemon.on("push", reports.push_reply(None, verdict=verdict, reasons=reasons))
        ran = run(tmp_path, "push", "smollm2-v2", *(["--dry-run"] if dry_run else []))
    assert ran.code == 5
    assert [line for line in ran.stdout.splitlines() if "reason" in line] == [
        "  reason: tensor lm_head.weight is missing",
        "  reason: needs 80 GiB, 12 GiB are free",
    ]
    assert "nothing was changed" in ran.stderr
    assert ("does not fit into memory beside what serves" in ran.stderr) is (verdict == "cold")


@pytest.mark.parametrize(
    ("last", "code", "said"),
    [
        (
            reports.ended("failed", error=reports.wire_error("digest_mismatch", "a.safetensors: x: wrong")),
            3,
            "error: a.safetensors: x: wrong [digest_mismatch]",
        ),
        (reports.ended("refused", error=reports.wire_error("refused", "no room left")), 5, "no room left"),
        (reports.ended("superseded"), 8, "a newer push of smollm2 took the place"),
    ],
)
def test_the_exit_code_says_how_the_operation_ended(
    tmp_path: Path, last: OperationReport, code: int, said: str
) -> None:
    with ScriptedDaemon(tmp_path) as daemon:
        daemon.on("push", reports.push_reply()).play([reports.operation(), last])
        ran = run(tmp_path, "push", "smollm2-v2")
        again = run(tmp_path, "wait", OPERATION, "--json")
    assert ran.code == code
    assert said in ran.stderr
    assert again.code == code
    assert again.json_lines[-1]["exit_code"] == code


def test_a_timeout_is_exit_4_and_says_how_to_go_on(tmp_path: Path) -> None:
    with ScriptedDaemon(tmp_path) as daemon:
        daemon.on("push", reports.push_reply()).on("operation", reports.operation())
        ran = run(tmp_path, "push", "smollm2-v2", "--timeout", "0.3")
    assert ran.code == 4
    assert f"loaderctl wait {OPERATION}" in ran.stderr


def test_not_permitted_is_exit_7_with_who_may(tmp_path: Path) -> None:
    with ScriptedDaemon(tmp_path) as daemon:
        daemon.on("push", NotPermitted("uid 1000 may not push; root, uid 990 and members of group ops may"))
        ran = run(tmp_path, "push", "smollm2-v2")
        with_json = run(tmp_path, "push", "smollm2-v2", "--json")
    assert ran.code == with_json.code == 7
    assert ran.stderr == "error: uid 1000 may not push; root, uid 990 and members of group ops may\n"
    assert with_json.json_lines == [
        {
            "event": "error",
            "code": "not_permitted",
            "message": "uid 1000 may not push; root, uid 990 and members of group ops may",
            "facts": {},
            "outcome": "not_permitted",
            "exit_code": 7,
        }
    ]


@pytest.mark.parametrize(
    "arguments",
    [
        ("push", "../etc"),
        ("push", "v2", "--timeout", "-1"),
        ("push",),
        ("push", "v2", "--model", "a/b"),
        ("push", "v2", "--wait", "--detach"),
        ("rollback", "--to", "../v1"),
        ("rollback", "--detach", "--wait"),
        ("wait", "a b"),
        ("history", "-n", "0"),
        ("no-such-command",),
    ],
)
def test_a_wrong_command_line_is_exit_2_and_asks_nothing(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    with ScriptedDaemon(tmp_path) as daemon:
        ran = run(tmp_path, *arguments)
        assert daemon.asked == []
    assert (ran.code, ran.stdout) == (2, "")
    assert ran.stderr


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (
            ("push", "v2", "--detach", "--timeout", "5"),
            "--detach does not wait, and --timeout says for how long",
        ),
        (
            ("rollback", "--timeout", "0", "--detach"),
            "--detach does not wait, and --timeout says for how long",
        ),
        (
            ("push", "v2", "--dry-run", "--detach"),
            "--dry-run starts nothing that could be waited for; leave out --detach",
        ),
        (("push", "v2", "--dry-run", "--wait", "--timeout", "5"), "leave out --wait and --timeout"),
        (
            ("verify", "tiny-v2", "--jobs", "2"),
            "--jobs is for folders: tiny-v2 is a version, ./tiny-v2 a folder",
        ),
    ],
)
def test_an_option_that_would_be_ignored_is_told_why_and_nothing_is_asked(
    tmp_path: Path, arguments: tuple[str, ...], why: str
) -> None:
    with ScriptedDaemon(tmp_path) as daemon:
        ran = run(tmp_path, *arguments)
        assert daemon.asked == []
    assert (ran.code, ran.stdout) == (2, "")
    assert ran.stderr.startswith("error: ")
    assert why in ran.stderr


@pytest.mark.parametrize(
    "arguments", [("push", "smollm2-v1/"), ("diff", "smollm2-v1", "/srv/models/smollm2-v2")]
)
def test_a_path_in_place_of_a_name_is_told_what_is_expected(
    tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    ran = run(tmp_path, *arguments)
    assert ran.code == 2
    assert ran.stderr == (
        f"error: {arguments[-1]!r} is not a valid version (expected MODEL-vN, the name of a folder below a "
        "model root, no path)\n"
    )


def test_a_name_that_loaderd_does_not_know_is_exit_2(tmp_path: Path) -> None:
    with ScriptedDaemon(tmp_path) as daemon:
        daemon.on("push", UnknownVersion("no folder smollm2-v9 below /srv/models"))
        daemon.on("operation", InvalidRequest("no operation x since loaderd started"))
        assert run(tmp_path, "push", "smollm2-v9").code == 2
        assert run(tmp_path, "wait", "x").code == 2


@pytest.mark.parametrize("is_json", [False, True])
def test_detach_returns_at_once_with_the_way_back(tmp_path: Path, is_json: bool) -> None:
    with ScriptedDaemon(tmp_path) as daemon:
        daemon.on("push", reports.push_reply())
        ran = run(tmp_path, "push", "smollm2-v2", "--detach", *(["--json"] if is_json else []))
        assert daemon.count("operation") == 0
    assert (ran.code, ran.stderr) == (0, "")
    if is_json:
        assert [line["event"] for line in ran.json_lines] == ["plan", "started", "result"]
        assert ran.json_lines[-1]["operation"] == OPERATION
    else:
        assert f"loaderctl wait {OPERATION}" in ran.stdout.splitlines()[-1]


def test_rollback_needs_no_plan(tmp_path: Path) -> None:
    rolled = {"kind": "rollback", "version": "v1", "bytes_total": 0, "bytes_read": 0, "load_s": 0.0}
    with ScriptedDaemon(tmp_path) as daemon:
        daemon.on("rollback", RollbackReply(operation=OPERATION))
        daemon.play(
            [
                reports.operation(stage="committing", **rolled),
                reports.ended(**rolled, bytes_verified=0, verify_s=0.0, prepare_s=0.0),
            ]
        )
        ran = run(tmp_path, "rollback", "--to", "v1")
        assert daemon.asked[0].body.model_dump() == {
            "verb": "rollback",
            "model": None,
            "to": "v1",
            "in_flight": "finish",
        }
    assert (ran.code, ran.stderr) == (0, "")
    assert f"done: rollback of smollm2-v1 serves ({OPERATION})" in ran.stdout
    assert "loading" not in ran.stdout


def test_ctrl_c_detaches_and_says_how_to_reattach(tmp_path: Path) -> None:
    with ScriptedDaemon(tmp_path) as daemon:
        daemon.on("push", reports.push_reply()).play([reports.operation()])
        process = spawn(tmp_path, "push", "smollm2-v2")
        daemon.wait_asked("operation", 2)
        process.send_signal(signal.SIGINT)
        ran = finish(process)
    assert ran.code == 130
    assert f"interrupted; {OPERATION} goes on" in ran.stderr
    assert f"loaderctl wait {OPERATION}" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_ctrl_c_before_the_answer_does_not_claim_to_know(tmp_path: Path) -> None:
    with ScriptedDaemon(tmp_path) as daemon:
        daemon.on("push", None)
        process = spawn(tmp_path, "push", "smollm2-v2", "--json")
        daemon.wait_asked("push")
        process.send_signal(signal.SIGINT)
        ran = finish(process)
    assert ran.code == 130
    assert ran.json_lines[-1]["outcome"] == "interrupted"
    assert "loaderctl status" in str(ran.json_lines[-1]["message"])


def test_ctrl_c_on_a_terminal_detaches(tmp_path: Path) -> None:
    with ScriptedDaemon(tmp_path) as daemon:
        daemon.on("push", reports.push_reply()).play([reports.operation()])
        terminal = OnTerminal.spawn(tmp_path, "push", "smollm2-v2")
        daemon.wait_asked("operation", 2)
        terminal.press_ctrl_c()
        ran = terminal.finish()
    assert ran.code == 130
    assert f"loaderctl wait {OPERATION}" in ran.stdout
    assert ran.stdout.rindex("\x1b[?25h") > ran.stdout.rindex("\x1b[?25l"), "the cursor stays hidden"


def test_a_terminal_gets_bars(tmp_path: Path) -> None:
    with ScriptedDaemon(tmp_path) as daemon:
        daemon.on("push", reports.push_reply()).play(reports.a_whole_push())
        ran = OnTerminal.spawn(tmp_path, "push", "smollm2-v2").finish()
    assert ran.code == 0
    for bar in ("read", "verified", "prepared"):
        assert re.search(rf"^{bar} +━", ran.screen, re.MULTILINE), bar
    assert "16.0 MiB of 64.0 MiB" in ran.stdout
    assert "1 of 2 inferds" in ran.stdout
    assert "done: push of smollm2-v2 serves" in ran.stdout
    assert ran.stdout.rindex("\x1b[?25h") > ran.stdout.rindex("\x1b[?25l"), "the cursor stays hidden"


def test_no_color_is_heard_from_the_option_and_the_variable(tmp_path: Path) -> None:
    with ScriptedDaemon(tmp_path) as daemon:
        daemon.on("push", reports.push_reply(None, verdict="refuse", reasons=("why",)))
        coloured = OnTerminal.spawn(tmp_path, "push", "v2").finish()
        by_option = OnTerminal.spawn(tmp_path, "--no-color", "push", "v2").finish()
        by_variable = OnTerminal.spawn(tmp_path, "push", "v2", env=environment(NO_COLOR="1")).finish()
    assert "\x1b[31m" in coloured.stdout
    assert "\x1b[31m" not in by_option.stdout
    assert "\x1b[31m" not in by_variable.stdout


def test_a_closed_pipe_ends_quietly(tmp_path: Path) -> None:
    with ScriptedDaemon(tmp_path) as daemon:
        daemon.on("push", reports.push_reply()).on("operation", reports.operation())
        process = spawn(tmp_path, "push", "smollm2-v2", "--json")
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        daemon.on("operation", reports.ended())
        assert process.stderr is not None
        assert process.stderr.read() == ""
        with process:
            assert process.wait(30) == 141


def test_a_pipe_closed_before_a_table_ends_quietly(tmp_path: Path) -> None:
    with ScriptedDaemon(tmp_path) as daemon:
        daemon.on("status", reports.status())
        reader, writer = os.pipe()
        os.close(reader)
        process = spawn(tmp_path, "status", stdout=writer)
        os.close(writer)
        ran = finish(process)
    assert (ran.code, ran.stderr) == (141, "")
