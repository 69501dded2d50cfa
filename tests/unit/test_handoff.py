"""A lease over the handoff: preparing, pacing, releasing and handing back, and how it ends."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from inferd.slot_states import SlotState
from shared.codec import HANDOFF_FRAME_BYTES, PROTOCOL_VERSION, decode, encode
from shared.errors import (
    ChangeoverError,
    DeadlineExceeded,
    InvalidRequest,
    PeerGone,
    PrepareFailed,
    SlotBusy,
    WarmupFailed,
)
from shared.fdpass import SeqpacketChannel
from shared.handoff import FROM_LOADERD, Hello, Refused, Report, Welcome
from shared.ids import Epoch
from shared.memory.host import HostBackend
from shared.resident import check_identity
from tests.support.resident import make_resident, other_digest
from tests.unit.handoff_pair import Pair, close, prepared, run

pytestmark = pytest.mark.usefixtures("plain_logs")


def test_the_pace_holds_until_the_next_or_the_end_of_the_lease(short_path: Path) -> None:
    async def scenario(pair: Pair) -> None:
        lease = pair.lease
        await lease.set_pace(0.02, 0.0)
        v1 = make_resident(pair.writer, "v1", {"w": b"x" * 5000})
        preparing = asyncio.create_task(lease.prepare(v1, 20))
        seen: list[Report | None] = []

        def has_reported_often() -> bool:
            if all(lease.last_report is not report for report in seen):
                seen.append(lease.last_report)
            return len(seen) > 5

        await pair.holder.until(has_reported_often)
        assert pair.states()[0] is SlotState.MAPPING, "nothing is hashed at pace 0"
        assert pair.gate.admitted_bytes == 0
        await lease.set_pace(0.02, math.inf)
        await preparing
        await lease.commit(v1.tag, Epoch(1), 5)
        assert lease.last_report is not None
        assert lease.last_report.hashed_bytes == 5000
        await lease.set_pace(60, 1.0)
        await pair.holder.until(lambda: pair.gate.spread_s(1) > 0.0)
        lease.close()
        await pair.holder.until(lambda: bool(pair.holder.here) and pair.lease is not lease)
        assert pair.gate.spread_s(1) == 0.0, "without a limit"
        close(v1)

    run(short_path, scenario)


def test_bytes_that_are_not_those_of_the_tag_are_not_prepared(short_path: Path) -> None:
    """The digest is that of what is mapped: tables and bytes are hashed, not believed."""

    async def scenario(pair: Pair) -> None:
        v1 = await prepared(pair, "v1")
        await pair.lease.commit(v1.tag, Epoch(1), 5)
        good = make_resident(pair.writer, "v2", {"w": b"y" * 5000})
        lying_tag = replace(good, tag=replace(good.tag, digest=other_digest(good.tag.digest)))
        with pytest.raises(PrepareFailed, match="tables amount to"):
            await pair.lease.prepare(lying_tag, 20)
        other = make_resident(pair.writer, "v2", {"w": b"z" * 5000})
        layout = replace(good.layout, slabs=(other.slabs[0].entry,))
        with pytest.raises(PrepareFailed, match="resident bytes of 1 tensors"):
            await pair.lease.prepare(replace(good, layout=layout, slabs=other.slabs), 20)
        assert pair.states() == (SlotState.SERVING, SlotState.EMPTY)
        assert pair.lease.held == (v1.tag,)
        close(v1, good, other)

    run(short_path, scenario)


@pytest.mark.parametrize("stage", ["build", "warm"])
@pytest.mark.parametrize(
    "error", [WarmupFailed("NaN in layer 3"), RuntimeError("a bug in model code")], ids=["ours", "foreign"]
)
def test_a_version_that_cannot_be_built_leaves_the_slot_empty(
    short_path: Path, stage: str, error: Exception
) -> None:
    async def scenario(pair: Pair) -> None:
        v1 = await prepared(pair, "v1")
        await pair.lease.commit(v1.tag, Epoch(1), 5)
        pair.engine.fail_next(stage, error)  # type: ignore[arg-type]
        with pytest.raises(PrepareFailed, match=f"inferd a: .*{error}"):
            await prepared(pair, "v2", b"y")
        assert pair.states() == (SlotState.SERVING, SlotState.EMPTY)
        assert pair.slots.serving() == v1.tag
        v3 = await prepared(pair, "v3", b"z")
        await pair.lease.commit(v3.tag, Epoch(2), 5)
        close(v1, v3)

    run(short_path, scenario)


def test_a_slot_that_is_in_use_is_kept_and_named(short_path: Path) -> None:
    async def scenario(pair: Pair) -> None:
        v1 = await prepared(pair, "v1")
        await pair.lease.commit(v1.tag, Epoch(1), 5)
        ticket = pair.slots.acquire(None)
        v2 = await prepared(pair, "v2", b"y")
        await pair.lease.commit(v2.tag, Epoch(2), 5)
        with pytest.raises(SlotBusy, match=r"still holds v1@.*: 1 requests after"):
            await pair.lease.release(v1.tag, 0.05)
        assert pair.states() == (SlotState.RETAINED, SlotState.SERVING)
        await pair.lease.commit(v1.tag, Epoch(3), 5)  # the way back is still open
        releasing = asyncio.ensure_future(pair.lease.release(v2.tag, 20))
        await releasing
        v3 = await prepared(pair, "v3", b"z")
        assert pair.states() == (SlotState.SERVING, SlotState.PREPARED)
        await pair.lease.commit(v3.tag, Epoch(4), 5)
        draining = asyncio.ensure_future(pair.lease.release(v1.tag, 20))
        await pair.holder.until(lambda: SlotState.DRAINING in pair.states())
        pair.slots.release(ticket)
        await draining
        assert pair.states() == (SlotState.EMPTY, SlotState.SERVING)
        close(v1, v2, v3)

    run(short_path, scenario)


def test_a_held_version_comes_back_byte_for_byte(short_path: Path) -> None:
    async def scenario(pair: Pair) -> None:
        v1 = await prepared(pair, "v1")
        await pair.lease.commit(v1.tag, Epoch(1), 5)
        incoming = await pair.lease.hand_back(v1.tag, 5)
        adopter = HostBackend()
        adopted = incoming.map(adopter)
        assert adopted.layout == v1.layout
        check_identity(adopted, hash_bytes=True)
        close(v1, adopted)
        with pytest.raises(InvalidRequest, match="is not mapped here"):
            await pair.lease.hand_back(replace(v1.tag, digest=other_digest(v1.tag.digest)), 5)

    run(short_path, scenario)


def test_the_end_of_the_connection_is_the_end_of_the_lease(short_path: Path) -> None:
    async def scenario(pair: Pair) -> None:
        v1 = await prepared(pair, "v1")
        await pair.lease.commit(v1.tag, Epoch(3), 5)
        first = pair.lease
        pair.engine.hold("build")
        v2 = make_resident(pair.writer, "v2", {"w": b"y" * 5000})
        pending = asyncio.ensure_future(first.prepare(v2, 20))
        await asyncio.to_thread(pair.engine.wait_reached, "build")
        first.close()
        with pytest.raises(PeerGone):
            await pending
        assert first.held == ()
        assert pair.slots.serving() == v1.tag
        # It attaches again by itself and says what it holds and which epoch it carried out.
        await pair.holder.until(lambda: any(lease is not first for lease in pair.holder.here.values()))
        again = pair.lease
        assert (again.epoch, again.serving) == (3, v1.tag)
        pair.engine.release("build")
        await pair.holder.until(lambda: again.has_prepared(v2.tag))
        await again.release(v2.tag, 5)
        close(v1, v2)

    run(short_path, scenario)


def test_an_answer_that_does_not_come_has_a_deadline(short_path: Path) -> None:
    async def scenario(pair: Pair) -> None:
        pair.engine.hold("warm")
        v1 = make_resident(pair.writer, "v1", {"w": b"x" * 500})
        with pytest.raises(DeadlineExceeded, match="inferd a did not prepare within"):
            await pair.lease.prepare(v1, 0.1)
        assert pair.lease.holds(v1.tag), "it may still map the memory"
        pair.engine.release("warm")
        await pair.holder.until(lambda: pair.lease.has_prepared(v1.tag))
        close(v1)

    run(short_path, scenario)


def _hello(**changes: object) -> Hello:
    fields: dict[str, object] = {
        "protocol": PROTOCOL_VERSION,
        "name": "b",
        "model": "toy",
        "backend": "host",
        "device": "host",
        "engine": "test",
        "flip": "pointer",
        "serves_two_versions": True,
        "epoch": 0,
    }
    return Hello.model_validate(fields | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"protocol": PROTOCOL_VERSION + 1}, "speaks protocol"),
        ({"backend": "cuda"}, "maps 'cuda' memory"),
        ({"device": "GPU-0"}, "on device GPU-0, versions of toy are on host"),
    ],
)
def test_a_peer_that_does_not_fit_is_told_why(
    short_path: Path, changes: dict[str, object], message: str
) -> None:
    async def scenario(pair: Pair) -> None:
        channel = await SeqpacketChannel.connect(str(pair.path))
        await channel.send(encode(_hello(**changes), HANDOFF_FRAME_BYTES))
        frame, fds = await channel.receive()
        fds.close()
        answer = decode(frame, FROM_LOADERD, HANDOFF_FRAME_BYTES)
        assert isinstance(answer, Refused)
        with pytest.raises(ChangeoverError, match=message):
            raise answer.error.to_error()
        channel.close()

    run(short_path, scenario)


async def _say(channel: SeqpacketChannel, frames: Sequence[tuple[bytes, list[int]]]) -> None:
    """Send frames and read until the other end hangs up; nothing but a welcome may come back."""
    for frame, fds in frames:
        await channel.send(frame, fds)
    while True:
        answer, received = await channel.receive()
        received.close()
        assert isinstance(decode(answer, FROM_LOADERD, HANDOFF_FRAME_BYTES), Welcome)


def test_garbage_unasked_fds_and_a_second_hello_end_only_that_connection(short_path: Path) -> None:
    async def scenario(pair: Pair) -> None:
        fd = os.memfd_create("unasked")
        for frames in (
            [(b"\xc1garbage", [])],
            [(encode(_hello(), HANDOFF_FRAME_BYTES), [fd] * 100)] * 2,
            [(encode(_hello(), HANDOFF_FRAME_BYTES), []), (encode(_hello(), HANDOFF_FRAME_BYTES), [fd])],
        ):
            channel = await SeqpacketChannel.connect(str(pair.path))
            with pytest.raises(PeerGone):
                await _say(channel, frames)
            channel.close()
        os.close(fd)
        await pair.holder.until(lambda: len(pair.holder.here) == 1)
        v1 = await prepared(pair, "v1")
        close(v1)

    run(short_path, scenario)
