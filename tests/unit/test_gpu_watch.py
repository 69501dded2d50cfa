"""GPU errors reach the chronicle, once each, and the watch ends without leaving anything in NVML."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from loaderd.gpu_reading import GpuReading
from loaderd.gpu_watch import GpuWatch
from loaderd.nvml import Nvml
from shared.errors import Fact
from shared.ids import DeviceId
from tests.unit.fake_nvml import GPU, Device, FakeNvml, FakeNvmlError, Process

DEVICE = DeviceId(GPU)


class Records:
    """What was recorded, to be awaited."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[tuple[str, str, dict[str, Fact]]] = asyncio.Queue()

    def record(
        self,
        kind: str,
        text: str = "",
        *,
        model: str = "",
        version: str = "",
        operation: str = "",
        **data: Fact,
    ) -> None:
        self.queue.put_nowait((kind, text, data))

    async def next(self) -> tuple[str, str, dict[str, Fact]]:
        return await asyncio.wait_for(self.queue.get(), 10)


@asynccontextmanager
async def watching(library: FakeNvml) -> AsyncIterator[tuple[GpuWatch, Records]]:
    """A watch that runs for the time of the block; afterwards NVML is shut down (FakeNvml sees that no
    event set was left)."""
    records = Records()
    watch = GpuWatch(Nvml(library), (DEVICE,), records, read_every_s=0.01, wait_ms=5)
    task = asyncio.create_task(watch.run())
    try:
        yield watch, records
    finally:
        task.cancel()
        await asyncio.wait((task,))
        assert task.cancelled()
        assert not library.is_started


async def _read_again(library: FakeNvml) -> None:
    await asyncio.to_thread(library.wait_for_reading)


def test_an_xid_is_recorded_with_its_device() -> None:
    async def run() -> None:
        device = Device()
        library = FakeNvml(device)
        async with watching(library) as (_, records):
            library.happen(device, library.nvmlEventTypeXidCriticalError, 31)
            kind, text, data = await records.next()
            assert (kind, data) == ("gpu.xid", {"device": GPU, "xid": 31})
            assert "Xid 31" in text

    asyncio.run(run())


def test_an_ecc_event_is_recorded_once_although_its_count_rises_too() -> None:
    async def run() -> None:
        device = Device()
        library = FakeNvml(device)
        async with watching(library) as (_, records):
            await _read_again(library)
            device.errors = 1
            library.happen(device, library.nvmlEventTypeDoubleBitEccError)
            assert (await records.next())[0] == "gpu.ecc"
            library.happen(device, library.nvmlEventTypeXidCriticalError, 48)
            assert (await records.next())[0] == "gpu.xid"
            await _read_again(library)
            assert records.queue.empty()

    asyncio.run(run())


def test_counts_tell_where_there_are_no_events() -> None:
    async def run() -> None:
        device = Device(errors=2, event_kinds=0)
        library = FakeNvml(device)
        async with watching(library) as (_, records):
            assert (await records.next())[0] == "gpu.unwatched"
            await _read_again(library)
            device.errors = 5  # those from before the start are old news
            kind, _, data = await records.next()
            assert (kind, data) == ("gpu.ecc", {"device": GPU, "errors": 3})
            await _read_again(library)
            assert records.queue.empty()

    asyncio.run(run())


def test_a_lost_gpu_ends_the_events_and_not_the_watch() -> None:
    async def run() -> None:
        library = FakeNvml(Device())
        async with watching(library) as (_, records):
            library.lose()
            kind, text, _ = await records.next()
            assert kind == "gpu.unwatched"
            assert "GPU is lost" in text
            assert not library.sets
            await _read_again(library)
            assert records.queue.empty()

    asyncio.run(run())


def test_the_last_reading_is_at_hand() -> None:
    async def run() -> None:
        device = Device(processes=[Process(7, 3 << 20, "vllm")])
        library = FakeNvml(device)
        async with watching(library) as (watch, _):
            await _read_again(library)
            assert watch.reading(DEVICE).free_bytes == 60 << 30
            assert watch.holders(DEVICE) == "GPU memory is held by pid 7 (vllm) with 3 MiB"
            library.failing["nvmlDeviceGetMemoryInfo"] = FakeNvmlError(15, "GPU is lost")
            await _read_again(library)
            assert watch.reading(DEVICE).free_bytes is None

    asyncio.run(run())


def test_without_nvml_nothing_is_known_and_nothing_runs() -> None:
    watch = GpuWatch(None, (DEVICE,), Records())
    assert not watch.has_nvml
    assert watch.reading(DEVICE) == GpuReading()
    assert watch.holders(DEVICE) == ""
    asyncio.run(watch.run())
