"""Requests while versions come and go: none fails, and each is answered by exactly one version."""

from __future__ import annotations

from tests.process.conftest import NEW_TOKENS, PROMPTS, Expected
from tests.support.serving_host import MODEL, ServingHost
from tests.support.traffic import Traffic


def test_no_request_fails_or_mixes_versions_while_they_change(host: ServingHost, expected: Expected) -> None:
    host.push("v1")
    with Traffic(host.api_socket(), MODEL, PROMPTS, NEW_TOKENS, clients=5) as traffic:
        for change in (None, "v2", "back", "v2", "v3", "back"):
            if change == "back":
                host.rollback()
            elif change is not None:
                host.push(change)
            traffic.await_answers(str(host.active()), 10)
    assert traffic.failures == []
    served = set()
    for answer in traffic.answers:
        version = answer.version.partition("@")[0]
        served.add(version)
        assert answer.fingerprints == {answer.version}
        assert answer.text == expected[version.removeprefix(f"{MODEL}-")][answer.prompt]
    assert len(served) == 3


def test_a_stream_that_runs_at_the_flip_ends_on_its_version(host: ServingHost, expected: Expected) -> None:
    host.push("v1")
    with (
        host.client() as client,
        client.stream("a story", 20_000, is_endless=True) as long,
        client.stream("another", 20_000, is_endless=True) as other,
    ):
        before = str(host.active())
        long.read(5)
        host.push("v2")
        after = len(long.text)
        long.read(after + 100)
        assert long.version == before
        assert long.fingerprints == {before}
        assert client.ask(PROMPTS[0], NEW_TOKENS).version == str(host.active()) != before
        slots = {slot.state: slot for slot in host.status().inferds[0].slots}
        assert slots["retained"].references == 2
        assert other.version == before


def test_a_session_stays_on_its_version_while_that_is_resident(host: ServingHost, expected: Expected) -> None:
    host.push("v1")
    v1 = str(host.active())
    with host.client() as client:
        assert client.ask(PROMPTS[1], NEW_TOKENS, "one").version == v1
        host.push("v2")
        v2 = str(host.active())
        kept = client.ask(PROMPTS[2], NEW_TOKENS, "one")
        assert (kept.version, kept.text) == (v1, expected["v1"][PROMPTS[2]])
        moved = client.ask(PROMPTS[2], NEW_TOKENS, "two")
        assert (moved.version, moved.text) == (v2, expected["v2"][PROMPTS[2]])
        host.push("v3")  # takes the slot of v1
        v3 = str(host.active())
        assert client.ask(PROMPTS[3], NEW_TOKENS, "one").version == v3
        assert client.ask(PROMPTS[3], NEW_TOKENS, "two").version == v2
        host.rollback()
        assert client.ask(PROMPTS[4], NEW_TOKENS, "one").version == v3
