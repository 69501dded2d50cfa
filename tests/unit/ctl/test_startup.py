"""loaderctl starts quickly: what it imports, and its help."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from loaderd.ctl.exit_codes import ExitCode
from tests.unit.ctl.command_line import ROOT, environment, run

COMMANDS = ("push", "rollback", "wait", "status", "versions", "history", "diff", "events", "seal", "verify")


def test_nothing_heavy_is_imported() -> None:
    heavy = "{'torch', 'transformers', 'numpy', 'fastapi', 'uvicorn', 'asyncio', 'structlog'}"
    script = f"import sys, loaderd.ctl.app; print(sorted({heavy} & sys.modules.keys()))"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "[]\n"


def test_ctrl_c_while_modules_are_imported_is_quiet(tmp_path: Path) -> None:
    """The signal comes with the import of a module that everything needs."""
    (tmp_path / "typer.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\n")
    env = environment(PYTHONPATH=f"{tmp_path}:{ROOT}")
    ran = run(tmp_path, "status", env=env)
    assert (ran.code, ran.stdout, ran.stderr) == (130, "", "")


def test_help_names_every_command_and_every_exit_code(tmp_path: Path) -> None:
    ran = run(tmp_path, "--help")
    assert ran.code == 0
    for command in COMMANDS:
        assert f" {command} " in ran.stdout, command
    for code in ExitCode:
        assert f"{code.value:>4}  {code.meaning}" in ran.stdout


def test_the_page_has_every_command_and_every_exit_code() -> None:
    page = (ROOT / "docs" / "loaderctl.md").read_text()
    for command in COMMANDS:
        assert f"\n## {command}\n" in page, command
    for code in ExitCode:
        assert f"\n| {code.value} | {code.meaning} |\n" in page


def test_version(tmp_path: Path) -> None:
    ran = run(tmp_path, "--version")
    assert ran.code == 0
    assert ran.stdout.startswith("loaderctl ")
    assert ran.stdout.endswith(", protocol 1\n")


def test_shells_can_complete_commands(tmp_path: Path) -> None:
    env = environment(_LOADERCTL_COMPLETE="complete_bash", COMP_WORDS="loaderctl ro", COMP_CWORD="1")
    done = subprocess.run(
        [sys.executable, "-m", "loaderd.ctl.main"],
        env=env,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == ["rollback"]
