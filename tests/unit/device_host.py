"""A host with several devices in one process: loaderd's state and its handoff socket, and inferds' links.

Devices are a `FakeMemory`, the sockets, leases, journal and transfers are real.  loaderd can end and be
started again over the same memory while inferds go on, as another process would be.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from inferd.link import Identity, LoaderdLink
from inferd.preparation import Preparer
from inferd.slots import Slots
from loaderd.chronicle import Chronicle
from loaderd.config import LoaderdConfig
from loaderd.daemon import Loaderd
from loaderd.journal import Journal
from loaderd.seal.create import seal_directory
from shared.control import (
    HistoryEntry,
    OperationReport,
    Push,
    PushReply,
    Rollback,
    Status,
    StatusReport,
)
from shared.gate import Gate
from shared.ids import DeviceId, Generation, VersionTag
from shared.messages import InFlight
from shared.resident import ResidentVersion
from shared.run_dir import listen_seqpacket
from shared.supervisor import Supervisor
from tests.support.procfs import open_fds
from tests.unit.checkpoint_files import content, write_single
from tests.unit.engine.fake_engine import FakeEngine
from tests.unit.memory.fake_backend import FakeBackend, FakeMemory

A, B = DeviceId("GPU-a"), DeviceId("GPU-b")
MODEL = "toy"
OTHER_MODEL = "other"
TENSOR_BYTES = 700_000
"""Two fit a slab of 2 MiB."""

SEEDS = (1, 2, 3, 4, 5)
SLAB_BYTES = 2 << 20
VERSION_SLABS = 3
VERSION_BYTES = VERSION_SLABS * SLAB_BYTES
CONTENT_BYTES = len(SEEDS) * TENSOR_BYTES
WITHIN_S = 30


class Signal:
    """Woken by everything that happens: events of loaderd, slots of inferds."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    def send_multipart(self, msg_parts: Sequence[bytes], flags: int = 0) -> None:
        """As loaderd's publisher."""
        self.wake()

    def wake(self) -> None:
        self._changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WITHIN_S):
            while not condition():
                self._changed.clear()
                if not condition():
                    await self._changed.wait()


@dataclass(slots=True)
class Replica:
    """One inferd."""

    name: str
    device: DeviceId
    backend: FakeBackend
    engine: FakeEngine
    slots: Slots
    preparer: Preparer
    link: LoaderdLink
    task: asyncio.Task[None]


@dataclass(slots=True)
class DeviceHost:
    """Use as made by `device_host`."""

    folder: Path
    config: LoaderdConfig
    memory: FakeMemory
    signal: Signal
    monkeypatch: pytest.MonkeyPatch
    replicas: dict[str, Replica] = field(default_factory=dict)
    generation: int = 0
    _loaderd: Loaderd | None = None
    _backend: FakeBackend | None = None
    _stack: AsyncExitStack | None = None

    # --- loaderd ---------------------------------------------------------------------------------

    @property
    def loaderd(self) -> Loaderd:
        assert self._loaderd is not None
        return self._loaderd

    @property
    def backend(self) -> FakeBackend:
        """loaderd's, since its last start."""
        assert self._backend is not None
        return self._backend

    async def start(self) -> None:
        """Start loaderd, with a new backend over the same memory."""
        self._backend = backend = FakeBackend(self.memory)
        self.monkeypatch.setattr("loaderd.daemon.open_backend", lambda *_, **__: backend)
        self.generation += 1
        self._stack = stack = AsyncExitStack()
        journal = stack.enter_context(Journal(self.folder / "journal.jsonl"))
        listener = stack.enter_context(listen_seqpacket(self.folder / "handoff.sock", 0o600))
        stack.callback((self.folder / "handoff.sock").unlink)
        supervisor = Supervisor()
        chronicle = Chronicle(journal, Generation(f"g{self.generation}"), self.signal)
        self._loaderd = loaderd = Loaderd(self.config, chronicle, supervisor)
        stack.callback(loaderd.closer.close)
        stack.callback(loaderd.slabs.close)
        stack.callback(loaderd.inquiries.close)
        await stack.enter_async_context(supervisor)
        loaderd.recover()
        supervisor.start(loaderd.handoff.run(listener), name="handoff")
        supervisor.start(loaderd.pace.run(), name="pace")

    async def stop(self) -> None:
        """End loaderd; what inferds map stays."""
        if self._stack is not None:
            stack, self._stack, self._loaderd = self._stack, None, None
            await stack.aclose()
            self.backend.check_no_leaks()

    async def restart(self) -> None:
        await self.stop()
        await self.start()

    # --- inferds ---------------------------------------------------------------------------------

    async def attach(self, name: str, device: DeviceId, *, is_awaited: bool = True) -> Replica:
        """Start an inferd on a device; waits for its lease unless told not to."""
        backend, engine = FakeBackend(self.memory), FakeEngine()
        engine.start()
        links: list[LoaderdLink] = []

        def changed() -> None:
            self.signal.wake()
            for each in links:
                each.slots_changed()

        slots = Slots(MODEL, changed, lambda tag: None)
        gate = Gate()
        preparer = Preparer(slots, engine, backend, gate, verify_mapped=True)
        link = LoaderdLink(
            Identity(name, MODEL, device),
            self.folder / "handoff.sock",
            slots,
            preparer,
            engine,
            backend,
            lambda policy, before: 0,
            gate,
        )
        links.append(link)
        task = asyncio.create_task(link.run())
        replica = Replica(name, device, backend, engine, slots, preparer, link, task)
        self.replicas[name] = replica
        if is_awaited:
            await self.signal.until(lambda: any(x.name == name for x in self.loaderd.handoff.leases.values()))
        return replica

    async def detach(self, name: str) -> None:
        """Let an inferd do without loaderd until `attach_again`; it keeps what it maps."""
        task = self.replicas[name].task
        task.cancel()
        await asyncio.wait((task,))

    def attach_again(self, name: str) -> None:
        replica = self.replicas[name]
        replica.task = asyncio.create_task(replica.link.run())

    async def end(self, name: str) -> None:
        """End an inferd; nothing of it stays mapped."""
        await self.detach(name)
        replica = self.replicas.pop(name)
        await replica.preparer.shut_down()
        replica.engine.stop()
        replica.backend.check_no_leaks()
        if self._loaderd is not None:
            leases = self._loaderd.handoff.leases
            await self.signal.until(lambda: all(lease.name != name for lease in leases.values()))

    # --- asking ----------------------------------------------------------------------------------

    async def ask(self, version: str, *, dry_run: bool = False, model: str = MODEL) -> PushReply:
        return await self.loaderd.push(Push(name=f"{model}-{version}", dry_run=dry_run))

    async def push(self, version: str, *, model: str = MODEL) -> OperationReport:
        """Push and wait for the end, whichever it is."""
        reply = await self.ask(version, model=model)
        assert reply.operation is not None, reply.plan
        return await self.ended(reply.operation)

    async def rollback(self, in_flight: InFlight = "finish") -> OperationReport:
        """Go back and wait for the end, whichever it is."""
        return await self.ended((await self.loaderd.rollback(Rollback(in_flight=in_flight))).operation)

    async def ended(self, operation: str) -> OperationReport:
        """The report of an operation once it has ended and what it let go of is free."""
        known = self.loaderd._host.operations.get(operation)
        await self.signal.until(lambda: not known.is_running)
        await self.loaderd.closer.settle()
        return known.report()

    async def status(self) -> StatusReport:
        return await self.loaderd.inquiries.status(Status())

    def serving(self) -> dict[str, VersionTag | None]:
        """What each inferd serves."""
        return {name: replica.slots.serving() for name, replica in self.replicas.items()}

    async def until_serving(self, version: str) -> VersionTag:
        """Wait until loaderd has `version` active and every inferd serves it; its tag."""

        def is_served() -> bool:
            deployment = self.loaderd.deployments.get(MODEL)
            active = deployment.active if deployment is not None else None
            return (
                active is not None
                and active.ref.version == version
                and set(self.serving().values()) <= {active.tag}
            )

        await self.signal.until(is_served)
        active = self.loaderd.deployments[MODEL].active
        assert active is not None
        return active.tag

    def used(self) -> Mapping[DeviceId, int]:
        """Bytes of the devices that anybody holds."""
        return {device: self.memory.used[device] for device in self.memory.devices}

    def copies(self) -> Mapping[DeviceId, ResidentVersion]:
        """Those of the active version; none while there is none."""
        active = self.loaderd.deployments[MODEL].active
        return active.copies if active is not None else {}

    def history(self) -> tuple[HistoryEntry, ...]:
        """The journal, oldest first."""
        return self.loaderd._host.chronicle.journal.newest(None, 1000)

    def kinds(self) -> set[str]:
        """Kinds of the journal's entries."""
        return {entry.kind for entry in self.history()}

    @contextmanager
    def flipped_byte(self, device: DeviceId) -> Iterator[None]:
        """Damage a sealed slab of the device for the time of the block."""
        slab_id = next(key for key, entry in sorted(self.memory.entries.items()) if entry.device == device)
        data = self.memory.sealed[slab_id]
        data[5] ^= 1
        yield
        data[5] ^= 1


def write_version(
    root: Path, version: str, changed: Mapping[int, int] | None = None, *, model: str = MODEL
) -> Path:
    """A sealed version of five tensors; `changed` gives some of them other bytes."""
    seeds = dict(enumerate(SEEDS)) | dict(changed or {})
    tensors = {f"t{i}": ("U8", (TENSOR_BYTES,), content(seed, TENSOR_BYTES)) for i, seed in seeds.items()}
    folder = write_single(root / f"{model}-{version}", tensors)
    seal_directory(folder)
    return folder


ALL_OTHER = {index: 10 + seed for index, seed in enumerate(SEEDS)}
"""A version that shares nothing with the first."""


@asynccontextmanager
async def device_host(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    devices: Sequence[str] | str = "all",
    other_devices: Sequence[str] | str = "all",
    capacity_bytes: int = 64 << 20,
    there: tuple[DeviceId, ...] = (A, B),
    grace_s: float = 0.2,
) -> AsyncIterator[DeviceHost]:
    """loaderd runs, and a folder for models is there; at the end everything is freed on every device."""
    roots = folder / "models"
    roots.mkdir()
    config = LoaderdConfig.model_validate(
        {
            "model_roots": (roots,),
            "slab_bytes": SLAB_BYTES,
            "adopt_grace_s": grace_s,
            "models": {MODEL: {"devices": devices}, OTHER_MODEL: {"devices": other_devices}},
        }
    )
    memory = FakeMemory(capacity_bytes, there)
    host = DeviceHost(folder, config, memory, Signal(), monkeypatch)
    fds = open_fds()
    await host.start()
    try:
        yield host
    finally:
        for name in tuple(host.replicas):
            await host.end(name)
        await host.stop()
    assert memory.used_bytes == 0
    assert not memory.owners
    assert open_fds() == fds


async def attach_both(host: DeviceHost) -> None:
    """An inferd on each of two devices."""
    await host.attach("a", A)
    await host.attach("b", B)
