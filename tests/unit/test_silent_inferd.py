"""An inferd that hangs: it loses its lease instead of holding up whoever asks something of its model."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from pathlib import Path

import pytest
import zmq

from loaderd import daemon, leases
from loaderd.chronicle import Chronicle
from loaderd.config import LoaderdConfig
from loaderd.daemon import SILENT_LOOKS, Loaderd
from loaderd.journal import Journal
from loaderd.leases import Lease
from shared.codec import HANDOFF_FRAME_BYTES, PROTOCOL_VERSION, encode
from shared.errors import DeadlineExceeded, PeerGone
from shared.fdpass import SeqpacketChannel
from shared.handoff import Hello, Report
from shared.ids import Digest, Epoch, Generation, LeaseId, VersionRef, VersionTag
from shared.supervisor import Supervisor

TAG = VersionTag(VersionRef("toy", "v1"), Digest("sha256:" + "a" * 64))
HELLO = Hello(
    protocol=PROTOCOL_VERSION,
    name="a",
    model="toy",
    backend="host",
    device="host",
    engine="none",
    flip="pointer",
    serves_two_versions=True,
    epoch=0,
)
REPORT = Report(epoch=0, slots=(), running=0, waiting=0, tokens_generated=0)


def pair() -> tuple[Lease, socket.socket]:
    """A lease and the inferd's end of it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return Lease(LeaseId(1), SeqpacketChannel(ours), HELLO), theirs


async def ask_for_ever(lease: Lease) -> None:
    while True:
        with suppress(DeadlineExceeded):
            await lease.commit(TAG, Epoch(1), 0.0)


def test_one_that_does_not_read_loses_its_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    """No time limit of an answer has begun while its question cannot be sent."""
    monkeypatch.setattr(leases, "SEND_WITHIN_S", 0.01)

    async def scenario() -> None:
        lease, inferd = pair()
        with inferd:
            talking = asyncio.create_task(lease.converse(lambda _: None))
            with pytest.raises(PeerGone, match="inferd a has not read for"):
                await ask_for_ever(lease)
            with pytest.raises(PeerGone):
                await talking
            assert not lease.held

    asyncio.run(scenario())


def test_silence_is_counted_from_the_last_word() -> None:
    async def scenario() -> None:
        lease, inferd = pair()
        heard = asyncio.Event()
        with inferd:
            talking = asyncio.create_task(lease.converse(lambda _: heard.set()))
            assert [lease.count_silence() for _ in range(3)] == [0, 1, 2]
            inferd.send(encode(REPORT, HANDOFF_FRAME_BYTES))
            await heard.wait()
            await asyncio.sleep(0)
            assert [lease.count_silence() for _ in range(2)] == [0, 1]
        with pytest.raises(PeerGone):
            await talking
        lease.close()

    asyncio.run(scenario())


def test_maintenance_ends_the_lease_of_one_that_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon, "MAINTAIN_EVERY_S", 0.0)

    async def scenario(chronicle: Chronicle) -> None:
        config = LoaderdConfig(model_roots=(tmp_path,))
        async with Supervisor() as supervisor:
            loaderd = Loaderd(config, chronicle, supervisor)
            lease, inferd = pair()
            loaderd.handoff.leases[lease.id] = lease
            maintaining = asyncio.create_task(loaderd.maintain())
            with inferd, pytest.raises(PeerGone):
                await lease.converse(lambda _: None)
            maintaining.cancel()
            loaderd.inquiries.close()
        (entry,) = chronicle.journal.newest(None, 10)
        assert entry.kind == "lease.silent"
        assert entry.cause.startswith("inferd a has not reported")
        assert lease.count_silence() > SILENT_LOOKS

    with (
        zmq.Context() as context,
        context.socket(zmq.PUB) as publisher,
        Journal(tmp_path / "journal.jsonl") as journal,
    ):
        asyncio.run(scenario(Chronicle(journal, Generation("g"), publisher)))
