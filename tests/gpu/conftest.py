"""Tests of this folder need a GPU that the driver can see."""

from __future__ import annotations

import pytest

from shared.ids import DeviceId
from shared.memory.cuda import CudaBackend
from tests.support.gpu import visible_gpus, warm_up_gpu


@pytest.fixture(scope="session")
def gpu() -> DeviceId:
    if not visible_gpus():
        pytest.skip("no CUDA device")
    warm_up_gpu()
    return visible_gpus()[0]


@pytest.fixture
def backend(gpu: DeviceId) -> CudaBackend:
    return CudaBackend()
