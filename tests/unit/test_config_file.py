"""Configuration files: what is accepted, and errors that name file and key."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path

import pytest
from pydantic import Field, ValidationError

from shared.config_file import CONFIG_BYTES, ConfigModel, load_config
from shared.errors import ConfigError


class Verify(StrEnum):
    DIGEST = "digest"
    SEALED = "sealed"


class ModelSection(ConfigModel):
    verify: Verify = Verify.DIGEST
    roots: tuple[Path, ...] = ()


class DaemonConfig(ConfigModel):
    port: int = Field(default=1, ge=1, le=65535)
    drain_timeout_s: float = 30.0
    is_verbose: bool = False
    models: dict[str, ModelSection] = Field(default_factory=dict)
    name: str


def _load(tmp_path: Path, text: str) -> DaemonConfig:
    path = tmp_path / "daemon.toml"
    path.write_text(text)
    return load_config(path, DaemonConfig)


def _refusal(tmp_path: Path, text: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        _load(tmp_path, text)
    assert caught.value.message.startswith(f"{tmp_path}/daemon.toml: ")
    assert caught.value.facts["file"] == f"{tmp_path}/daemon.toml"
    return caught.value


def test_a_whole_file(tmp_path: Path) -> None:
    config = _load(
        tmp_path,
        """
        name = "a"
        port = 8000
        drain_timeout_s = 5
        is_verbose = true
        [models.smollm2]
        verify = "sealed"
        roots = ["/srv/models", "/srv/more"]
        """,
    )
    assert config == DaemonConfig(
        name="a",
        port=8000,
        drain_timeout_s=5.0,
        is_verbose=True,
        models={
            "smollm2": ModelSection(verify=Verify.SEALED, roots=(Path("/srv/models"), Path("/srv/more")))
        },
    )


def test_defaults_hold_for_what_is_not_said(tmp_path: Path) -> None:
    assert _load(tmp_path, 'name = "a"') == DaemonConfig(name="a")


def test_a_configuration_cannot_be_changed() -> None:
    config = DaemonConfig(name="a")
    with pytest.raises(ValidationError):
        config.port = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "key", "reason"),
    [
        ("name = 'a'\nprot = 1", "prot", "unknown key"),
        ("name = 'a'\n[models.m]\nverfiy = 'sealed'", "models.m.verfiy", "unknown key"),
        ("port = 1", "name", "missing"),
        ("name = 'a'\nport = 0", "port", "expected at least 1, found 0"),
        ("name = 'a'\nport = '80'", "port", "expected a whole number, found text"),
        ("name = 'a'\nport = 80.0", "port", "expected a whole number, found 80"),
        ("name = 'a'\nis_verbose = 1", "is_verbose", "expected true or false, found 1"),
        ("name = 7", "name", "expected text, found 7"),
        (
            "name = 'a'\n[models.m]\nverify = 'none'",
            "models.m.verify",
            "expected 'digest' or 'sealed', found 'none'",
        ),
        ("name = 'a'\n[models.m]\nroots = ['/a', 7]", "models.m.roots.1", "expected text, found 7"),
        ("name = 2024-01-01", "name", "expected no date or time, found 2024-01-01 (text needs quotes)"),
        (
            "name = 'a'\nport = 07:32:00",
            "port",
            "expected no date or time, found 07:32:00 (text needs quotes)",
        ),
        (
            "name = 'a'\n[models.m]\nroots = ['/a', 2024-01-01T07:32:00Z]",
            "models.m.roots.1",
            "expected no date or time, found 2024-01-01T07:32:00+00:00 (text needs quotes)",
        ),
    ],
)
def test_a_fault_names_its_key(tmp_path: Path, text: str, key: str, reason: str) -> None:
    error = _refusal(tmp_path, text)
    assert error.facts["key"] == key
    assert f"{key}: " in error.message
    assert reason in error.message


def test_all_faults_are_named_at_once(tmp_path: Path) -> None:
    error = _refusal(tmp_path, "port = 0\nprot = 1")
    assert error.facts["key"] == "port, name, prot"
    error = _refusal(tmp_path, "port = 0\nname = 2024-01-01\nprot = 1")
    assert error.facts["key"] == "name, port, prot"


def test_many_faults_are_counted(tmp_path: Path) -> None:
    error = _refusal(tmp_path, "name = 'a'\n" + "\n".join(f"unknown_{n} = 1" for n in range(50)))
    assert error.message.endswith("and 40 more")


def test_the_value_is_not_part_of_the_error(tmp_path: Path) -> None:
    assert "hunter2" not in _refusal(tmp_path, "name = 'a'\nport = 'hunter2'").message


@pytest.mark.parametrize("text", ["name = ", "name = 'a'\nname = 'b'", "x = " + "[" * 10_000])
def test_what_is_not_toml_is_refused(tmp_path: Path, text: str) -> None:
    assert "not TOML: " in _refusal(tmp_path, text).message


def test_the_line_of_a_syntax_error_is_named(tmp_path: Path) -> None:
    assert "line 2" in _refusal(tmp_path, "name = 'a'\nport = =").message


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.toml: No such file"):
        load_config(tmp_path / "nothing.toml", DaemonConfig)


def test_a_file_that_is_not_text(tmp_path: Path) -> None:
    path = tmp_path / "daemon.toml"
    path.write_bytes(b"name = '\xff'")
    with pytest.raises(ConfigError, match="not UTF-8 at byte 8"):
        load_config(path, DaemonConfig)


def test_a_file_that_is_too_large(tmp_path: Path) -> None:
    text = "name = 'a'\n"
    comment = "#" * (CONFIG_BYTES - len(text))
    assert _load(tmp_path, text + comment).name == "a"
    assert f"larger than {CONFIG_BYTES} bytes" in _refusal(tmp_path, text + comment + "#").message


def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", tmp_path, Path("/dev/zero")):
        with pytest.raises(ConfigError, match="not a regular file"):
            load_config(path, DaemonConfig)
