"""Both ends of the handoff in one process, over real sockets: leases of loaderd, the link of inferd."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import zmq

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
from shared.gate import Gate
from shared.ids import HOST_DEVICE, Generation, VersionTag
from shared.memory.host import HostBackend
from shared.resident import ResidentVersion
from shared.run_dir import listen_seqpacket
from tests.support.procfs import open_fds
from tests.support.resident import make_resident
from tests.unit.engine.fake_engine import FakeEngine


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


async def prepared(pair: Pair, version: str, fill: bytes = b"x") -> ResidentVersion:
    """A version that the inferd has prepared; the caller closes it."""
    resident = make_resident(pair.writer, version, {"w": fill * 5000, "b": fill * 3})
    answer = await pair.lease.prepare(resident, 20)
    assert answer.tag.to_tag() == resident.tag
    return resident


def close(*versions: ResidentVersion) -> None:
    """Close all slabs of each."""
    for version in versions:
        for slab in version.slabs:
            slab.close()
