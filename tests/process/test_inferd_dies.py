"""SIGKILL of an inferd, at each point of a rollout: loaderd, the other inferd and memory recover."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.process.conftest import NEW_TOKENS, PROMPTS, Expected
from tests.support.serving_host import ServingHost, serving_host

NOTICED_WITHIN_S = 1.0


@pytest.fixture(scope="module")
def host(models: Path) -> Iterator[ServingHost]:
    with serving_host(models) as host:
        host.start_loaderd()
        host.start_inferd("a")
        host.start_inferd("b")
        host.push("v1")
        yield host


def answers(host: ServingHost, name: str, version: str, expected: Expected) -> None:
    with host.client(name) as client:
        answer = client.ask(PROMPTS[0], NEW_TOKENS)
    assert answer.version.startswith(f"{version}@")
    assert answer.text == expected[version][PROMPTS[0]]


def await_lease_closed(host: ServingHost, killed_at: float, name: str) -> None:
    host.awaited(lambda: name not in {i.name for i in host.status().inferds}, f"the lease of {name} to end")
    assert time.monotonic() - killed_at < NOTICED_WITHIN_S


def test_its_lease_ends_and_a_successor_gets_what_is_active(host: ServingHost, expected: Expected) -> None:
    host.push("v2")
    host.await_serving("v2", "a", "b")
    used = host.status().memory[0].used_bytes
    killed_at = time.monotonic()
    host.inferds["b"].kill()
    await_lease_closed(host, killed_at, "b")
    status = host.status()
    assert {holder.inferd for version in status.versions for holder in version.holders} == {"a"}
    assert status.memory[0].used_bytes == used
    assert "lease.closed" in {entry.kind for entry in host.history(5)}

    host.start_inferd("b")
    host.await_serving("v2", "b")
    answers(host, "b", "v2", expected)
    host.awaited(
        lambda: all(
            {slot.state for slot in report.slots} == {"serving", "prepared"}
            or {slot.state for slot in report.slots} == {"serving", "retained"}
            for report in host.status().inferds
        ),
        "the successor to have the way back too",
    )
    host.rollback()
    host.await_serving("v1", "a", "b")
    answers(host, "b", "v1", expected)


def test_killed_while_it_prepares(host: ServingHost, expected: Expected) -> None:
    host.push("v1")
    host.push("v2")
    host.await_serving("v2", "a", "b")
    used = host.status().memory[0].used_bytes
    with host.client("b") as client, client.stream("held", 20_000, is_endless=True) as held:
        held.read(1)
        host.rollback()  # the stream now holds the slot that the next push needs on b
        before = host.model()
        operation = host.start_push("v3")
        host.awaited(lambda: host.operation(operation).inferds_prepared == 1, "a to be prepared")
        assert host.operation(operation).stage == "preparing"
        host.inferds["b"].kill()
        report = host.ended(operation)
    assert report.state == "failed"
    assert report.error is not None
    assert report.error.code == "prepare_failed"
    assert report.error.message == "inferd b: went away while it prepared"
    status = host.status()
    assert (host.model(status).active, host.model(status).retained) == (before.active, before.retained)
    answers(host, "a", "v1", expected)
    host.awaited(lambda: host.status().memory[0].used_bytes == used, "the memory of v3 to be free")
    # The way back is in its slot again.
    host.awaited(
        lambda: sorted(slot.state for slot in host.status().inferds[0].slots) == ["prepared", "serving"],
        "a to have the way back",
    )
    host.rollback()
    answers(host, "a", "v2", expected)
    host.start_inferd("b")
    host.await_serving("v2", "a", "b")


def test_killed_before_it_confirms_the_flip(host: ServingHost, expected: Expected) -> None:
    """It was prepared, so the decision stands; its successor is brought to it."""
    host.push("v1")
    host.push("v2")
    with host.client("a") as client, client.stream("held", 20_000, is_endless=True) as held:
        held.read(1)
        host.rollback()  # the stream holds v2, whose slot v3 needs on a
        operation = host.start_push("v3")
        host.awaited(lambda: host.operation(operation).inferds_prepared == 1, "b to be prepared")
        host.inferds["b"].signal(signal.SIGSTOP)
    host.awaited(lambda: host.operation(operation).inferds_committed == 1, "a to flip")
    answers(host, "a", "v3", expected)
    assert host.operation(operation).stage == "committing"
    host.inferds["b"].kill()
    report = host.done(operation)
    assert report.warnings[-1] == "inferd b did not confirm the flip"
    assert host.model().epoch == report.epoch
    host.start_inferd("b")
    host.await_serving("v3", "a", "b")
    answers(host, "b", "v3", expected)
