"""A stand-in for the module `pynvml`, stricter than it: no call before nvmlInit or after nvmlShutdown,
an event set is freed once and before the end, and only registered kinds arrive."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field

GPU = "GPU-11111111-2222-3333-4444-555555555555"


class FakeNvmlError(Exception):
    def __init__(self, value: int, text: str) -> None:
        super().__init__(text)
        self.value = value


class FakeMismatchError(Exception):
    pass


@dataclass(slots=True)
class Process:
    pid: int
    usedGpuMemory: int | None  # noqa: N815  as the binding spells it
    name: str | bytes | None = "python"


@dataclass(slots=True)
class Device:
    """What the library would answer; None: not supported."""

    uuid: str = GPU
    total: int = 80 << 30
    free: int | None = 60 << 30
    errors: int | None = 0
    processes: list[Process] = field(default_factory=list)
    event_kinds: int = 0xFFFF


@dataclass(frozen=True, slots=True)
class _Memory:
    total: int
    free: int


@dataclass(frozen=True, slots=True)
class _Event:
    device: Device
    eventType: int  # noqa: N815
    eventData: int  # noqa: N815


class _EventSet:
    def __init__(self) -> None:
        self.kinds: dict[str, int] = {}


class FakeNvml:
    NVMLError = FakeNvmlError
    NVMLLibraryMismatchError = FakeMismatchError
    NVML_ERROR_TIMEOUT = 10
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
    NVML_VOLATILE_ECC = 0
    nvmlEventTypeDoubleBitEccError = 2  # noqa: N815
    nvmlEventTypeXidCriticalError = 8  # noqa: N815

    def __init__(self, *devices: Device) -> None:
        self.devices = {device.uuid: device for device in devices}
        self.is_started = False
        self.sets: list[_EventSet] = []
        self._reads = 0
        self.failing: dict[str, Exception] = {}  # by name of the call
        self._arrived = threading.Condition()
        self._events: deque[_Event | Exception] = deque()

    # --- for tests -------------------------------------------------------------------------------

    def happen(self, device: Device, kind: int, data: int = 0) -> None:
        with self._arrived:
            self._events.append(_Event(device, kind, data))
            self._arrived.notify_all()

    def lose(self) -> None:
        """Let waits fail from now on, as when a GPU is lost."""
        with self._arrived:
            self._events.append(FakeNvmlError(15, "GPU is lost"))
            self._arrived.notify_all()

    def wait_for_reading(self) -> None:
        """Until a whole reading was taken that began after now: the next but one begins."""
        with self._arrived:
            goal = self._reads + 2
            assert self._arrived.wait_for(lambda: self._reads >= goal, 10), "nobody reads"

    def _check(self, call: str) -> None:
        assert self.is_started, f"{call} without nvmlInit"
        if call in self.failing:
            raise self.failing[call]

    # --- the library -----------------------------------------------------------------------------

    def nvmlInit(self) -> None:  # noqa: N802
        assert not self.is_started, "nvmlInit twice"
        if "nvmlInit" in self.failing:
            raise self.failing["nvmlInit"]
        self.is_started = True

    def nvmlShutdown(self) -> None:  # noqa: N802
        self._check("nvmlShutdown")
        assert not self.sets, "nvmlShutdown with event sets that live"
        self.is_started = False

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Device:  # noqa: N802
        self._check("nvmlDeviceGetHandleByUUID")
        if uuid not in self.devices:
            raise FakeNvmlError(6, "Not Found")
        return self.devices[uuid]

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, device: Device) -> Device:  # noqa: N802
        self._check("nvmlDeviceGetDeviceHandleFromMigDeviceHandle")
        if not device.uuid.startswith("MIG-"):
            raise FakeNvmlError(2, "Invalid Argument")
        return next(each for each in self.devices.values() if each.uuid.startswith("GPU-"))

    def nvmlDeviceGetUUID(self, device: Device) -> str:  # noqa: N802
        self._check("nvmlDeviceGetUUID")
        return device.uuid

    def nvmlDeviceGetMemoryInfo(self, device: Device) -> _Memory:  # noqa: N802
        with self._arrived:
            self._reads += 1
            self._arrived.notify_all()
        self._check("nvmlDeviceGetMemoryInfo")
        if device.free is None:
            raise FakeNvmlError(3, "Not Supported")
        return _Memory(device.total, device.free)

    def nvmlDeviceGetTotalEccErrors(self, device: Device, kind: int, counter: int) -> int:  # noqa: N802
        self._check("nvmlDeviceGetTotalEccErrors")
        assert (kind, counter) == (1, 0)
        if device.errors is None:
            raise FakeNvmlError(3, "Not Supported")
        return device.errors

    def nvmlDeviceGetComputeRunningProcesses(self, device: Device) -> list[Process]:  # noqa: N802
        self._check("nvmlDeviceGetComputeRunningProcesses")
        return list(device.processes)

    def nvmlSystemGetProcessName(self, pid: int) -> str | bytes:  # noqa: N802
        self._check("nvmlSystemGetProcessName")
        for device in self.devices.values():
            for each in device.processes:
                if each.pid == pid and each.name is not None:
                    return each.name
        raise FakeNvmlError(6, "Not Found")

    def nvmlDeviceGetSupportedEventTypes(self, device: Device) -> int:  # noqa: N802
        self._check("nvmlDeviceGetSupportedEventTypes")
        return device.event_kinds

    def nvmlEventSetCreate(self) -> _EventSet:  # noqa: N802
        self._check("nvmlEventSetCreate")
        self.sets.append(_EventSet())
        return self.sets[-1]

    def nvmlDeviceRegisterEvents(self, device: Device, kinds: int, events: _EventSet) -> None:  # noqa: N802
        self._check("nvmlDeviceRegisterEvents")
        assert events in self.sets
        assert kinds
        assert not kinds & ~device.event_kinds, "an event kind that the device does not have"
        events.kinds[device.uuid] = kinds

    def nvmlEventSetWait(self, events: _EventSet, timeout_ms: int) -> _Event:  # noqa: N802
        self._check("nvmlEventSetWait")
        assert events in self.sets, "a wait on a set that was freed"
        with self._arrived:
            if not self._arrived.wait_for(lambda: self._events, timeout_ms / 1000):
                raise FakeNvmlError(10, "Timeout")
            event = self._events[0]
            if isinstance(event, Exception):
                raise event
            self._events.popleft()
        assert events.kinds[event.device.uuid] & event.eventType, "an event nobody registered for"
        return event

    def nvmlEventSetFree(self, events: _EventSet) -> None:  # noqa: N802
        self._check("nvmlEventSetFree")
        assert events in self.sets, "an event set is freed twice"
        self.sets.remove(events)
