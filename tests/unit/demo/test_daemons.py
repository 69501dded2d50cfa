"""Starting and ending processes, with short scripts in the place of the daemons."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

import pytest

from demo import daemons
from demo.daemons import DaemonLostError, Daemons, inferd_config, loaderd_config, make_run_dir
from shared.run_dir import RunDir

READY = """
import os, signal, socket, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit({exit_code}))
line = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
line.sendto(b"STATUS=starting", os.environ["NOTIFY_SOCKET"])
line.sendto(b"READY=1\\nSTATUS=here", os.environ["NOTIFY_SOCKET"])
while True:
    signal.pause()
"""
DIES = "import sys; print('no such device'); sys.exit(78)"


def use(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    monkeypatch.setattr(daemons, "program", lambda name: [sys.executable, "-c", script])


@pytest.mark.parametrize("exit_code", [0, 3])
def test_a_daemon_is_started_when_it_says_ready_and_its_exit_code_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exit_code: int
) -> None:
    use(monkeypatch, READY.format(exit_code=exit_code))

    async def scenario() -> dict[str, int]:
        async with Daemons(tmp_path, 1) as both:
            await both.start("loaderd", "")
            await both.start("inferd", "")
            return await both.stop()

    assert asyncio.run(scenario()) == {"inferd": exit_code, "loaderd": exit_code}


def test_a_daemon_that_ends_early_is_an_error_with_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, DIES)

    async def scenario() -> None:
        async with Daemons(tmp_path, 1) as both:
            await both.start("loaderd", "")

    with pytest.raises(DaemonLostError, match=r"ended with 78:\nno such device"):
        asyncio.run(scenario())


def test_leaving_the_block_ends_what_still_runs_unless_it_was_detached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, READY.format(exit_code=0))

    async def scenario(*, detach: bool) -> int | None:
        async with Daemons(tmp_path, 1) as both:
            await both.start("loaderd", "")
            daemon = both.running[0]
            if detach:
                assert both.detach() == (daemon.process.pid,)
        still_runs = daemon.process.returncode is None
        await daemon.kill()
        return None if still_runs else daemon.process.returncode

    assert asyncio.run(scenario(detach=False)) == -9
    assert asyncio.run(scenario(detach=True)) is None


def test_the_run_directory_is_new_and_where_it_was_wanted_or_short_enough(tmp_path: Path) -> None:
    for parent, is_below in ((Path(tempfile.gettempdir()), True), (tmp_path / ("x" * 90), False)):
        found = make_run_dir(parent)
        try:
            assert (found.parent == parent) is is_below
            RunDir(found).check()
            assert found.stat().st_mode & 0o077 == 0
        finally:
            found.rmdir()


def test_the_configurations_are_what_the_daemons_read(tmp_path: Path) -> None:
    from inferd.config import InferdConfig
    from loaderd.config import LoaderdConfig
    from shared.config_file import load_config

    (tmp_path / "loaderd.toml").write_text(loaderd_config(tmp_path, tmp_path / "state", tmp_path, "host"))
    (tmp_path / "inferd.toml").write_text(inferd_config(tmp_path, 8000, "host"))
    load_config(tmp_path / "loaderd.toml", LoaderdConfig)
    load_config(tmp_path / "inferd.toml", InferdConfig)
