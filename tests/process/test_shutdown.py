"""SIGTERM, and what systemd is told: in which order things end, and what goes on."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.process.conftest import NEW_TOKENS, PROMPTS, Expected
from tests.support.reference import greedy_texts
from tests.support.serving_host import ServingHost, serving_host
from tests.support.traffic import AnswerError

LONG = 1_500


WATCHDOG = {"WATCHDOG_USEC": "200000"}


@pytest.fixture(scope="module")
def host(models: Path) -> Iterator[ServingHost]:
    with serving_host(models) as host:
        host.start_loaderd(WATCHDOG)
        yield host


def test_an_inferd_ends_in_order(host: ServingHost, models: Path) -> None:
    inferd = host.start_inferd(more="shutdown_timeout_s = 60")
    host.push("v1")
    whole = greedy_texts(models / "tiny-v1", ("a long story",), 100)["a long story"]
    with (
        host.client() as client,
        host.client() as other,
        client.stream("a long story", LONG, is_endless=True) as stream,
    ):
        stream.read(1)
        inferd.signal(signal.SIGTERM)
        inferd.await_notice("STOPPING=1")
        host.awaited(lambda: host.ready().status_code == 503, "inferd to be unready")
        assert "shutting down" in host.ready().text
        assert host.get(host.run_dir.inferd_health("a"), "/livez").status_code == 200
        with pytest.raises(AnswerError) as refused:
            other.ask(PROMPTS[0], NEW_TOKENS)
        assert refused.value.status == 503
        answer = stream.answer()
    assert len(answer.text) >= LONG - 5
    assert answer.text.startswith(whole[:50])
    assert inferd.wait() == 0
    host.awaited(lambda: host.status().inferds == (), "its lease to end")


def test_an_inferd_that_is_given_its_first_version_ends_in_order(host: ServingHost) -> None:
    """It is ready before it serves; SIGTERM comes while it maps, builds or warms."""
    host.push("v1")
    for _ in range(3):
        inferd = host.start_inferd()
        assert inferd.terminate() == 0


def test_an_inferd_that_waits_for_a_slot_ends_in_order(host: ServingHost) -> None:
    inferd = host.start_inferd(more="shutdown_timeout_s = 1")
    host.push("v1")
    with host.client() as client, client.stream("held", 30_000, is_endless=True) as stream:
        stream.read(1)
        host.push("v2")
        operation = host.start_push("v3")
        host.awaited(
            lambda: any(slot.state == "draining" for slot in host.status().inferds[0].slots),
            "the push to wait for the slot",
        )
        inferd.signal(signal.SIGTERM)
        with pytest.raises(AnswerError, match="shutting down"):
            stream.read()
        assert inferd.wait() == 0
    host.ended(operation)
    assert host.loaderd.is_running


def test_a_second_sigterm_ends_it_at_once(host: ServingHost) -> None:
    inferd = host.start_inferd(more="shutdown_timeout_s = 600")
    host.push("v1")
    with host.client() as client, client.stream("held", 30_000, is_endless=True) as stream:
        stream.read(1)
        inferd.signal(signal.SIGTERM)
        inferd.await_notice("STOPPING=1")
        inferd.signal(signal.SIGTERM)
        assert inferd.wait(10) == -signal.SIGTERM


def test_loaderd_ends_and_the_next_one_finds_all_as_it_was(host: ServingHost, expected: Expected) -> None:
    host.start_inferd()
    host.push("v1")
    host.push("v2")
    active, retained = host.active(), host.retained()
    loaderd = host.loaderd
    assert loaderd.terminate() == 0
    assert any(notice.startswith("STOPPING=1") for notice in loaderd.notices)
    host.kill_loaderd()
    assert not [path for path in host.run_dir.path.iterdir() if path.name in ("control.sock", "handoff.sock")]
    with host.client() as client:
        assert client.ask(PROMPTS[0], NEW_TOKENS).text == expected["v2"][PROMPTS[0]]
    assert host.ready().status_code == 200
    host.start_loaderd(WATCHDOG)
    host.await_serving("v2", "a")
    host.awaited(lambda: host.retained() == retained, "the way back")
    assert host.active() == active
    host.rollback()
    with host.client() as client:
        assert client.ask(PROMPTS[0], NEW_TOKENS).text == expected["v1"][PROMPTS[0]]
    assert host.inferds["a"].terminate() == 0


def test_systemd_is_told(host: ServingHost) -> None:
    inferd = host.start_inferd(environ=WATCHDOG)
    assert inferd.await_notice("STATUS=") == "STATUS=waiting for a version"
    host.push("v1")
    inferd.await_notice(f"STATUS=serving {host.active()}")
    inferd.await_notice("WATCHDOG=1")
    host.loaderd.await_notice("WATCHDOG=1")
    # No sign of life while the loop does not turn.
    inferd.signal(signal.SIGSTOP)
    count = len(inferd.notices)
    host.loaderd.notices.clear()
    host.loaderd.await_notice("WATCHDOG=1")
    assert len(inferd.notices) <= count + 1
    inferd.signal(signal.SIGCONT)
    inferd.notices.clear()
    inferd.await_notice("WATCHDOG=1")
    assert inferd.terminate() == 0
    inferd.await_notice("STOPPING=1")
    assert host.loaderd.terminate() == 0
    host.loaderd.await_notice("STOPPING=1")
