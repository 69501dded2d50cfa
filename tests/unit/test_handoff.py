"""Both ends of the handoff over real SEQPACKET sockets: leases of loaderd, the link of inferd."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import zmq

import inferd.link
from inferd.link import Identity, LoaderdLink
from inferd.preparation import Preparer
from inferd.slot_states import SlotState
from inferd.slots import Slots
from loaderd.authorisation import Policy
from loaderd.chronicle import Chronicle
from loaderd.handoff_server import HandoffServer
from loaderd.journal import Journal
from loaderd.leases import Lease
from loaderd.model_devices import ModelDevices
from shared.codec import HANDOFF_FRAME_BYTES, PROTOCOL_VERSION, decode, encode
from shared.errors import (
    ChangeoverError,
    DeadlineExceeded,
    InvalidRequest,
    PeerGone,
    PrepareFailed,
    SlotBusy,
    StaleEpoch,
    WarmupFailed,
)
from shared.fdpass import SeqpacketChannel
from shared.gate import Gate
from shared.handoff import FROM_LOADERD, Hello, Refused, Report, Welcome
from shared.ids import HOST_DEVICE, Epoch, Generation, VersionTag
from shared.memory.host import HostBackend
from shared.resident import ResidentVersion, check_identity
from shared.run_dir import listen_seqpacket
from tests.support.resident import make_resident, other_digest
from tests.unit.engine.fake_engine import FakeEngine
from tests.unit.memory.resources import open_fds

pytestmark = pytest.mark.usefixtures("plain_logs")


@dataclass(slots=True)
class Holder:
    """Remembers leases as they come and go."""

    here: dict[int, Lease] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def attached(self, lease: Lease) -> None:
        self.here[lease.id] = lease
        self.changed.set()

    def reported(self, lease: Lease) -> None:
        self.changed.set()

    def detached(self, lease: Lease) -> None:
        del self.here[lease.id]
        self.changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():
                self.changed.clear()
                if not condition():
                    await self.changed.wait()


@dataclass(slots=True)
class Pair:
    """One loaderd side and one inferd side in this process."""

    path: Path
    holder: Holder
    server: HandoffServer
    writer: HostBackend
    engine: FakeEngine
    slots: Slots
    link: LoaderdLink
    turned: list[tuple[str, VersionTag]]
    gate: Gate

    @property
    def lease(self) -> Lease:
        return next(iter(self.holder.here.values()))

    def states(self) -> tuple[SlotState, ...]:
        return tuple(slot.life.state for slot in self.slots)


@asynccontextmanager
async def _pair(tmp_path: Path) -> AsyncIterator[Pair]:
    context = zmq.Context()
    publisher = context.socket(zmq.PUB)
    holder = Holder()
    writer, reader, engine = HostBackend(), HostBackend(), FakeEngine()
    engine.start()
    listener = listen_seqpacket(tmp_path / "h.sock", 0o600)
    links: list[LoaderdLink] = []
    try:
        with Journal(tmp_path / "journal.jsonl") as journal:
            chronicle = Chronicle(journal, Generation("g1"), publisher)
            server = HandoffServer(
                Generation("g1"),
                Policy(os.getuid()),
                writer,
                ModelDevices({}, (HOST_DEVICE,)),
                chronicle,
                holder,
            )
            slots = Slots("toy", lambda: [link.slots_changed() for link in links], lambda tag: None)
            gate = Gate()
            preparer = Preparer(slots, engine, reader, gate, verify_mapped=True)
            turned: list[tuple[str, VersionTag]] = []

            def turn(policy: str, before: VersionTag) -> int:
                turned.append((policy, before))
                return 3

            link = LoaderdLink(
                Identity("a", "toy", HOST_DEVICE),
                tmp_path / "h.sock",
                slots,
                preparer,
                engine,
                reader,
                turn,
                gate,
            )
            links.append(link)
            async with asyncio.TaskGroup() as tasks:
                serving = tasks.create_task(server.run(listener))
                linking = tasks.create_task(link.run())
                pair = Pair(tmp_path / "h.sock", holder, server, writer, engine, slots, link, turned, gate)
                await holder.until(lambda: bool(holder.here))
                yield pair
                linking.cancel()
                await asyncio.wait((linking,))
                await preparer.shut_down()
                serving.cancel()
        assert reader.used_bytes == 0, "inferd's side still maps something"
    finally:
        engine.stop()
        listener.close()
        publisher.close(0)
        context.term()


def run(tmp_path: Path, scenario: Callable[[Pair], Awaitable[None]]) -> None:
    """Run one scenario; afterwards no fd may be left."""

    async def main() -> None:
        async with _pair(tmp_path) as pair:
            await scenario(pair)

    before = open_fds()
    asyncio.run(main())
    assert open_fds() == before


async def _prepared(pair: Pair, version: str, fill: bytes = b"x") -> ResidentVersion:
    resident = make_resident(pair.writer, version, {"w": fill * 5000, "b": fill * 3})
    prepared = await pair.lease.prepare(resident, 20)
    assert prepared.tag.to_tag() == resident.tag
    return resident


def _close(*versions: ResidentVersion) -> None:
    for version in versions:
        for slab in version.slabs:
            slab.close()


def test_prepare_commit_release(short_path: Path) -> None:
    async def scenario(pair: Pair) -> None:
        v1 = await _prepared(pair, "v1")
        assert pair.lease.has_prepared(v1.tag)
        assert pair.slots.serving() is None
        committed = await pair.lease.commit(v1.tag, Epoch(1), 5)
        assert committed.flip_ns > 0
        assert pair.slots.serving() == v1.tag
        assert pair.lease.serving == v1.tag
        with pytest.raises(InvalidRequest, match="it cannot be released"):
            await pair.lease.release(v1.tag, 5)
        v2 = await _prepared(pair, "v2", b"y")
        await pair.lease.commit(v2.tag, Epoch(2), 5)
        assert pair.states() == (SlotState.RETAINED, SlotState.SERVING)
        await pair.lease.release(v1.tag, 5)
        assert pair.states() == (SlotState.EMPTY, SlotState.SERVING)
        assert pair.lease.held == (v2.tag,)
        _close(v1, v2)

    run(short_path, scenario)


def test_the_in_flight_policy_comes_with_the_flip(short_path: Path) -> None:
    async def scenario(pair: Pair) -> None:
        v1 = await _prepared(pair, "v1")
        first = await pair.lease.commit(v1.tag, Epoch(1), 5, "abort")
        assert (first.requests_turned, pair.turned) == (0, []), "nothing ran before"
        v2 = await _prepared(pair, "v2", b"y")
        second = await pair.lease.commit(v2.tag, Epoch(2), 5, "switch")
        assert (second.requests_turned, pair.turned) == (3, [("switch", v1.tag)])
        await pair.lease.commit(v2.tag, Epoch(3), 5, "abort")
        assert len(pair.turned) == 1, "the version did not change"
        _close(v1, v2)

    run(short_path, scenario)


def test_an_announced_commit_is_known_by_its_bytes(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[str] = []

    def noting(frame: bytes, adapter: Any, cap_bytes: int) -> Any:
        message = decode(frame, adapter, cap_bytes)
        decoded.append(message.kind)
        return message

    monkeypatch.setattr(inferd.link, "decode", noting)

    async def scenario(pair: Pair) -> None:
        v1 = await _prepared(pair, "v1")
        await pair.lease.announce(v1.tag, Epoch(1), "finish")
        await pair.lease.commit(v1.tag, Epoch(1), 5)
        assert (pair.slots.serving(), pair.slots.epoch) == (v1.tag, 1)
        assert "commit" not in decoded
        v2 = await _prepared(pair, "v2", b"y")
        await pair.lease.announce(v2.tag, Epoch(2), "finish")
        assert pair.slots.serving() == v1.tag, "an announcement changes nothing"
        await pair.lease.commit(v2.tag, Epoch(3), 5)  # another order than the announced one
        assert (pair.slots.serving(), pair.slots.epoch) == (v2.tag, 3)
        assert decoded.count("commit") == 1
        await pair.lease.announce(v1.tag, Epoch(3), "finish")
        with pytest.raises(StaleEpoch):  # announced or not, the fence holds
            await pair.lease.commit(v1.tag, Epoch(3), 5)
        _close(v1, v2)

    run(short_path, scenario)


def test_a_pace_between_announcement_and_commit_costs_nothing(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[str] = []

    def noting(frame: bytes, adapter: Any, cap_bytes: int) -> Any:
        message = decode(frame, adapter, cap_bytes)
        decoded.append(message.kind)
        return message

    monkeypatch.setattr(inferd.link, "decode", noting)

    async def scenario(pair: Pair) -> None:
        v1 = await _prepared(pair, "v1")
        await pair.lease.announce(v1.tag, Epoch(1), "finish")
        await pair.lease.set_pace(0.1, 1e6)
        await pair.lease.commit(v1.tag, Epoch(1), 5)
        assert "pace" in decoded
        assert "commit" not in decoded
        _close(v1)

    run(short_path, scenario)


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
        _close(v1)

    run(short_path, scenario)


def test_a_stale_epoch_is_refused(short_path: Path) -> None:
    async def scenario(pair: Pair) -> None:
        v1 = await _prepared(pair, "v1")
        await pair.lease.commit(v1.tag, Epoch(7), 5)
        v2 = await _prepared(pair, "v2", b"y")
        for epoch in (7, 6):
            with pytest.raises(StaleEpoch, match=f"commit of epoch {epoch} after epoch 7"):
                await pair.lease.commit(v2.tag, Epoch(epoch), 5)
        assert pair.slots.serving() == v1.tag
        _close(v1, v2)

    run(short_path, scenario)


def test_what_was_not_prepared_cannot_be_committed(short_path: Path) -> None:
    async def scenario(pair: Pair) -> None:
        v1 = await _prepared(pair, "v1")
        await pair.lease.commit(v1.tag, Epoch(1), 5)
        unknown = replace(v1.tag, digest=other_digest(v1.tag.digest))
        with pytest.raises(InvalidRequest, match="is not prepared here"):
            await pair.lease.commit(unknown, Epoch(2), 5)
        assert pair.slots.epoch == 1
        _close(v1)

    run(short_path, scenario)


def test_bytes_that_are_not_those_of_the_tag_are_not_prepared(short_path: Path) -> None:
    """The digest is that of what is mapped: tables and bytes are hashed, not believed."""

    async def scenario(pair: Pair) -> None:
        v1 = await _prepared(pair, "v1")
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
        _close(v1, good, other)

    run(short_path, scenario)


@pytest.mark.parametrize("stage", ["build", "warm"])
@pytest.mark.parametrize(
    "error", [WarmupFailed("NaN in layer 3"), RuntimeError("a bug in model code")], ids=["ours", "foreign"]
)
def test_a_version_that_cannot_be_built_leaves_the_slot_empty(
    short_path: Path, stage: str, error: Exception
) -> None:
    async def scenario(pair: Pair) -> None:
        v1 = await _prepared(pair, "v1")
        await pair.lease.commit(v1.tag, Epoch(1), 5)
        pair.engine.fail_next(stage, error)  # type: ignore[arg-type]
        with pytest.raises(PrepareFailed, match=f"inferd a: .*{error}"):
            await _prepared(pair, "v2", b"y")
        assert pair.states() == (SlotState.SERVING, SlotState.EMPTY)
        assert pair.slots.serving() == v1.tag
        v3 = await _prepared(pair, "v3", b"z")
        await pair.lease.commit(v3.tag, Epoch(2), 5)
        _close(v1, v3)

    run(short_path, scenario)


def test_a_slot_that_is_in_use_is_kept_and_named(short_path: Path) -> None:
    async def scenario(pair: Pair) -> None:
        v1 = await _prepared(pair, "v1")
        await pair.lease.commit(v1.tag, Epoch(1), 5)
        ticket = pair.slots.acquire(None)
        v2 = await _prepared(pair, "v2", b"y")
        await pair.lease.commit(v2.tag, Epoch(2), 5)
        with pytest.raises(SlotBusy, match=r"still holds v1@.*: 1 requests after"):
            await pair.lease.release(v1.tag, 0.05)
        assert pair.states() == (SlotState.RETAINED, SlotState.SERVING)
        await pair.lease.commit(v1.tag, Epoch(3), 5)  # the way back is still open
        releasing = asyncio.ensure_future(pair.lease.release(v2.tag, 20))
        await releasing
        v3 = asyncio.ensure_future(_prepared(pair, "v3", b"z"))
        prepared = await v3
        assert pair.states() == (SlotState.SERVING, SlotState.PREPARED)
        await pair.lease.commit(prepared.tag, Epoch(4), 5)
        draining = asyncio.ensure_future(pair.lease.release(v1.tag, 20))
        await pair.holder.until(lambda: SlotState.DRAINING in pair.states())
        pair.slots.release(ticket)
        await draining
        assert pair.states() == (SlotState.EMPTY, SlotState.SERVING)
        _close(v1, v2, prepared)

    run(short_path, scenario)


def test_a_held_version_comes_back_byte_for_byte(short_path: Path) -> None:
    async def scenario(pair: Pair) -> None:
        v1 = await _prepared(pair, "v1")
        await pair.lease.commit(v1.tag, Epoch(1), 5)
        incoming = await pair.lease.hand_back(v1.tag, 5)
        adopter = HostBackend()
        adopted = incoming.map(adopter)
        assert adopted.layout == v1.layout
        check_identity(adopted, hash_bytes=True)
        _close(v1, adopted)
        with pytest.raises(InvalidRequest, match="is not mapped here"):
            await pair.lease.hand_back(replace(v1.tag, digest=other_digest(v1.tag.digest)), 5)

    run(short_path, scenario)


def test_the_end_of_the_connection_is_the_end_of_the_lease(short_path: Path) -> None:
    async def scenario(pair: Pair) -> None:
        v1 = await _prepared(pair, "v1")
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
        _close(v1, v2)

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
        _close(v1)

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
        v1 = await _prepared(pair, "v1")
        _close(v1)

    run(short_path, scenario)
