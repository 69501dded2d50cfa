"""A path is claimed from the dead, never from the living."""

from __future__ import annotations

import fcntl
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shared import unix_listener
from shared.errors import DriverError, ResourceError
from shared.run_dir import PATH_BYTES
from shared.unix_listener import UnixListener
from tests.support.procfs import open_fds


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "daemon.sock"


def _connect(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))


def test_the_file_lives_as_long_as_the_listener(path: Path) -> None:
    before = open_fds()
    with UnixListener(path, mode=0o640) as listener:
        assert not listener.socket.getblocking()
        assert path.stat().st_mode & 0o777 == 0o640
        _connect(path)
    assert not path.exists()
    assert open_fds() == before


def test_the_umask_does_not_narrow_the_mode(path: Path) -> None:
    before = os.umask(0o077)
    try:
        with UnixListener(path, mode=0o666):
            assert path.stat().st_mode & 0o777 == 0o666
    finally:
        os.umask(before)


def test_what_a_dead_process_left_is_replaced(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
        dead.listen()
    assert path.exists()
    with UnixListener(path, mode=0o600):
        _connect(path)


def test_what_a_living_process_serves_is_refused_by_its_pid(path: Path) -> None:
    with UnixListener(path, mode=0o600):
        with pytest.raises(ResourceError, match=rf"{path}: another process listens .*pid {os.getpid()}\)"):
            UnixListener(path, mode=0o600)
        _connect(path)


def test_a_living_process_that_is_too_busy_to_accept_is_not_dead(path: Path) -> None:
    with UnixListener(path, mode=0o600, backlog=0), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        with pytest.raises(ResourceError, match="Resource temporarily unavailable"):
            UnixListener(path, mode=0o600)


def test_a_living_socket_of_another_kind_is_refused(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
        other.bind(str(path))
        other.listen()
        with pytest.raises(ResourceError, match="wrong type for socket"):
            UnixListener(path, mode=0o600)
        assert path.exists()


@pytest.mark.parametrize("kind", ["file", "directory", "link"])
def test_what_is_no_socket_is_left_alone(path: Path, kind: str) -> None:
    match kind:
        case "file":
            path.write_text("precious")
        case "directory":
            path.mkdir()
        case _:
            path.symlink_to("elsewhere")
    before = path.lstat()
    with pytest.raises(ResourceError, match="is no socket"):
        UnixListener(path, mode=0o600)
    assert path.lstat().st_ino == before.st_ino


def test_closing_leaves_the_file_of_a_successor(path: Path) -> None:
    listener = UnixListener(path, mode=0o600)
    path.unlink()
    with UnixListener(path, mode=0o600):
        listener.close()
        _connect(path)


def test_closing_after_the_file_was_removed(path: Path) -> None:
    with UnixListener(path, mode=0o600):
        path.unlink()


def test_a_path_that_the_kernel_cannot_hold_is_refused(tmp_path: Path) -> None:
    fill = "x" * (PATH_BYTES - len(str(tmp_path)) - 1)
    with UnixListener(tmp_path / fill, mode=0o600):
        pass
    with pytest.raises(ResourceError, match=f"longer than {PATH_BYTES} bytes"):
        UnixListener(tmp_path / (fill + "x"), mode=0o600)


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match=f"{tmp_path}/nothing: No such file"):
        UnixListener(tmp_path / "nothing" / "daemon.sock", mode=0o600)


def test_of_many_that_start_at_once_one_wins(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))

    def claim(_number: int) -> UnixListener | None:
        try:
            return UnixListener(path, mode=0o600)
        except ResourceError:
            return None

    with ThreadPoolExecutor(8) as pool:
        winners = [listener for listener in pool.map(claim, range(32)) if listener is not None]
    assert len(winners) == 1
    _connect(path)
    winners[0].close()


def test_a_claim_waits_for_another_but_not_for_ever(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unix_listener, "CLAIM_TIMEOUT_S", 0.05)
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        before = open_fds()
        with pytest.raises(ResourceError, match="locked by another process"):
            UnixListener(path, mode=0o600)
        assert open_fds() == before
        assert not path.exists()
    finally:
        os.close(directory)
    with UnixListener(path, mode=0o600):
        pass


def test_a_refused_bind_leaves_nothing_open(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_path: Path) -> tuple[int, int]:
        raise OSError(12, "Cannot allocate memory")

    before = open_fds()
    monkeypatch.setattr(unix_listener, "_identity", refuse)
    with pytest.raises(DriverError, match=r"bind\(.*daemon.sock\) failed with 12"):
        UnixListener(path, mode=0o600)
    assert open_fds() == before
