"""The run directory, where it cannot be used."""

from __future__ import annotations

import os
import re
import shlex
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from loaderd.daemon import _bound
from loaderd.event_socket import EventSocket
from shared.errors import ConfigError, ResourceError
from shared.run_dir import DEFAULT_RUN_DIR, RunDir, listen_seqpacket
from shared.unix_listener import UnixListener

NOBODY = 65_534

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")


@contextmanager
def nobody() -> Iterator[None]:
    """The files of others are as closed to this process as their modes say."""
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(os.getuid())


@pytest.fixture
def shared_dir(short_path: Path) -> Path:
    """A run directory as systemd-tmpfiles makes it, of which root is the owner."""
    short_path.chmod(0o1777)
    return short_path


def refused(what: str) -> pytest.RaisesExc[ConfigError]:
    """A configuration fault, told in one line."""
    return pytest.raises(ConfigError, match=f"^[^\n]*{what}[^\n]*$")


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


def test_one_that_is_a_file_is_told_as_such(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with refused("file is no directory; set run_dir to another"):
        RunDir(tmp_path / "file").check()
    with refused("file/below does not exist; make it: "):
        RunDir(tmp_path / "file" / "below").check()


@needs_root
def test_one_that_cannot_be_written_says_whose_it_is_and_how_to_mend_it(short_path: Path) -> None:
    short_path.chmod(0o755)
    before = (
        r"cannot be written by nobody \(uid 65534\): it belongs to root \(uid 0\) and group root, mode 0755; "
    )
    with (
        nobody(),
        refused(f"run directory {short_path} {before}set it right: install -d -m 1775 "),
        RunDir(short_path).only_daemon("loaderd"),
    ):
        pytest.fail("it runs")
    assert not any(short_path.iterdir())


def test_one_on_a_read_only_file_system_is_told_as_such(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command that sets owners and mode right would not help."""
    facts = os.statvfs(short_path)
    read_only = os.statvfs_result((*facts[:8], facts.f_flag | os.ST_RDONLY, facts.f_namemax))
    monkeypatch.setattr(os, "statvfs", lambda _: read_only)
    with refused(f"run directory {short_path} is on a read-only file system; set run_dir to another"):
        RunDir(short_path).check()


def test_a_lock_that_is_no_file_is_not_told_to_be_another_users(short_path: Path) -> None:
    (short_path / "loaderd.lock").mkdir()
    with pytest.raises(ResourceError, match=r"loaderd\.lock cannot be made by .*: Is a directory$"):
        RunDir(short_path).only_daemon("loaderd").__enter__()


@needs_root
def test_one_below_a_folder_that_cannot_be_entered_is_told(short_path: Path) -> None:
    below = short_path / "run"
    below.mkdir()
    with nobody(), refused(f"run directory {below} cannot be used by nobody .*: Permission denied"):
        RunDir(below).check()


@needs_root
def test_the_lock_that_another_user_left_is_told_with_the_command_that_removes_it(shared_dir: Path) -> None:
    with RunDir(shared_dir).only_daemon("loaderd"):
        pass
    lock = shared_dir / "loaderd.lock"
    with (
        nobody(),
        refused(rf"{lock} belongs to root .* if no other loaderd runs here: rm {lock}"),
        RunDir(shared_dir).only_daemon("loaderd"),
    ):
        pytest.fail("it runs")


def _open_control(path: Path) -> None:
    with zmq.Context() as context, _bound(context.socket(zmq.ROUTER), path):
        pass


def _open_events(path: Path) -> None:
    with zmq.Context() as context, EventSocket(context, path, 0o666):
        pass


def _open_handoff(path: Path) -> None:
    listen_seqpacket(path, 0o666).close()


def _open_health(path: Path) -> None:
    UnixListener(path, mode=0o666).close()


@needs_root
@pytest.mark.parametrize("open_socket", [_open_control, _open_events, _open_handoff, _open_health])
def test_a_socket_that_another_users_daemon_left_is_told_with_the_command_that_removes_it(
    shared_dir: Path, open_socket: Callable[[Path], None]
) -> None:
    left = shared_dir / "some.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(left))
    left.chmod(0o666)
    with nobody(), refused(rf"{re.escape(str(left))} belongs to root .*: rm {re.escape(str(left))}"):
        open_socket(left)
    open_socket(left)  # it is root's to replace


@needs_root
def test_a_socket_in_a_folder_that_cannot_be_written_is_a_fault_of_the_configuration(
    short_path: Path,
) -> None:
    short_path.chmod(0o755)
    with nobody(), refused(f"{short_path}/api.sock cannot be made by nobody .*: Permission denied"):
        UnixListener(short_path / "api.sock", mode=0o666)
