"""Slots are filled and emptied on one thread, and the event loop turns meanwhile."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Literal, Self, cast

import pytest
import torch

from inferd.engine.protocol import WarmReport
from inferd.preparation import Preparer
from inferd.slot_states import SlotState
from inferd.slot_thread import SlotThread
from inferd.slots import Slots
from shared.errors import WarmupFailed
from shared.gate import Gate
from shared.ids import Epoch, VersionTag
from shared.memory.backend import MemoryBackend, Slab
from shared.memory.host import HostBackend
from shared.resident import ResidentVersion
from shared.transfer import IncomingVersion
from tests.support.resident import make_resident
from tests.unit.engine.fake_engine import FakeEngine

pytestmark = pytest.mark.usefixtures("plain_logs")

WITHIN_S = 20.0


class Device:
    """What must never be touched by two threads at once, and not by the event loop's at all."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.threads: set[int] = set()
        self.blocks_on: tuple[str, threading.Event] | None = None
        self._busy = threading.Lock()

    def work(self, what: str) -> None:
        assert self._busy.acquire(blocking=False), f"{what} runs beside something else"
        try:
            self.threads.add(threading.get_ident())
            if self.blocks_on is not None and self.blocks_on[0] == what:
                assert self.blocks_on[1].wait(WITHIN_S), f"the event loop stood still during {what}"
            self.done.append(what)
        finally:
            self._busy.release()


class Engine(FakeEngine):
    """Touches the device."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device

    def build(self, slot: int, tag: VersionTag, tensors: Mapping[str, torch.Tensor], assets: Path) -> None:
        self._device.work("build")
        super().build(slot, tag, tensors, assets)

    def warm(self, slot: int) -> WarmReport:
        self._device.work("warm")
        return super().warm(slot)

    def retire(self, slot: int) -> None:
        self._device.work("retire")
        super().retire(slot)


class WatchedSlab:
    """A slab whose end is work on the device."""

    def __init__(self, slab: Slab, device: Device) -> None:
        self._slab = slab
        self._device = device

    def __getattr__(self, name: str) -> object:
        return getattr(self._slab, name)

    def close(self) -> None:
        self._device.work("unmap")
        self._slab.close()


class Incoming:
    """A transfer that is complete."""

    def __init__(self, version: ResidentVersion, device: Device) -> None:
        self.tag = version.tag
        slabs = tuple(cast(Slab, WatchedSlab(slab, device)) for slab in version.slabs)
        self._version = replace(version, slabs=slabs)
        self._device = device

    def map(self, backend: MemoryBackend) -> ResidentVersion:
        del backend
        self._device.work("map")
        return self._version

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


class Scene:
    """A preparer over host memory, and a device that watches it."""

    def __init__(self) -> None:
        self.device = Device()
        self.engine = Engine(self.device)
        self.slots = Slots("toy", lambda: None, lambda tag: None)
        self.backend = HostBackend()
        self.preparer = Preparer(self.slots, self.engine, self.backend, Gate(), verify_mapped=True)

    def incoming(self, version: str) -> IncomingVersion:
        resident = make_resident(self.backend, version, {"w": version.encode() * 500})
        return cast(IncomingVersion, Incoming(resident, self.device))

    async def serve(self, version: str, epoch: int) -> VersionTag:
        incoming = self.incoming(version)
        await self.preparer.prepare(incoming, WITHIN_S)
        self.slots.commit(incoming.tag, Epoch(epoch))
        return incoming.tag


def run(scenario: Callable[[Scene], Awaitable[None]]) -> Scene:
    """Run a scenario, then shut down: nothing may be mapped any more."""

    async def main() -> Scene:
        scene = Scene()
        await scenario(scene)
        await scene.preparer.close()
        await scene.preparer.shut_down()
        assert scene.backend.used_bytes == 0
        assert len(scene.device.threads) == 1
        assert threading.get_ident() not in scene.device.threads
        return scene

    return asyncio.run(main())


def test_all_work_on_slots_is_done_by_one_thread() -> None:
    async def scenario(scene: Scene) -> None:
        first = await scene.serve("v1", 1)
        second = await scene.serve("v2", 2)
        await scene.preparer.release(first, WITHIN_S)
        await scene.serve("v3", 3)
        await scene.preparer.release(second, WITHIN_S)

    scene = run(scenario)
    assert scene.device.done.count("unmap") == scene.device.done.count("map") == 3


@pytest.mark.parametrize("what", ["retire", "unmap"])
@pytest.mark.parametrize("why", ["released", "failed"])
def test_the_loop_turns_while_a_slot_is_emptied(what: Literal["retire", "unmap"], why: str) -> None:
    async def scenario(scene: Scene) -> None:
        tag = await scene.serve("v1", 1)
        await scene.serve("v2", 2)
        if why == "failed":
            await scene.preparer.release(tag, WITHIN_S)
            scene.engine.fail_next("warm", WarmupFailed("NaN"))
        loop_turned = threading.Event()
        scene.device.blocks_on = (what, loop_turned)
        scene.device.done.clear()
        # Not before the work has begun: it is set from the loop, once nothing else is left to do there.
        asyncio.get_running_loop().call_later(0.05, loop_turned.set)
        if why == "failed":
            with pytest.raises(WarmupFailed):
                await scene.preparer.prepare(scene.incoming("v3"), WITHIN_S)
        else:
            await scene.preparer.release(tag, WITHIN_S)
        assert scene.device.done[-2:] == ["retire", "unmap"]
        assert [slot.life.state for slot in scene.slots] == [SlotState.EMPTY, SlotState.SERVING]

    run(scenario)


def test_a_version_that_was_not_built_is_unmapped_and_not_retired() -> None:
    async def scenario(scene: Scene) -> None:
        scene.engine.fail_next("build", WarmupFailed("a tensor is missing"))
        with pytest.raises(WarmupFailed):
            await scene.preparer.prepare(scene.incoming("v1"), WITHIN_S)
        assert scene.device.done == ["map", "build", "unmap"]
        await scene.serve("v2", 1)

    run(scenario)


def test_work_waits_for_what_a_cancelled_caller_began() -> None:
    order: list[str] = []
    began, may_end = threading.Event(), threading.Event()

    def long() -> None:
        began.set()
        assert may_end.wait(WITHIN_S)
        order.append("long")

    async def main() -> None:
        thread = SlotThread()
        cancelled = asyncio.ensure_future(thread.run(long))
        await asyncio.to_thread(began.wait)
        cancelled.cancel()
        await asyncio.wait((cancelled,))
        assert cancelled.cancelled()
        after = asyncio.ensure_future(thread.run(lambda: order.append("after")))
        may_end.set()
        await after
        thread.close()

    asyncio.run(main())
    assert order == ["long", "after"]
