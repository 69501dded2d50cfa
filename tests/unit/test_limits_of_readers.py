"""What users who may only look can have loaderd do: little at a time, and never in others' way."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import zmq

from loaderd import handoff_server, inquiries
from loaderd.authorisation import Caller, Policy
from loaderd.chronicle import Chronicle
from loaderd.handoff_server import STRANGERS_AT_ONCE, HandoffServer
from loaderd.host import Host
from loaderd.inquiries import FOLDER_READS_AT_ONCE, Inquiries
from loaderd.journal import Journal
from loaderd.leases import Lease
from loaderd.model_devices import ModelDevices
from loaderd.scrub import Scrub
from shared.codec import HANDOFF_FRAME_BYTES, PROTOCOL_VERSION, decode, encode
from shared.control import Diff
from shared.errors import NotPermitted, PeerError, ResourceError, UnknownVersion
from shared.fdpass import SeqpacketChannel
from shared.handoff import FROM_LOADERD, Hello, Refused
from shared.ids import HOST_DEVICE, Generation
from shared.memory.host import HostBackend
from shared.run_dir import listen_seqpacket


def test_folders_are_read_by_a_thread_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pushes read, verify and adopt on asyncio's threads, which 64 questions could occupy."""
    gate = threading.Event()

    def slow(_roots: object, name: str) -> object:
        assert gate.wait(20)
        raise UnknownVersion(name)

    monkeypatch.setattr(inquiries, "open_checkpoint", slow)

    async def scenario() -> None:
        asked = Inquiries(cast(Host, SimpleNamespace(versions=())), {}, (), cast(Scrub, None))
        diffs = [
            asyncio.create_task(asked.diff(Diff(before="a-v1", after="a-v2")))
            for _ in range(FOLDER_READS_AT_ONCE // 2)
        ]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        with pytest.raises(ResourceError, match="try again"):
            await asked.diff(Diff(before="a-v1", after="a-v2"))
        assert threading.active_count() < FOLDER_READS_AT_ONCE
        assert await asyncio.to_thread(lambda: "a push") == "a push"
        for each in diffs[1:]:
            each.cancel()  # whose deadline has passed
        await asyncio.wait(diffs[1:])
        gate.set()
        with pytest.raises(UnknownVersion):
            await diffs[0]
        with pytest.raises(UnknownVersion):
            await asked.diff(Diff(before="a-v1", after="a-v2"))
        asked.close()

    asyncio.run(scenario())


class _Nobody(Policy):
    """Nobody may attach, not even root."""

    def check(self, verb: str, caller: Caller) -> None:
        raise NotPermitted(f"uid {caller.uid} may not {verb}")


class _Holder:
    def attached(self, lease: Lease) -> None:
        raise AssertionError(lease)

    reported = detached = attached


def test_strangers_cannot_use_up_the_fds_or_fill_the_journal(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handoff_server, "HELLO_WITHIN_S", 20.0)
    hello = Hello(
        protocol=PROTOCOL_VERSION,
        name="stranger",
        model="toy",
        backend="host",
        device="host",
        engine="none",
        flip="pointer",
        serves_two_versions=True,
        epoch=0,
    )

    async def scenario(journal: Journal, publisher: zmq.Socket[bytes]) -> None:
        chronicle = Chronicle(journal, Generation("g"), publisher)
        server = HandoffServer(
            Generation("g"),
            _Nobody(os.getuid()),
            HostBackend(),
            ModelDevices({}, (HOST_DEVICE,)),
            chronicle,
            _Holder(),
        )
        listener = listen_seqpacket(short_path / "h.sock", 0o600)
        running = asyncio.create_task(server.run(listener))
        waiting = [
            await SeqpacketChannel.connect(str(short_path / "h.sock")) for _ in range(STRANGERS_AT_ONCE)
        ]
        for _ in range(3):
            surplus = await SeqpacketChannel.connect(str(short_path / "h.sock"))
            with pytest.raises(PeerError):
                await surplus.receive()
            surplus.close()
        # Those who are waited for are told why, and make room for the next.
        for channel in waiting:
            await channel.send(encode(hello, HANDOFF_FRAME_BYTES))
            frame, _ = await channel.receive()
            refused = decode(frame, FROM_LOADERD, HANDOFF_FRAME_BYTES)
            assert isinstance(refused, Refused)
            assert refused.error.code == "not_permitted"
            with pytest.raises(PeerError):
                await channel.receive()
            channel.close()
        another = await SeqpacketChannel.connect(str(short_path / "h.sock"))
        await another.send(encode(hello, HANDOFF_FRAME_BYTES))
        frame, _ = await another.receive()
        assert isinstance(decode(frame, FROM_LOADERD, HANDOFF_FRAME_BYTES), Refused)
        another.close()
        running.cancel()
        await asyncio.wait((running,))
        listener.close()
        assert journal.newest(None, 10) == ()

    with (
        zmq.Context() as context,
        context.socket(zmq.PUB) as publisher,
        Journal(short_path / "journal.jsonl") as journal,
    ):
        asyncio.run(scenario(journal, publisher))
