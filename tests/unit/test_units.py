"""The systemd files: systemd itself accepts them, and they keep the promises of the operations page."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_SYSTEMD = _ROOT / "systemd"
_UNITS = ("loaderd.service", "inferd@.service")

Directives = dict[str, dict[str, list[str]]]  # section → key → values, in order


def _text(name: str) -> str:
    return (_SYSTEMD / name).read_text()


def _directives(text: str) -> Directives:
    found: Directives = {}
    section: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line.startswith("["):
            section = found.setdefault(line.strip("[]"), {})
        elif line and not line.startswith("#"):
            key, _, value = line.partition("=")
            section.setdefault(key, []).append(value)
    return found


# --- systemd accepts them ------------------------------------------------------------------------


def _verify(directory: Path, plant: Callable[[str], str]) -> subprocess.CompletedProcess[str]:
    """`systemd-analyze verify` on copies whose executables exist here."""
    for name in _UNITS:
        text = plant(_text(name))
        copied, count = re.subn(r"^ExecStart=/usr/bin/\w+", "ExecStart=/bin/sh", text, flags=re.MULTILINE)
        assert count == 1
        (directory / name).write_text(copied)
    return subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no"]
        + [str(directory / name) for name in _UNITS],
        env={**os.environ, "SYSTEMD_UNIT_PATH": f"{directory}:"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    result = _verify(tmp_path, lambda text: text)
    assert (result.returncode, result.stdout + result.stderr) == (0, "")


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("WatchdogSec=", "WatchdgoSec="),
        ("RestartSec=2", "RestartSec=soon"),
        ("Type=notify", "Type=notfy"),
        ("KillMode=", "KillMod="),
        ("[Service]", "[Servce]"),
        ("NotifyAccess=main", "NotifyAccess=mian"),
        ("StartLimitIntervalSec=0", "StartLimitIntervalSec=never"),
        ("--config ", "'--config "),
    ],
)
def test_systemd_refuses_a_planted_fault(tmp_path: Path, right: str, wrong: str) -> None:
    def plant(text: str) -> str:
        assert right in text
        return text.replace(right, wrong)

    result = _verify(tmp_path, plant)
    assert result.returncode != 0
    assert result.stderr


# --- they keep their promises --------------------------------------------------------------------


def _faults(name: str, text: str) -> set[str]:
    """The promises that a unit does not keep."""
    found = _directives(text)
    unit, service = found["Unit"], found["Service"]

    def seconds(key: str) -> float:
        return float(service.get(key, ["0"])[-1])

    faults = set()
    if service.get("Restart") != ["always"] or unit.get("StartLimitIntervalSec") != ["0"]:
        faults.add("does not always come back")
    if not 1 <= seconds("RestartSec") <= 10:
        faults.add("comes back too fast or too late")
    if service.get("Type") != ["notify"] or service.get("NotifyAccess") != ["main"]:
        faults.add("systemd does not know when it is ready")
    if seconds("WatchdogSec") < 10:
        faults.add("a hang is not noticed")
    # `process` and `none` leave workers behind that hold the GPU.
    if service.get("KillMode") not in (["control-group"], ["mixed"]) or service.get("SendSIGKILL") == ["no"]:
        faults.add("processes are left behind")
    if "RuntimeDirectory" in service:
        faults.add("the shared run directory ends with this unit")
    if service.get("LimitCORE") != ["0"]:
        faults.add("weights and prompts go into core files")
    if not service.get("User") or service["User"] == ["root"]:
        faults.add("runs as root")
    if name == "inferd@.service":
        bonds = ("Requires", "Requisite", "BindsTo", "PartOf", "PropagatesStopTo", "StopPropagatedFrom")
        if any("loaderd.service" in value.split() for key in bonds for value in unit.get(key, [])):
            faults.add("goes down with loaderd")
        if not any("loaderd.service" in value.split() for value in unit.get("Wants", [])):
            faults.add("does not bring loaderd up")
        if not any("loaderd.service" in value.split() for value in unit.get("After", [])):
            faults.add("is not stopped before loaderd")
        if service.get("KillMode") != ["mixed"]:
            faults.add("workers are ended in the middle of a drain")
        if seconds("TimeoutStopSec") < 60:
            faults.add("a drain is cut short")
        if "%i" not in service["ExecStart"][0]:
            faults.add("all instances read one file")
    return faults


@pytest.mark.parametrize("name", _UNITS)
def test_the_units_keep_their_promises(name: str) -> None:
    assert _faults(name, _text(name)) == set()


@pytest.mark.parametrize(
    ("name", "right", "wrong", "fault"),
    [
        ("loaderd.service", "Restart=always", "Restart=on-failure", "does not always come back"),
        ("inferd@.service", "StartLimitIntervalSec=0\n", "", "does not always come back"),
        ("loaderd.service", "RestartSec=2\n", "", "comes back too fast or too late"),
        ("loaderd.service", "Type=notify", "Type=simple", "systemd does not know when it is ready"),
        ("inferd@.service", "WatchdogSec=60\n", "", "a hang is not noticed"),
        ("loaderd.service", "KillMode=control-group", "KillMode=process", "processes are left behind"),
        ("inferd@.service", "KillMode=mixed", "KillMode=none", "processes are left behind"),
        ("inferd@.service", "KillMode=mixed", "KillMode=control-group",
         "workers are ended in the middle of a drain"),
        ("loaderd.service", "StateDirectory=changeover\n", "RuntimeDirectory=changeover\n",
         "the shared run directory ends with this unit"),
        ("inferd@.service", "LimitCORE=0\n", "", "weights and prompts go into core files"),
        ("inferd@.service", "User=changeover-inferd\n", "", "runs as root"),
        ("inferd@.service", "Wants=loaderd.service", "Wants=loaderd.service\nBindsTo=loaderd.service",
         "goes down with loaderd"),
        ("inferd@.service", "Wants=loaderd.service", "Wants=loaderd.service\nPartOf=a.slice loaderd.service",
         "goes down with loaderd"),
        ("inferd@.service", "Wants=loaderd.service\n", "", "does not bring loaderd up"),
        ("inferd@.service", "After=loaderd.service", "Before=loaderd.service",
         "is not stopped before loaderd"),
        ("inferd@.service", "TimeoutStopSec=150\n", "", "a drain is cut short"),
        ("inferd@.service", "inferd-%i.toml", "inferd.toml", "all instances read one file"),
    ],
)  # fmt: skip
def test_a_planted_fault_is_found(name: str, right: str, wrong: str, fault: str) -> None:
    text = _text(name)
    assert text.count(right) == 1
    assert fault in _faults(name, text.replace(right, wrong))


def test_the_units_start_what_the_package_installs() -> None:
    scripts = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    for name in _UNITS:
        (command,) = _directives(_text(name))["Service"]["ExecStart"]
        assert Path(command.split()[0]).name in scripts


# --- users and directories -----------------------------------------------------------------------


def _dry_run(name: str, root: Path) -> str:
    result = subprocess.run(
        ["systemd-sysusers", "--dry-run", f"--root={root}", str(_SYSTEMD / name)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return result.stdout + result.stderr


def test_every_user_and_group_that_a_unit_names_is_created(tmp_path: Path) -> None:
    created = _dry_run("changeover.sysusers.conf", tmp_path)
    for name in _UNITS:
        service = _directives(_text(name))["Service"]
        assert f"Creating user '{service['User'][0]}'" in created
        assert f"Creating group '{service['Group'][0]}'" in created


def test_the_daemons_are_different_users() -> None:
    users = {_directives(_text(name))["Service"]["User"][0] for name in _UNITS}
    assert len(users) == len(_UNITS)


def test_the_run_directory_is_shared_and_sticky(tmp_path: Path) -> None:
    (line,) = [line for line in _text("changeover.tmpfiles.conf").splitlines() if not line.startswith("#")]
    kind, path, mode, user, group, age = line.split()
    services = [_directives(_text(name))["Service"] for name in _UNITS]
    assert (kind, path, age) == ("d", "/run/changeover", "-")
    assert (user, group) == (services[0]["User"][0], services[1]["Group"][0])
    # Both may create, none may remove the other's, everyone may reach the sockets.
    assert int(mode, 8) == stat.S_ISVTX | 0o775
    if os.geteuid() != 0:
        return  # only root can create users and give directories to them, even below another root
    (tmp_path / "etc").mkdir()
    for command in (["systemd-sysusers"], ["systemd-tmpfiles", "--create"]):
        conf = f"changeover.{command[0].removeprefix('systemd-')}.conf"
        subprocess.run([*command, f"--root={tmp_path}", str(_SYSTEMD / conf)], timeout=60, check=True)
    status = (tmp_path / "run/changeover").stat()
    assert stat.S_IMODE(status.st_mode) == int(mode, 8)
    assert status.st_uid == _ids(tmp_path / "etc/passwd")[user]
    assert status.st_gid == _ids(tmp_path / "etc/group")[group]


def test_inferds_have_a_group_of_their_own_and_do_not_administer(tmp_path: Path) -> None:
    """`inferd_group` and `admin_group` of loaderd.toml name these two."""
    created = _dry_run("changeover.sysusers.conf", tmp_path)
    assert "Creating group 'changeover-inferd'" in created
    assert "Creating group 'changeover-admin'" in created
    members = [line for line in _text("changeover.sysusers.conf").splitlines() if line.startswith("m ")]
    assert members == []


def _ids(database: Path) -> dict[str, int]:
    rows = [line.split(":") for line in database.read_text().splitlines()]
    return {row[0]: int(row[2]) for row in rows}
