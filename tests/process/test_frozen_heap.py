"""Both daemons keep the garbage collector from what they were started with."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.serving_host import ServingHost, serving_host


def test_modules_are_frozen_once_a_daemon_serves(tmp_path: Path) -> None:
    with serving_host(tmp_path) as host:
        host.start_loaderd()
        host.start_inferd()
        assert frozen(host, host.run_dir.loaderd_health) > 20_000
        assert frozen(host, host.run_dir.inferd_health("a")) > 100_000  # torch and transformers


def frozen(host: ServingHost, health: Path) -> float:
    """What a daemon says of its heap."""
    metrics = host.get(health, "/metrics").text
    found = re.search(r"^changeover_frozen_objects (\S+)$", metrics, flags=re.MULTILINE)
    assert found is not None
    return float(found[1])
