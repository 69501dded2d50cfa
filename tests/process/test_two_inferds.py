"""Two inferds on one loaderd: one copy of the weights, one decision."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from loaderd.seal.create import seal_directory
from tests.support import procfs
from tests.support.serving_host import ServingHost, serving_host
from tests.support.tiny_models import derive, everything_scaled, make_model

IS_REAL = "CHANGEOVER_TEST_MODEL_F32" in os.environ

LONG_TOKENS = 1_000 if IS_REAL else 8_000
"""More than are made while a push waits; the real model is slower, and its cache holds fewer."""

SETTLED = ("serving", "retained", "prepared")
"""States of a slot that maps and hashes nothing any more."""

MOST_MORE = 0.02
"""Part of the weights that a second inferd may add to memory."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model root with tiny-v1 and tiny-v2, 76 MB each, that share no tensor."""
    root = tmp_path_factory.mktemp("large")
    given = os.environ.get("CHANGEOVER_TEST_MODEL_F32")
    if given is not None:
        shutil.copytree(given, root / "tiny-v1")
    else:
        make_model(root / "tiny-v1", hidden=384, intermediate=1536, layers=8)
    seal_directory(root / "tiny-v1")
    derive(root / "tiny-v1", root / "tiny-v2", everything_scaled(1.25))
    return root


@pytest.fixture(scope="module")
def host(root: Path) -> Iterator[ServingHost]:
    with serving_host(root) as host:
        host.start_loaderd()
        host.start_inferd("a")
        yield host


def pids(host: ServingHost) -> list[int]:
    return [host.loaderd.pid, *(inferd.pid for inferd in host.inferds.values())]


def test_the_second_inferd_adds_next_to_nothing(host: ServingHost) -> None:
    """Pss of all mappings of memfds, summed over loaderd and the inferds: a page that n of them map
    counts 1/n in each.  Anonymous memory that holds weights would show in `private`."""
    host.push("v1")
    host.push("v2")
    weights = sum(version.nbytes for version in host.status().versions)
    alone = procfs.weight_pss(pids(host))
    # Less than all: the last page of a slab is rounded up, and what nobody reads is not mapped.
    assert weights * 0.95 < alone < weights * (1 + MOST_MORE)
    host.start_inferd("b")
    host.await_serving("v2", "b")
    # Not before it has touched every page: shares that change while they are added up count too much.
    host.awaited(
        lambda: all(slot.state in SETTLED for i in host.status().inferds for slot in i.slots),
        "b to map and check both versions",
    )
    both = procfs.weight_pss(pids(host))
    assert abs(both - alone) < MOST_MORE * weights
    assert host.status().memory[0].used_bytes == weights
    inodes = [{m.inode for m in procfs.weight_mappings(pid)} for pid in pids(host)]
    assert inodes[0] == inodes[1] == inodes[2]
    for inferd in host.inferds.values():
        assert all("w" not in mapping.permissions for mapping in procfs.weight_mappings(inferd.pid))
    # A private copy of one version would be half of `weights` more than the other inferd has.
    private = [procfs.private_bytes(inferd.pid) for inferd in host.inferds.values()]
    assert private[1] < private[0] + weights / 4


def test_one_push_flips_both(host: ServingHost) -> None:
    report = host.push("v1")
    assert (report.inferds_total, report.inferds_prepared, report.inferds_committed) == (2, 2, 2)
    assert len(report.flip_ns) == 2
    serving = {inferd.name: (inferd.serving, inferd.epoch) for inferd in host.status().inferds}
    assert serving["a"] == serving["b"] == (host.model().active, report.epoch)


def test_where_one_is_not_prepared_nobody_commits(host: ServingHost, root: Path) -> None:
    """A stream on b holds the slot that the push needs there; a is prepared when it is given up."""
    derive(root / "tiny-v1", root / "tiny-v3", everything_scaled(1.5))
    with host.client("b") as client, client.stream("held", LONG_TOKENS, is_endless=True) as held:
        held.read(1)
        host.push("v2")
        before = host.model()
        operation = host.start_push("v3")
        host.awaited(lambda: host.operation(operation).inferds_prepared == 1, "a to be prepared")
        newer = host.start_push("v2")
    report = host.ended(operation)
    assert report.state == "superseded"
    assert (report.inferds_prepared, report.inferds_committed) == (1, 0)
    assert host.done(newer).warnings[-1].endswith("serves already; nothing was changed")
    after = host.model()
    assert (after.active, after.retained, after.epoch) == (before.active, before.retained, before.epoch)
    for inferd in host.status().inferds:
        assert (inferd.serving, inferd.epoch) == (before.active, before.epoch)
    host.awaited(lambda: len(host.status().versions) == 2, "v3 to be gone")
