"""What every memory backend does: the tests of this folder run on the fake and on each real backend."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shared.ids import DeviceId
from shared.memory.cuda import CudaBackend
from shared.memory.host import HostBackend
from tests.support.gpu import visible_gpus
from tests.unit.memory.fake_backend import FakeBackend, FakeMemory

from .pair import DATA, LIMIT_BYTES, Pair


def fake_pair() -> Pair:
    memory = FakeMemory(capacity_bytes=LIMIT_BYTES)
    return Pair(FakeBackend(memory), FakeBackend(memory))


def fake_pair_of_several_devices() -> Pair:
    devices = (DeviceId("GPU-a"), DeviceId("GPU-b"), DeviceId("GPU-c"))
    memory = FakeMemory(capacity_bytes=LIMIT_BYTES, devices=devices)
    return Pair(FakeBackend(memory), FakeBackend(memory))


def host_pair() -> Pair:
    return Pair(HostBackend(limit_bytes=LIMIT_BYTES), HostBackend())


def cuda_pair() -> Pair:
    if not visible_gpus():
        pytest.skip("no CUDA device")
    return Pair(CudaBackend(limit_bytes=LIMIT_BYTES), CudaBackend())


@pytest.fixture(params=[fake_pair, fake_pair_of_several_devices, host_pair, cuda_pair])
def pair(request: pytest.FixtureRequest) -> Pair:
    make: Callable[[], Pair] = request.param
    return make()


@pytest.fixture
def data_fd(tmp_path: Path) -> Iterator[int]:
    path = tmp_path / "weights"
    path.write_bytes(DATA)
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    yield fd
    os.close(fd)
