"""Folders whose names do not say the model: pushed with `--model`, restored and rolled back all the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from loaderd.ctl.exit_codes import ExitCode
from tests.support.serving_host import ServingHost, serving_host
from tests.support.tiny_models import derive, low_rank, make_model


@pytest.fixture
def host(tmp_path: Path) -> Iterator[ServingHost]:
    make_model(tmp_path / "tiny-v1")
    derive(tmp_path / "tiny-v1", tmp_path / "finetune-final", low_rank(5))
    with serving_host(tmp_path, "adopt_grace_s = 0.5") as host:
        host.start_loaderd()
        yield host


def test_it_is_loaded_again_from_its_folder_and_found_by_its_name(host: ServingHost) -> None:
    alone = host.ctl("push", "finetune-final", "--model", "tiny")
    assert alone.code == ExitCode.DONE
    assert "no inferd of tiny is attached" in alone.out
    active = host.active()
    assert active is not None
    assert (active.ref.model, active.ref.version) == ("tiny", "finetune-final")
    host.restart_loaderd()
    host.awaited(lambda: host.active() == active, "it to be loaded again")

    # A second model with an active version: a rollback that names the folder need not name the model.
    host.push("v1")
    assert host.ctl("push", "tiny-v1", "--model", "other").code == ExitCode.DONE
    vague = host.ctl("rollback")
    assert vague.code == ExitCode.USAGE
    assert "other, tiny" in vague.err
    assert host.ctl("rollback", "--to", "tiny-finetune-final").code == ExitCode.DONE
    assert host.active() == active
