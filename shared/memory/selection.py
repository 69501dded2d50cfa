"""Which memory backend a configuration names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, assert_never

from shared.errors import ConfigError, InvariantError
from shared.ids import DeviceId
from shared.memory.backend import MemoryBackend

BackendName = Literal["host", "cuda"]


def open_backend(
    name: BackendName, limit_bytes: int | None = None, *, legacy_ipc: bool = False
) -> MemoryBackend:
    """The backend `name`; raises DriverMissing for `cuda` where there is no driver, and never falls
    back to another one.  `limit_bytes` holds for each device.  `legacy_ipc` is the `cuda` backend's."""
    match name:
        case "host":
            from shared.memory.host import HostBackend

            return HostBackend(limit_bytes)
        case "cuda":
            from shared.memory.cuda import CudaBackend

            return CudaBackend(limit_bytes, legacy_ipc=legacy_ipc)
        case _:
            assert_never(name)


def reserve_pool(backend: MemoryBackend, device: DeviceId, pool_bytes: int) -> int:
    """Keep memory of `device` for slabs; the bytes that are held by others and are taken as soon as they are
    free.  Raises ConfigError on a backend without pools."""
    if backend.name != "cuda":
        raise ConfigError(f"pool_bytes: the {backend.name} backend has no pool")
    from shared.memory.cuda import CudaBackend

    if not isinstance(backend, CudaBackend):
        raise InvariantError(f"{type(backend).__name__} says that it is the cuda backend")
    return backend.reserve(device, pool_bytes)


def choose_devices(backend: MemoryBackend, wanted: Sequence[str] | Literal["all"]) -> tuple[DeviceId, ...]:
    """The devices named by their full ids, in that order, or all that there are.

    Raises ConfigError with the devices there are for an unknown one.
    """
    if wanted == "all":
        devices = backend.devices()
        if not devices:
            raise ConfigError("devices: there are none")
        return devices
    return tuple(choose_device(backend, each) for each in wanted)


def choose_device(backend: MemoryBackend, wanted: str | None) -> DeviceId:
    """The one device that weights are on: `wanted` by its full id, or the only one there is.

    Raises ConfigError with the devices there are, for an unknown one and where one must be chosen.
    """
    devices = backend.devices()
    if wanted is not None:
        if wanted not in devices:
            raise ConfigError(f"device {wanted!r} is not here; there are {', '.join(devices) or 'none'}")
        return DeviceId(wanted)
    if len(devices) != 1:
        raise ConfigError(f"device: choose one of {', '.join(devices) or 'none'}")
    return devices[0]
