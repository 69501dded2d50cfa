"""What the README tells people to type is what the programs take."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import typer.main

from inferd.config import InferdConfig
from loaderd.config import LoaderdConfig
from loaderd.ctl.app import app
from loaderd.ctl.exit_codes import ExitCode
from shared.config_file import load_config

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("text", blocks("toml"))
def test_every_configuration_is_accepted(text: str, tmp_path: Path) -> None:
    path = tmp_path / "daemon.toml"
    path.write_text(text)
    load_config(path, LoaderdConfig if "model_roots" in text else InferdConfig)


def test_both_configurations_are_there() -> None:
    assert len(blocks("toml")) == 2


def test_every_command_of_loaderctl_exists() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    shown = re.findall(r"^loaderctl (\w+)", "".join(blocks("sh")), flags=re.MULTILINE)
    assert len(shown) >= 7
    assert set(shown) <= set(commands)


def test_the_table_of_exit_codes_is_complete() -> None:
    told = {int(code) for code in re.findall(r"^\| (\d+) \|", README, flags=re.MULTILINE)}
    assert told == {code.value for code in ExitCode if code.value < 128}


def test_every_target_of_make_that_it_names_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z]+(?:-[a-z]+)*)\b(?=`|\s+#)", README))
    assert {"demo", "test"} <= named
    assert named <= targets


def test_make_help_shows_each_target_as_it_is_written() -> None:
    makefile = (ROOT / "Makefile").read_text()
    written = re.findall(r"^([a-z-]+):[^#\n]*## (.*)$", makefile, flags=re.MULTILINE)
    command = ["make", "--no-print-directory", "help"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    lines = [line.removeprefix("  make ").split(maxsplit=1) for line in shown.splitlines()]
    assert lines == [[target, text] for target, text in written]


@pytest.mark.parametrize("path", re.findall(r"\]\(([^)#:]+)\)|`([a-z]+(?:/[a-z]+)*/)`", README))
def test_every_file_and_folder_that_it_names_exists(path: tuple[str, str]) -> None:
    name = path[0] or path[1]
    assert (ROOT / name).exists() or (ROOT / "tests" / name).exists()


def test_every_python_block_compiles() -> None:
    assert blocks("python")
    for block in blocks("python"):
        compile(block, "README.md", "exec")
