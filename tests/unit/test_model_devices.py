"""On which devices a model's versions are: what the configuration says, held against what is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from loaderd.config import LoaderdConfig
from loaderd.model_devices import ModelDevices
from shared.config_file import load_config
from shared.errors import ConfigError, InvalidRequest
from shared.ids import DeviceId
from tests.unit.memory.fake_backend import FakeBackend, FakeMemory

A, B, C = DeviceId("GPU-a"), DeviceId("GPU-b"), DeviceId("GPU-c")


def choose(tmp_path: Path, text: str, there: tuple[DeviceId, ...] = (A, B, C)) -> ModelDevices:
    """What a configuration with this text chooses of the devices that are there."""
    path = tmp_path / "loaderd.toml"
    path.write_text('model_roots = ["/srv/models"]\n' + text)
    return ModelDevices.choose(load_config(path, LoaderdConfig), FakeBackend(FakeMemory(devices=there)))


def test_a_model_is_on_the_devices_it_names_in_that_order(tmp_path: Path) -> None:
    devices = choose(tmp_path, 'device = "GPU-c"\n[models.m]\ndevices = ["GPU-b", "GPU-a"]\n')
    assert devices.of("m") == (B, A)
    assert devices.of("other") == (C,)
    assert devices.all == (C, B, A)


def test_all_means_those_that_are_there(tmp_path: Path) -> None:
    devices = choose(tmp_path, '[models.m]\ndevices = "all"\n')
    assert devices.of("m") == devices.all == (A, B, C)
    with pytest.raises(InvalidRequest, match="no device is chosen for other: set `device`, or `devices`"):
        devices.of("other")


def test_the_only_device_needs_no_choice(tmp_path: Path) -> None:
    assert choose(tmp_path, "", there=(A,)).of("m") == (A,)
    assert choose(tmp_path, '[models.m]\ndevices = "all"\n', there=(A,)).of("other") == (A,)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "device: choose one of GPU-a, GPU-b, GPU-c"),
        ('device = "GPU-x"', "device 'GPU-x' is not here; there are GPU-a, GPU-b, GPU-c"),
        ('[models.m]\ndevices = ["GPU-x"]', "models.m: device 'GPU-x' is not here; there are GPU-a"),
        ('[models.m]\ndevices = ["GPU-a", "GPU-a"]', "models.m.devices: names GPU-a twice"),
        ("[models.m]\ndevices = []", "models.m.devices"),
        ('[models.m]\ndevices = "GPU-a"', "models.m.devices"),
    ],
)
def test_what_cannot_be_is_refused_with_what_there_is(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        choose(tmp_path, text)
