"""`ModelDevices`: on which devices each model's versions have copies, as the configuration says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from loaderd.config import LoaderdConfig
from shared.errors import ConfigError, InvalidRequest
from shared.ids import DeviceId
from shared.memory.backend import MemoryBackend
from shared.memory.selection import choose_device, choose_devices


@dataclass(frozen=True, slots=True)
class ModelDevices:
    """Devices by model, and those of every model that is not named."""

    named: Mapping[str, tuple[DeviceId, ...]]
    others: tuple[DeviceId, ...]  # none where there are several and the configuration chooses none

    @classmethod
    def choose(cls, config: LoaderdConfig, backend: MemoryBackend) -> Self:
        """What the configuration names, held against the devices there are.

        Raises ConfigError with the devices there are for an unknown one, and where nothing is chosen of
        several.
        """
        named: dict[str, tuple[DeviceId, ...]] = {}
        for model, settings in config.models.items():
            if settings.devices is not None:
                try:
                    named[model] = choose_devices(backend, settings.devices)
                except ConfigError as error:
                    raise ConfigError(f"models.{model}: {error.message}", model=model) from error
        if config.device is None and named and len(backend.devices()) > 1:
            return cls(named, ())
        return cls(named, (choose_device(backend, config.device),))

    @property
    def all(self) -> tuple[DeviceId, ...]:
        """Every device that may hold weights, each once."""
        return tuple(
            dict.fromkeys([*self.others, *(each for group in self.named.values() for each in group)])
        )

    def of(self, model: str) -> tuple[DeviceId, ...]:
        """The devices of a model; files are read into the first.  Raises InvalidRequest where the
        configuration chooses none for it."""
        devices = self.named.get(model, self.others)
        if not devices:
            raise InvalidRequest(
                f"no device is chosen for {model}: set `device`, or `devices` of the model, in loaderd's "
                f"configuration",
                model=model,
            )
        return devices
