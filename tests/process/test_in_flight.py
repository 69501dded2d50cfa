"""The in-flight policies: what becomes of a request that runs at the flip."""

from __future__ import annotations

from pathlib import Path

import pytest

from loaderd.ctl.exit_codes import ExitCode
from tests.process.conftest import NEW_TOKENS, PROMPTS, Expected
from tests.support.serving_host import ServingHost
from tests.support.traffic import AnswerError


@pytest.mark.parametrize("policy", ["switch", "restart"])
def test_a_running_request_goes_on_with_the_new_weights(host: ServingHost, policy: str) -> None:
    host.push("v1")
    before = str(host.active())
    with host.client() as client, client.stream("a story", 20_000, is_endless=True) as stream:
        stream.read(40)
        result = host.ctl("push", "tiny-v2", "--in-flight", policy, "--json")
        assert result.code == ExitCode.DONE, result.err
        newest = host.model().operation
        assert newest is not None
        after = str(host.active())
        while after not in stream.fingerprints and not stream.is_complete:
            stream.read(len(stream.text) + 200)  # what the old version made is still on its way
        # The header named the version at the start; each chunk names the one that made it.
        assert stream.version == before
        assert stream.fingerprints == {before, after}
        assert (newest.in_flight, newest.requests_turned) == (policy, 1)
    slots = {slot.state: slot for slot in host.status().inferds[0].slots}
    assert set(slots) == {"serving", "retained"}


def test_restart_computes_what_the_new_version_would(host: ServingHost, expected: Expected) -> None:
    """After the tokens it already has, a restarted sequence is the new version's own."""
    host.push("v1")
    host.push("v2")
    prompt = PROMPTS[0]
    with host.client() as client:
        with client.stream(prompt, NEW_TOKENS * 40, is_endless=True) as stream:
            stream.read(30)
            assert host.ctl("rollback", "--in-flight", "restart").code == ExitCode.DONE
            stream.read(len(stream.text) + 60)
        # What v2 began, v1 goes on with: the same as v1 given prompt and beginning.
        assert str(host.active()).startswith("v1@")
        assert client.ask(prompt, NEW_TOKENS).text == expected["v1"][prompt]


def test_abort_ends_running_requests_with_an_error_they_can_see(host: ServingHost) -> None:
    host.push("v1")
    host.push("v2")
    with host.client() as client, client.stream("a story", 20_000, is_endless=True) as stream:
        stream.read(20)
        assert host.ctl("rollback", "--in-flight", "abort").code == ExitCode.DONE
        with pytest.raises(AnswerError, match="withdrawn"):
            stream.read(1_000_000)
    host.awaited(
        lambda: all(slot.references == 0 for slot in host.status().inferds[0].slots), "no reference is left"
    )


def test_finish_is_what_happens_unasked(host: ServingHost) -> None:
    host.push("v1")
    before = str(host.active())
    with host.client() as client, client.stream("a story", 20_000, is_endless=True) as stream:
        stream.read(20)
        report = host.push("v2")
        stream.read(len(stream.text) + 100)
        assert stream.fingerprints == {before}
        assert (report.in_flight, report.requests_turned) == ("finish", 0)


def test_requests_are_not_carried_over_to_another_tokenizer(host: ServingHost, models: Path) -> None:
    host.push("v1")
    active, retained = host.active(), host.retained()
    folder = models / "tiny-v9"
    if not folder.exists():
        folder.mkdir()
        for file in (models / "tiny-v2").iterdir():
            if file.name != "seal.json":
                (folder / file.name).write_bytes(file.read_bytes())
        tokenizer = folder / "tokenizer.json"
        tokenizer.write_text(tokenizer.read_text() + "\n")
    result = host.ctl("push", "tiny-v9", "--in-flight", "switch")
    assert result.code == ExitCode.REFUSED
    assert "tokenizer.json of tiny-v9 differs" in result.out + result.err
    assert (host.active(), host.retained()) == (active, retained)
