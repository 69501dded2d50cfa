"""A real loaderd throttles what it copies and hashes by what an inferd reports, and says so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from loaderd.pace import TICK_S
from shared.control import HistoryEntry
from tests.support.scripted_inferd import Latency, ScriptedInferd
from tests.support.serving_host import MODEL, ServingHost, serving_host
from tests.unit.checkpoint_files import content, write_single

MODEL_BYTES = 96 << 20
"""Read and hashed: more than half a second at the rate that the throttle starts with."""

QUIET_S = 0.01


@pytest.fixture(scope="module")
def big_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model root with two versions that share nothing."""
    root = tmp_path_factory.mktemp("models")
    for seed, version in enumerate(("v1", "v2")):
        size = MODEL_BYTES // 6
        tensors = {f"t{i}": ("U8", (size,), content(6 * seed + i, size)) for i in range(6)}
        write_single(root / f"{MODEL}-{version}", tensors)
    return root


@contextmanager
def attached(
    models: Path, latency: Latency, config: str = ""
) -> Iterator[tuple[ServingHost, ScriptedInferd]]:
    with serving_host(models, config) as host:
        host.start_loaderd()
        with ScriptedInferd(host.run_dir.handoff, MODEL, latency) as inferd:
            host.await_attached("scripted")
            yield host, inferd


def hurt_by_copies(inferd: ScriptedInferd) -> float:
    """Twice as slow whenever copies may go on, and quiet whenever they may not."""
    return 2 * QUIET_S if inferd.is_watched and inferd.may_hash else QUIET_S


def throttling(host: ServingHost) -> list[HistoryEntry]:
    return [entry for entry in host.history(1000) if entry.kind.startswith("throttle.")]


def test_a_push_that_hurts_is_slowed_down_and_comes_to_its_end(big_models: Path) -> None:
    with attached(big_models, hurt_by_copies) as (host, inferd):
        report = host.push("v1")
        assert report.load_s + report.verify_s > 1.0, "twice the bytes at the floor of 64 MiB/s take 3 s"
        began, ended = throttling(host)
        assert (began.kind, began.model, began.data["inferd"]) == ("throttle.began", MODEL, "scripted")
        assert began.data["work"] == f"loading {MODEL}-v1"
        assert began.data["inter_token_ms"] == pytest.approx(2e3 * QUIET_S, rel=0.1)
        assert began.data["quiet_ms"] == pytest.approx(1e3 * QUIET_S, rel=0.1)
        assert (64 << 20) <= int(began.data["bytes_per_s"]) < (256 << 20)
        assert ended.kind == "throttle.ended"
        assert float(ended.data["seconds"]) > 0
        # It was watched closely, looked at without copies, and let alone afterwards.
        assert {pace.report_every_s for pace in inferd.paces} == {TICK_S, 1.0}
        assert 0.0 in {pace.bytes_per_s for pace in inferd.paces}
        host.awaited(lambda: not inferd.is_watched, "the inferd to be left alone")
        assert inferd.paces[-1].bytes_per_s is None
        metrics = host.get(host.run_dir.loaderd_health, "/metrics").text
        assert "changeover_throttled 0.0" in metrics
        assert "changeover_copy_limit_bytes_per_second +Inf" in metrics


def test_verify_is_slowed_down_too(big_models: Path) -> None:
    with attached(big_models, hurt_by_copies) as (host, _):
        host.push("v1")
        before = len(throttling(host))
        result = host.ctl("verify", f"{MODEL}-v1")
        assert result.code == 0, result.err
        (began, _) = throttling(host)[before:]
        assert began.data["work"] == f"verify of {MODEL}-v1"


def test_clients_own_load_slows_nothing_down(big_models: Path) -> None:
    """Slow during a look as well: it is not the copies' fault."""
    with attached(big_models, lambda inferd: 5 * QUIET_S if inferd.is_watched else QUIET_S) as (host, _):
        host.push("v1")
        # Between the quiet baseline and the first look it may take them for the cause once.
        assert len(throttling(host)) <= 2


def test_without_traffic_nothing_is_slowed_down(big_models: Path) -> None:
    with attached(big_models, lambda _: 0.0) as (host, inferd):
        host.push("v1")
        assert not throttling(host)
        assert {pace.bytes_per_s for pace in inferd.paces} == {None}


def test_off_is_off(big_models: Path) -> None:
    with attached(big_models, hurt_by_copies, 'throttle_above_share = "off"') as (host, inferd):
        host.push("v1")
        assert not throttling(host)
        assert not inferd.paces
