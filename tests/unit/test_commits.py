"""Commits over the handoff: the flip, its announcement, and what the epoch and the slot refuse."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import inferd.link
from inferd.slot_states import SlotState
from shared.codec import decode
from shared.errors import InvalidRequest, StaleEpoch
from shared.ids import Epoch
from tests.support.resident import other_digest
from tests.unit.handoff_pair import Pair, close, prepared, run

pytestmark = pytest.mark.usefixtures("plain_logs")


def test_prepare_commit_release(short_path: Path) -> None:
    async def scenario(pair: Pair) -> None:
        v1 = await prepared(pair, "v1")
        assert pair.lease.has_prepared(v1.tag)
        assert pair.slots.serving() is None
        committed = await pair.lease.commit(v1.tag, Epoch(1), 5)
        assert committed.flip_ns > 0
        assert pair.slots.serving() == v1.tag
        assert pair.lease.serving == v1.tag
        with pytest.raises(InvalidRequest, match="it cannot be released"):
            await pair.lease.release(v1.tag, 5)
        v2 = await prepared(pair, "v2", b"y")
        await pair.lease.commit(v2.tag, Epoch(2), 5)
        assert pair.states() == (SlotState.RETAINED, SlotState.SERVING)
        await pair.lease.release(v1.tag, 5)
        assert pair.states() == (SlotState.EMPTY, SlotState.SERVING)
        assert pair.lease.held == (v2.tag,)
        close(v1, v2)

    run(short_path, scenario)


def test_the_in_flight_policy_comes_with_the_flip(short_path: Path) -> None:
    async def scenario(pair: Pair) -> None:
        v1 = await prepared(pair, "v1")
        first = await pair.lease.commit(v1.tag, Epoch(1), 5, "abort")
        assert (first.requests_turned, pair.turned) == (0, []), "nothing ran before"
        v2 = await prepared(pair, "v2", b"y")
        second = await pair.lease.commit(v2.tag, Epoch(2), 5, "switch")
        assert (second.requests_turned, pair.turned) == (3, [("switch", v1.tag)])
        await pair.lease.commit(v2.tag, Epoch(3), 5, "abort")
        assert len(pair.turned) == 1, "the version did not change"
        close(v1, v2)

    run(short_path, scenario)


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kinds of the messages that the link decodes, as they come."""
    kinds: list[str] = []

    def noting(frame: bytes, adapter: Any, cap_bytes: int) -> Any:
        message = decode(frame, adapter, cap_bytes)
        kinds.append(message.kind)
        return message

    monkeypatch.setattr(inferd.link, "decode", noting)
    return kinds


def test_an_announced_commit_is_known_by_its_bytes(short_path: Path, decoded: list[str]) -> None:
    async def scenario(pair: Pair) -> None:
        v1 = await prepared(pair, "v1")
        await pair.lease.announce(v1.tag, Epoch(1), "finish")
        await pair.lease.commit(v1.tag, Epoch(1), 5)
        assert (pair.slots.serving(), pair.slots.epoch) == (v1.tag, 1)
        assert "commit" not in decoded
        v2 = await prepared(pair, "v2", b"y")
        await pair.lease.announce(v2.tag, Epoch(2), "finish")
        assert pair.slots.serving() == v1.tag, "an announcement changes nothing"
        await pair.lease.commit(v2.tag, Epoch(3), 5)  # another order than the announced one
        assert (pair.slots.serving(), pair.slots.epoch) == (v2.tag, 3)
        assert decoded.count("commit") == 1
        await pair.lease.announce(v1.tag, Epoch(3), "finish")
        with pytest.raises(StaleEpoch):  # announced or not, the fence holds
            await pair.lease.commit(v1.tag, Epoch(3), 5)
        close(v1, v2)

    run(short_path, scenario)


def test_a_pace_between_announcement_and_commit_costs_nothing(short_path: Path, decoded: list[str]) -> None:
    async def scenario(pair: Pair) -> None:
        v1 = await prepared(pair, "v1")
        await pair.lease.announce(v1.tag, Epoch(1), "finish")
        await pair.lease.set_pace(0.1, 1e6)
        await pair.lease.commit(v1.tag, Epoch(1), 5)
        assert "pace" in decoded
        assert "commit" not in decoded
        close(v1)

    run(short_path, scenario)


def test_a_stale_epoch_is_refused(short_path: Path) -> None:
    async def scenario(pair: Pair) -> None:
        v1 = await prepared(pair, "v1")
        await pair.lease.commit(v1.tag, Epoch(7), 5)
        v2 = await prepared(pair, "v2", b"y")
        for epoch in (7, 6):
            with pytest.raises(StaleEpoch, match=f"commit of epoch {epoch} after epoch 7"):
                await pair.lease.commit(v2.tag, Epoch(epoch), 5)
        assert pair.slots.serving() == v1.tag
        close(v1, v2)

    run(short_path, scenario)


def test_what_was_not_prepared_cannot_be_committed(short_path: Path) -> None:
    async def scenario(pair: Pair) -> None:
        v1 = await prepared(pair, "v1")
        await pair.lease.commit(v1.tag, Epoch(1), 5)
        unknown = replace(v1.tag, digest=other_digest(v1.tag.digest))
        with pytest.raises(InvalidRequest, match="is not prepared here"):
            await pair.lease.commit(unknown, Epoch(2), 5)
        assert pair.slots.epoch == 1
        close(v1)

    run(short_path, scenario)
