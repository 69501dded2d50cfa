"""`Nvml`: what the NVIDIA Management Library knows, as plain values.

The library comes with the driver and is reached through the package `nvidia-ml-py`, which is optional.
What it does not answer (a container without rights, a virtual GPU, an older driver) is None or empty,
and never an error: serving does not depend on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any, TypeVar

import structlog

from loaderd.gpu_reading import GpuEvent, GpuHolder, GpuReading
from shared.errors import DriverError
from shared.ids import DeviceId

log = structlog.get_logger(__name__)

Answer = TypeVar("Answer")


def open_nvml() -> Nvml | None:
    """Load and initialise NVML; None, with a line in the log, where it is not there."""
    try:
        library: Any = import_module("pynvml")
    except ImportError:
        log.info("nvml.absent", reason="the package nvidia-ml-py is not installed")
        return None
    try:
        return Nvml(library)
    except DriverError as error:
        log.warning("nvml.absent", reason=error.message)
        return None


class Nvml:
    """An initialised library.  Thread-safe as NVML is; every call may block while a GPU misbehaves."""

    def __init__(self, library: Any) -> None:
        """`library` is the module `pynvml` or stands for it; raises DriverError if it does not start."""
        self._library = library
        self._refusals: tuple[type[Exception], ...] = (library.NVMLError, library.NVMLLibraryMismatchError)
        try:
            library.nvmlInit()
        except self._refusals as error:
            raise _driver_error("nvmlInit", error) from error

    def close(self) -> None:
        """Shut NVML down; event sets must be closed."""
        self.ask(self._library.nvmlShutdown)

    def read(self, device: DeviceId) -> GpuReading:
        """Everything that NVML tells about a device now.  Blocking."""
        nvml = self._library
        handle = self.handle_of(device)
        if handle is None:
            return GpuReading()
        memory = self.ask(nvml.nvmlDeviceGetMemoryInfo, handle)
        errors = self.ask(
            nvml.nvmlDeviceGetTotalEccErrors,
            self.physical(handle),
            nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
            nvml.NVML_VOLATILE_ECC,
        )
        processes = self.ask(nvml.nvmlDeviceGetComputeRunningProcesses, handle) or ()
        return GpuReading(
            total_bytes=None if memory is None else int(memory.total),
            free_bytes=None if memory is None else int(memory.free),
            uncorrected_errors=None if errors is None else int(errors),
            holders=tuple(
                GpuHolder(
                    int(each.pid),
                    self._process_name(each.pid),
                    None if each.usedGpuMemory is None else int(each.usedGpuMemory),
                )
                for each in processes
            ),
        )

    def watch(self, devices: Iterable[DeviceId]) -> GpuEvents:
        """Ask for Xid and uncorrectable ECC events; the caller closes the result.  Raises DriverError where
        none of the devices has such events."""
        return GpuEvents(self, self._library, self._refusals, tuple(devices))

    def handle_of(self, device: DeviceId) -> Any:
        """A device's handle; None if it has none.  CUDA spells the UUID of a MIG instance as a GPU's."""
        for uuid in (device, device.replace("GPU-", "MIG-", 1)):
            handle = self.ask(self._library.nvmlDeviceGetHandleByUUID, uuid)
            if handle is not None:
                return handle
        return None

    def physical(self, handle: Any) -> Any:
        """The GPU that a MIG instance is part of; any other device itself."""
        parent = self.ask(self._library.nvmlDeviceGetDeviceHandleFromMigDeviceHandle, handle)
        return handle if parent is None else parent

    def _process_name(self, pid: int) -> str:
        try:
            name = self.ask(self._library.nvmlSystemGetProcessName, pid)
        except UnicodeDecodeError:  # the binding decodes what may be any bytes
            name = None
        return _text(name) if name else "?"

    def ask(self, call: Callable[..., Answer], *arguments: object) -> Answer | None:
        """What a call answers; None where NVML refuses."""
        try:
            return call(*arguments)
        except self._refusals:
            return None


class GpuEvents:
    """A registration for events of some GPUs.  Used by one thread at a time."""

    def __init__(
        self, nvml: Nvml, library: Any, refusals: tuple[type[Exception], ...], devices: tuple[DeviceId, ...]
    ) -> None:
        self._nvml = nvml
        self._library = library
        self._refusals = refusals
        self._set: Any = None
        try:
            self._set = library.nvmlEventSetCreate()
            registered = [device for device in devices if self._register(device)]
        except refusals as error:
            self.close()
            raise _driver_error("registration for GPU events", error) from error
        if not registered:
            self.close()
            raise DriverError("registration for GPU events", 0, "these devices have none")

    def _register(self, device: DeviceId) -> bool:
        nvml = self._library
        handle = self._nvml.handle_of(device)
        if handle is None:
            return False
        physical = self._nvml.physical(handle)
        wanted = nvml.nvmlEventTypeXidCriticalError | nvml.nvmlEventTypeDoubleBitEccError
        kinds = wanted & nvml.nvmlDeviceGetSupportedEventTypes(physical)
        if kinds:
            nvml.nvmlDeviceRegisterEvents(physical, kinds, self._set)
        return bool(kinds)

    def wait(self, timeout_ms: int) -> GpuEvent | None:
        """The next event; None if there was none in time.  Blocking.  Raises DriverError where there will be
        no more, as when a GPU is lost."""
        nvml = self._library
        try:
            event = nvml.nvmlEventSetWait(self._set, timeout_ms)
        except self._refusals as error:
            if getattr(error, "value", None) == nvml.NVML_ERROR_TIMEOUT:
                return None
            raise _driver_error("nvmlEventSetWait", error) from error
        uuid = self._nvml.ask(nvml.nvmlDeviceGetUUID, event.device)
        is_xid = bool(event.eventType & nvml.nvmlEventTypeXidCriticalError)
        return GpuEvent(_text(uuid) if uuid else "a GPU", int(event.eventData) if is_xid else None)

    def close(self) -> None:
        """Give the registration up; closing again does nothing."""
        if self._set is not None:
            self._nvml.ask(self._library.nvmlEventSetFree, self._set)
            self._set = None


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _driver_error(call: str, error: Exception) -> DriverError:
    return DriverError(call, int(getattr(error, "value", 0)), str(error))
