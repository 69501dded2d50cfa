"""`status`, `versions`, `history` and `diff`: what is shown, and JSON that is the daemon's report."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from pydantic import BaseModel

from tests.unit.ctl import reports
from tests.unit.ctl.command_line import OnTerminal, finish, run, spawn
from tests.unit.ctl.scripted_daemon import ScriptedDaemon


def test_status_shows_models_slots_references_and_holders_with_their_ages(tmp_path: Path) -> None:
    with ScriptedDaemon(tmp_path) as daemon:
        daemon.on("status", reports.status())
        ran = run(tmp_path, "status")
    assert (ran.code, ran.stderr) == (0, "")
    rows = [" ".join(line.split()) for line in ran.stdout.splitlines()]
    assert "smollm2 v2@2b2b2b2b2b2b 7 v1@1a1a1a1a1a1a" in rows
    assert (
        f"{reports.OPERATION} push smollm2-v2 running loading 16.0 MiB of 64.0 MiB (25 %), 64.0 MiB/s" in rows
    )
    assert "replica-0 4242 smollm2 host 7 2h03m 3 0 retained v1 refs 0 12s serving v2 refs 3 12s" in rows
    assert "smollm2-v1 replica-1 4243 host draining 1 1h06m" in rows
    assert "host 321.0 MiB 6.0 GiB 387.0 MiB" in rows
    assert "devices" not in rows


def test_status_shows_what_is_damaged_and_what_is_throttled(tmp_path: Path) -> None:
    report = reports.status()
    slots = tuple(s.model_copy(update={"is_damaged": s.state == "retained"}) for s in report.inferds[0].slots)
    retained = report.versions[0].model_copy(update={"damaged": ("a.weight", "b\x1b[2J")})
    slowed = reports.operation(limit_bytes_per_s=128 * reports.MIB)
    changes = {
        "versions": (retained, *report.versions[1:]),
        "inferds": (report.inferds[0].model_copy(update={"slots": slots}),),
        "models": (report.models[0].model_copy(update={"operation": slowed}),),
    }
    with ScriptedDaemon(tmp_path) as daemon:
        daemon.on("status", report.model_copy(update=changes))
        ran = run(tmp_path, "status")
    text = " ".join(ran.stdout.split())
    assert "smollm2-v1 is DAMAGED: a.weight, b\\x1b[2J" in text
    assert "retained v1 refs 0 12s DAMAGED serving v2 refs 3 12s" in text
    assert "64.0 MiB/s, throttled to 128.0 MiB/s to spare requests" in text


def test_status_shows_what_is_known_of_a_gpu(tmp_path: Path) -> None:
    known = reports.gpu_memory()
    unknown = known.model_copy(
        update={"device": "GPU-2", "pool_bytes": 0, "nvml_free_bytes": None, "uncorrected_errors": None}
    )
    with ScriptedDaemon(tmp_path) as daemon:
        daemon.on("status", reports.status().model_copy(update={"memory": (known, unknown)}))
        ran = run(tmp_path, "status")
    assert (ran.code, ran.stderr) == (0, "")
    rows = [" ".join(line.split()) for line in ran.stdout.splitlines()]
    assert "device total nvml free pool reserved largest frag ecc" in rows
    assert "GPU-1 80.0 GiB 7.0 GiB 32.0 GiB 8.0 GiB 12.0 GiB 20% 3" in rows
    assert "GPU-2 80.0 GiB - - - 12.0 GiB 20% -" in rows


def test_status_of_an_idle_daemon_says_what_is_missing(tmp_path: Path) -> None:
    with ScriptedDaemon(tmp_path) as daemon:
        daemon.on("status", reports.status(models=(), versions=(), inferds=()))
        ran = run(tmp_path, "status")
    for said in ("no model is known", "no inferd is attached", "no version is resident"):
        assert said in ran.stdout


def test_versions_shows_what_is_resident_and_what_could_be_pushed(tmp_path: Path) -> None:
    with ScriptedDaemon(tmp_path) as daemon:
        daemon.on("versions", reports.versions_report())
        ran = run(tmp_path, "versions")
    rows = [" ".join(line.split()) for line in ran.stdout.splitlines()]
    assert any(row.startswith("smollm2-v2 2b2b2b2b2b2b active ") for row in rows)
    assert "smollm2-v3 257.0 MiB no no /srv/models" in rows
    assert "smollm2-v4 257.0 MiB broken no /srv/models" in rows


@pytest.mark.parametrize("verified", ["digest", "sealed", "signed"])
def test_versions_shows_what_each_was_held_against(tmp_path: Path, verified: str) -> None:
    report = reports.versions_report()
    version = report.resident[0].model_copy(update={"verified": verified})
    with ScriptedDaemon(tmp_path) as daemon:
        daemon.on("versions", report.model_copy(update={"resident": (version,)}))
        shown = run(tmp_path, "versions").stdout.splitlines()
        (found,) = run(tmp_path, "versions", "--json").json_lines
    column = shown[1].index("verified")
    assert shown[2][column:].split()[0] == verified
    assert found["resident"][0]["verified"] == verified  # type: ignore[index]


def test_history_asks_for_what_was_wanted_and_shows_it_oldest_first(tmp_path: Path) -> None:
    with ScriptedDaemon(tmp_path) as daemon:
        daemon.on("history", reports.history())
        ran = run(tmp_path, "history", "--model", "smollm2", "-n", "2")
        assert daemon.asked[0].body.model_dump() == {"verb": "history", "model": "smollm2", "limit": 2}
    lines = ran.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["#", "41", "42"]
    assert lines[2].endswith("all inferds committed  epoch=7 state=active")


def test_diff_names_what_differs(tmp_path: Path) -> None:
    with ScriptedDaemon(tmp_path) as daemon:
        daemon.on("diff", reports.difference())
        ran = run(tmp_path, "diff", "smollm2-v1", "smollm2-v2")
    assert ran.stdout.splitlines() == [
        "smollm2-v1 -> smollm2-v2: 64.0 MiB of 257.0 MiB differ",
        "  changed   model.layers.0.mlp.up_proj.weight",
        "  changed   model.layers.1.mlp.up_proj.weight",
        "  file      config.json",
    ]


@pytest.mark.parametrize(
    ("arguments", "report"),
    [
        (("status",), reports.status()),
        (("versions",), reports.versions_report()),
        (("history",), reports.history()),
        (("diff", "a", "b"), reports.difference()),
    ],
)
def test_json_is_the_report_and_nothing_else(
    tmp_path: Path, arguments: tuple[str, ...], report: BaseModel
) -> None:
    with ScriptedDaemon(tmp_path) as daemon:
        daemon.on(arguments[0], report)  # type: ignore[arg-type]
        ran = run(tmp_path, *arguments, "--json")
    assert (ran.code, ran.stderr) == (0, "")
    assert ran.json_lines == [report.model_dump(mode="json")]


def test_watch_shows_it_again_after_an_event_and_survives_a_restart(tmp_path: Path) -> None:
    with ScriptedDaemon(tmp_path) as daemon:
        daemon.on("status", reports.status(pid=1))
        process = spawn(tmp_path, "status", "--watch", "--json")
        daemon.wait_subscribed()
        daemon.on("status", reports.status(pid=2))
        daemon.publish("version.state")
        assert process.stdout is not None
        pids = [json.loads(process.stdout.readline())["pid"]]
        while pids[-1] != 2:
            pids.append(json.loads(process.stdout.readline())["pid"])
        daemon.stop()
        assert process.stderr is not None
        assert "loaderd" in process.stderr.readline()
    with ScriptedDaemon(tmp_path, "generation-2").on("status", reports.status(pid=3)) as daemon:
        daemon.wait_asked("status", 2)
        process.send_signal(signal.SIGINT)
        ran = finish(process)
    assert ran.code == 130
    pids += [line["pid"] for line in ran.json_lines]
    assert list(dict.fromkeys(pids)) == [1, 2, 3]


def test_watch_on_a_terminal_redraws_one_screen_and_gives_it_back(tmp_path: Path) -> None:
    with ScriptedDaemon(tmp_path) as daemon:
        daemon.on("status", reports.status())
        terminal = OnTerminal.spawn(tmp_path, "status", "--watch")
        terminal.read_until("387.0 MiB")
        daemon.wait_subscribed()
        daemon.publish("version.state")
        daemon.wait_asked("status", 3)
        terminal.press_ctrl_c()
        ran = terminal.finish()
    assert ran.code == 130
    assert ran.stdout.count("\x1b[?1049h") == ran.stdout.count("\x1b[?1049l") == 1
    assert "Traceback" not in ran.stdout


def test_json_escapes_what_is_not_ascii(tmp_path: Path) -> None:
    with ScriptedDaemon(tmp_path) as daemon:
        daemon.on("diff", reports.difference().model_copy(update={"changed": ("\x1b[2J\u202egnp.exe",)}))
        ran = run(tmp_path, "diff", "a", "b", "--json")
    assert ran.stdout.isascii()
    assert json.loads(ran.stdout)["changed"] == ["\x1b[2J\u202egnp.exe"]
