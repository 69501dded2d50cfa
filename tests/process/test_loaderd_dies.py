"""SIGKILL of loaderd, at each point of its work: inferds answer on, and the next loaderd knows it all."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.control import HistoryEntry
from shared.ids import VersionTag
from tests.process.conftest import NEW_TOKENS, PROMPTS, Expected
from tests.support.serving_host import MODEL, ServingHost, serving_host
from tests.support.tiny_models import derive, low_rank, make_model
from tests.support.traffic import Traffic

GRACE_S = 3.0


@pytest.fixture(scope="module")
def root(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model root of this module's own."""
    root = tmp_path_factory.mktemp("restarts")
    for version in ("v1", "v2", "v3"):
        shutil.copytree(models / f"tiny-{version}", root / f"tiny-{version}")
    return root


@pytest.fixture(scope="module")
def host(root: Path) -> Iterator[ServingHost]:
    with serving_host(root, f"adopt_grace_s = {GRACE_S}") as host:
        host.start_loaderd()
        host.start_inferd("a")
        host.start_inferd("b")
        yield host


@pytest.fixture
def traffic(host: ServingHost) -> Iterator[Traffic]:
    """Requests to inferd a, none of which fails, whatever the test does to loaderd."""
    host.push("v1")
    host.push("v2")
    host.await_serving("v2", "a", "b")
    with Traffic(host.api_socket("a"), MODEL, PROMPTS, NEW_TOKENS, clients=2) as traffic:
        traffic.await_answers(str(host.active()), 2)
        yield traffic
    assert traffic.failures == []
    assert traffic.answers


def since_start(host: ServingHost) -> list[HistoryEntry]:
    """What the journal says of the running loaderd."""
    entries = host.history(1000)
    start = max(index for index, entry in enumerate(entries) if entry.kind == "daemon.started")
    return list(entries[start:])


def states(host: ServingHost, version: str) -> list[object]:
    return [e.data["to"] for e in since_start(host) if e.kind == "version.state" and e.version == version]


def check_recovered(
    host: ServingHost, active: VersionTag | None, retained: VersionTag | None, used_bytes: int
) -> None:
    """The restarted loaderd has the same two versions in the same memory, without reading a file."""
    assert active is not None
    host.await_serving(active.ref.version, "a", "b")
    host.awaited(lambda: host.retained() == retained, f"{retained} to be retained")
    assert host.active() == active
    assert host.status().memory[0].used_bytes == used_bytes
    assert "loading" not in states(host, active.ref.version)
    assert states(host, active.ref.version)[:2] == ["resident", "active"]
    host.awaited(
        lambda: all(
            {slot.state for slot in report.slots} in ({"retained", "serving"}, {"prepared", "serving"})
            for report in host.status().inferds
        ),
        "both slots of both inferds to be of use",
    )


def check_goes_on(host: ServingHost, traffic: Traffic, expected: Expected) -> None:
    """A rollback and a push work, with newer epochs."""
    epoch = host.model().epoch
    assert host.rollback().epoch == epoch + 1
    traffic.await_answers(str(host.active()), 2)
    assert host.push("v3").epoch == epoch + 2
    host.await_serving("v3", "a", "b")
    traffic.await_answers(str(host.active()), 2)
    for answer in traffic.answers:
        assert answer.text == expected[answer.version.partition("@")[0]][answer.prompt]


def test_while_idle(host: ServingHost, traffic: Traffic, expected: Expected) -> None:
    active, retained, epoch = host.active(), host.retained(), host.model().epoch
    used = host.status().memory[0].used_bytes
    host.kill_loaderd()
    traffic.await_answers(str(active), 4)
    host.start_loaderd()
    check_recovered(host, active, retained, used)
    assert host.model().epoch == epoch
    check_goes_on(host, traffic, expected)


def test_while_it_prepares(host: ServingHost, traffic: Traffic, expected: Expected) -> None:
    active, retained = host.active(), host.retained()
    used = host.status().memory[0].used_bytes
    with host.client("b") as client:
        host.rollback()
        with client.stream("held", 20_000, is_endless=True) as held:
            held.read(1)
            host.rollback()  # the stream runs on what is retained now
            operation = host.start_push("v3")
            host.awaited(lambda: host.operation(operation).inferds_prepared == 1, "a to be prepared")
            host.kill_loaderd()
            traffic.await_answers(str(active), 2)
            host.start_loaderd()
            # The stream still runs: b gave up waiting for its slot when loaderd went.
            check_recovered(host, active, retained, used)
    host.awaited(lambda: len(host.status().versions) == 2, "only two versions to be left")
    check_goes_on(host, traffic, expected)


def test_after_the_decision_and_before_the_first_order(
    host: ServingHost, traffic: Traffic, expected: Expected
) -> None:
    """The journal says that v3 serves, no inferd heard of it: it is committed after the restart."""
    active, epoch = host.active(), host.model().epoch
    with host.client("b") as client:
        host.rollback()
        with client.stream("held", 20_000, is_endless=True) as held:
            held.read(1)
            host.rollback()
            operation = host.start_push("v3")
            host.awaited(lambda: host.operation(operation).inferds_prepared == 1, "a to be prepared")
            digest = host.operation(operation).digest
            host.kill_loaderd()
            with host.journal.open("rb") as journal:
                last = json.loads(journal.readlines()[-1])
            decision = HistoryEntry(
                sequence=last["sequence"] + 1,
                time_ns=last["time_ns"],
                kind="commit",
                model=MODEL,
                version="v3",
                operation=operation,
                data={"digest": str(digest), "epoch": epoch + 3},
            )
            with host.journal.open("ab") as journal:
                journal.write(json.dumps(decision.model_dump()).encode() + b"\n")
            traffic.await_answers(str(active), 2)
        host.start_loaderd()
    host.await_serving("v3", "a", "b")
    assert host.model().epoch == epoch + 3
    assert host.retained() == active
    assert states(host, "v3")[:2] == ["resident", "active"]
    traffic.await_answers(str(host.active()), 2)
    check_goes_on(host, traffic, expected)


def test_between_the_flips(host: ServingHost, traffic: Traffic, expected: Expected) -> None:
    """a has flipped, b has not confirmed (it is frozen) when loaderd dies."""
    with host.client("a") as client, client.stream("held", 20_000, is_endless=True) as held:
        held.read(1)
        host.rollback()
        operation = host.start_push("v3")
        host.awaited(lambda: host.operation(operation).inferds_prepared == 1, "b to be prepared")
        host.inferds["b"].signal(signal.SIGSTOP)
    host.awaited(lambda: host.operation(operation).inferds_committed == 1, "a to flip")
    host.kill_loaderd()
    host.inferds["b"].signal(signal.SIGCONT)
    host.start_loaderd()
    host.await_serving("v3", "a", "b")
    traffic.await_answers(str(host.active()), 2)
    check_goes_on(host, traffic, expected)


def test_while_it_loads(host: ServingHost, root: Path, traffic: Traffic, expected: Expected) -> None:
    active, retained = host.active(), host.retained()
    used = host.status().memory[0].used_bytes
    # Large enough that the first byte counted is far from the last.
    big = make_model(root / "other-v1", hidden=512, intermediate=1536, layers=8)
    try:
        host.await_event("operation.stage", "loading", host.start_push_of("other-v1"))
        host.kill_loaderd()
    finally:
        shutil.rmtree(big)
    host.start_loaderd()
    check_recovered(host, active, retained, used)
    loads = [e.data["to"] for e in host.history(1000) if e.kind == "version.state" and e.model == "other"]
    assert loads[-1] == "loading"
    check_goes_on(host, traffic, expected)


def test_with_its_state_lost(host: ServingHost, traffic: Traffic, expected: Expected) -> None:
    """What serves is found out from those who serve it."""
    active, epoch = host.active(), host.model().epoch
    host.kill_loaderd()
    shutil.rmtree(host.state_dir)
    host.start_loaderd()
    host.await_serving("v2", "a", "b")
    assert host.active() == active
    assert host.model().epoch == epoch
    assert host.retained() is None
    assert "loading" not in states(host, "v2")
    host.push("v3")
    assert host.model().epoch > epoch
    host.await_serving("v3", "a", "b")
    traffic.await_answers(str(host.active()), 2)
    assert traffic.answers[-1].text == expected["v3"][traffic.answers[-1].prompt]


def test_with_no_inferd_left_it_loads_again_what_was_active(
    host: ServingHost, root: Path, expected: Expected
) -> None:
    host.push("v1")
    active, epoch = host.active(), host.model().epoch
    assert active is not None
    for name in ("a", "b"):
        host.inferds[name].kill()
    host.restart_loaderd()
    host.awaited(lambda: host.active() == active, "v1 to be loaded again", GRACE_S + 30)
    assert "loading" in states(host, "v1")
    assert host.model().epoch > epoch
    operation = host.model().operation
    assert operation is not None
    assert (operation.kind, operation.state) == ("restore", "done")

    # And now the folder is another one: it is said, and not served.
    host.kill_loaderd()
    shutil.move(root / "tiny-v1", root / "tiny-v9")
    derive(root / "tiny-v9", root / "tiny-v1", low_rank(7))
    try:
        host.start_loaderd()
        host.awaited(
            lambda: (o := host.model().operation) is not None and o.state == "failed",
            "the restore to fail",
            GRACE_S + 30,
        )
        operation = host.model().operation
        assert operation is not None
        assert operation.error is not None
        assert operation.error.code == "digest_mismatch"
        assert active.digest in operation.error.message
        assert host.active() is None
        assert host.status().memory[0].used_bytes == 0
        assert host.get(host.run_dir.loaderd_health, "/readyz").status_code == 503
    finally:
        shutil.rmtree(root / "tiny-v1")
        shutil.move(root / "tiny-v9", root / "tiny-v1")
    host.start_inferd("a")
    host.inferds.pop("b")
    host.push("v1")
    host.await_serving("v1", "a")
    with host.client("a") as client:
        answer = client.ask(PROMPTS[0], NEW_TOKENS)
    assert (answer.version, answer.text) == (str(host.active()), expected["v1"][PROMPTS[0]])
