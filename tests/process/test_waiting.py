"""Who waits for what: superseded pushes, clients that stop waiting, and slots that are not let go."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.process.conftest import NEW_TOKENS, PROMPTS
from tests.support.serving_host import MODEL, ServingHost, serving_host
from tests.support.traffic import Stream

DRAIN_S = 4.0


@pytest.fixture(scope="module")
def host(models: Path) -> Iterator[ServingHost]:
    with serving_host(models, f"[models.{MODEL}]\ndrain_timeout_s = {DRAIN_S}") as host:
        host.start_loaderd()
        host.start_inferd()
        yield host


@contextmanager
def held_slot(host: ServingHost) -> Iterator[Stream]:
    """v2 serves, and a stream that does not end runs on v1, whose slot the next push needs."""
    host.push("v1")
    with host.client() as client, client.stream("held", 30_000, is_endless=True) as stream:
        stream.read(1)
        host.push("v2")
        yield stream


def preparing(host: ServingHost, operation: str) -> None:
    host.awaited(
        lambda: any(slot.state == "draining" for slot in host.status().inferds[0].slots),
        f"{operation} to wait for the slot",
    )
    assert host.operation(operation).stage == "preparing"


def test_a_newer_push_supersedes_one_that_waits(host: ServingHost) -> None:
    with held_slot(host):
        with host.start_ctl("push", "tiny-v3", "--json") as first:
            preparing(host, host.awaited(lambda: running(host), "the first push to start"))
            operation = host.start_push("v1")
            out, _ = first.communicate(timeout=30)
        assert first.returncode == 8, out
        end = json.loads(out.splitlines()[-1])
        assert operation in out
        assert end["outcome"] == "superseded"
    assert host.ended(operation).state in ("done", "failed")
    host.push("v1")
    host.await_serving("v1", "a")


def running(host: ServingHost) -> str | None:
    operation = host.model().operation
    return operation.operation if operation is not None and operation.state == "running" else None


def test_ctrl_c_and_a_timeout_end_the_waiting_and_not_the_push(host: ServingHost) -> None:
    with held_slot(host):
        # Its own process group, so that only it gets the signal.
        # Whoever runs the tests in the background may have SIGINT ignored, and children inherit that.
        heeds = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
        with host.start_ctl("push", "tiny-v3", prelude=heeds, start_new_session=True) as client:
            operation = host.awaited(lambda: running(host), "the push to start")
            preparing(host, operation)
            assert client.stdout is not None
            # Interrupted earlier, it could not know the operation yet.
            assert any(f"is {operation}" in line for line in client.stdout)
            client.send_signal(signal.SIGINT)
            _, err = client.communicate(timeout=30)
        assert client.returncode == 130, err
        assert f"loaderctl wait {operation}" in err
        result = host.ctl("wait", operation, "--timeout", "0.1", "--json")
        assert result.code == 4
        assert host.operation(operation).state == "running"
    assert host.ctl("wait", operation).code == 0
    host.await_serving("v3", "a")


def test_a_slot_that_is_not_let_go_fails_the_push_and_is_usable_afterwards(host: ServingHost) -> None:
    with held_slot(host) as stream:
        operation = host.start_push("v3")
        preparing(host, operation)
        holders = {v.tag.version: v.holders for v in host.status().versions}
        (holder,) = holders["v1"]
        assert (holder.inferd, holder.state, holder.references) == ("a", "draining", 1)
        assert holder.age_s > 0
        report = host.ended(operation)
        assert report.state == "failed"
        assert report.error is not None
        assert report.error.code == "prepare_failed"
        assert "inferd a: slot" in report.error.message
        assert "still holds v1@sha256:" in report.error.message
        assert f"1 requests after {DRAIN_S:.1f} s" in report.error.message
        # All is as it was, and the stream never noticed.
        assert host.model().active is not None
        assert host.model().active.version == "v2"
        assert sorted(slot.state for slot in host.status().inferds[0].slots) == ["retained", "serving"]
        seen = len(stream.text)
        stream.read(seen + 50)
        with host.client() as client:
            assert client.ask(PROMPTS[0], NEW_TOKENS).version == str(host.active())
        assert {v.tag.version for v in host.status().versions} == {"v1", "v2"}
        # A rollback needs no slot.
        host.rollback()
        host.rollback()
    host.push("v3")
    host.await_serving("v3", "a")
    assert {v.tag.version for v in host.status().versions} == {"v2", "v3"}
