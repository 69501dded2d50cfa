"""The run directory, where it cannot be used."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from shared.errors import ConfigError
from shared.run_dir import DEFAULT_RUN_DIR, RunDir


def test_the_command_that_makes_a_missing_one_is_said(tmp_path: Path) -> None:
    missing = tmp_path / "to make"
    with pytest.raises(ConfigError, match=f"^run directory {missing} does not exist; make it: ") as caught:
        RunDir(missing).check()
    command = shlex.split(caught.value.message.partition("make it: ")[2])
    assert command[:2] == ["install", "-d"]
    assert command[-1] == str(missing)


@pytest.mark.skipif(DEFAULT_RUN_DIR.exists(), reason="changeover is installed here")
def test_the_packages_own_is_made_by_systemd() -> None:
    with pytest.raises(ConfigError, match=r"make it: systemd-tmpfiles --create changeover\.conf$"):
        RunDir(DEFAULT_RUN_DIR).check()
