"""`GpuWatch`: what NVML said last, and the errors that GPUs report, told to the chronicle."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

from loaderd.gpu_reading import GpuEvent, GpuReading, describe_event, describe_holders
from loaderd.nvml import GpuEvents, Nvml
from shared.errors import DriverError, Fact
from shared.ids import DeviceId

Answer = TypeVar("Answer")

READ_EVERY_S = 2.0

WAIT_MS = 500
"""How long one wait for an event takes, and so how long the end of the daemon may take."""


class Recorder(Protocol):
    """Who is told: the chronicle."""

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
        """Tell what happened."""
        ...


class GpuWatch:
    """The last reading of each device, refreshed while `run` runs.

    Used from the event loop's thread, which never waits for NVML: its calls can take long when a GPU
    misbehaves, which is when status is asked for.
    """

    def __init__(
        self,
        nvml: Nvml | None,
        devices: Sequence[DeviceId],
        recorder: Recorder,
        *,
        read_every_s: float = READ_EVERY_S,
        wait_ms: int = WAIT_MS,
    ) -> None:
        """Owns `nvml`; None where there is none, and then nothing is known."""
        self._nvml = nvml
        self._devices = tuple(devices)
        self._recorder = recorder
        self._read_every_s = read_every_s
        self._wait_ms = wait_ms
        self._events: GpuEvents | None = None
        self._readings: dict[DeviceId, GpuReading] = {}
        self._errors: dict[DeviceId, int] = {}
        # An uncorrectable error comes as an event and as a count, in either order; it is recorded once.
        self._is_told = False  # by an event, since the last reading
        self._is_counted = False  # by the last reading

    @property
    def has_nvml(self) -> bool:
        """Whether there is anything to run."""
        return self._nvml is not None

    def reading(self, device: DeviceId) -> GpuReading:
        """What NVML said last; empty where it has not said anything."""
        return self._readings.get(device, GpuReading())

    def holders(self, device: DeviceId) -> str:
        """One line that names the processes that hold the device's memory; empty where they are unknown."""
        return describe_holders(self.reading(device).holders, os.getpid())

    async def run(self) -> None:
        """Read and wait for events, until cancelled; then NVML is closed."""
        if self._nvml is None:
            return
        nvml = self._nvml
        thread = ThreadPoolExecutor(1, thread_name_prefix="nvml")
        loop = asyncio.get_running_loop()

        def on_thread(work: Callable[[], Answer]) -> asyncio.Future[Answer]:
            return loop.run_in_executor(thread, work)

        try:
            await self._register(on_thread, nvml)
            read_at = 0.0
            while True:
                if time.monotonic() >= read_at:
                    self._take(await on_thread(lambda: {each: nvml.read(each) for each in self._devices}))
                    read_at = time.monotonic() + self._read_every_s
                if await self._next_event(on_thread):
                    read_at = 0.0
        finally:
            # Behind a wait that is still under way on the thread, which nothing else can end.
            await on_thread(lambda: self._close(nvml))
            thread.shutdown(wait=False)

    async def _register(
        self, on_thread: Callable[[Callable[[], None]], asyncio.Future[None]], nvml: Nvml
    ) -> None:
        def register() -> None:
            self._events = nvml.watch(self._devices)

        try:
            await on_thread(register)
        except DriverError as error:
            self._recorder.record("gpu.unwatched", f"only error counts are read: {error.message}")

    async def _next_event(
        self, on_thread: Callable[[Callable[[], GpuEvent | None]], asyncio.Future[GpuEvent | None]]
    ) -> bool:
        """Record one event, or wait a while for none."""
        events = self._events
        if events is None:
            await asyncio.sleep(self._read_every_s)
            return False
        try:
            event = await on_thread(lambda: events.wait(self._wait_ms))
        except DriverError as error:
            self._events = None
            events.close()
            self._recorder.record("gpu.unwatched", f"no more GPU events: {error.message}")
            return False
        if event is None:
            return False
        if event.xid is None:
            if not self._is_counted:
                self._is_told = True
                self._recorder.record("gpu.ecc", describe_event(event), device=event.device)
            self._is_counted = False
        else:
            self._recorder.record("gpu.xid", describe_event(event), device=event.device, xid=event.xid)
        return True

    def _take(self, readings: dict[DeviceId, GpuReading]) -> None:
        """Keep readings, and record errors that no event told of."""
        self._readings = readings
        self._is_counted = False
        for device, reading in readings.items():
            count = reading.uncorrected_errors
            if count is None:
                continue
            before = self._errors.get(device, count)
            self._errors[device] = count
            if count > before and not self._is_told:
                self._is_counted = True
                self._recorder.record(
                    "gpu.ecc",
                    f"{device} had {count - before} uncorrectable ECC errors",
                    device=device,
                    errors=count - before,
                )
        self._is_told = False

    def _close(self, nvml: Nvml) -> None:
        if self._events is not None:
            self._events.close()
            self._events = None
        nvml.close()
