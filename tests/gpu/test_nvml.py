"""NVML on a real device: it knows the device that CUDA names, and its events can be asked for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from loaderd.nvml import Nvml, open_nvml
from shared.errors import DriverError
from shared.ids import DeviceId
from shared.memory.cuda import CudaBackend
from tests.gpu.slabs import encode, make_data, peer, sealed

XID_WITHIN_MS = 10_000


@pytest.fixture
def nvml() -> Iterator[Nvml]:
    opened = open_nvml()
    if opened is None:
        pytest.skip("no NVML")
    yield opened
    opened.close()


def test_nvml_and_cuda_speak_of_the_same_device(nvml: Nvml, gpu: DeviceId, backend: CudaBackend) -> None:
    with backend.create_slab(gpu, 256 << 20):
        reading = nvml.read(gpu)
        total_bytes = backend.usage(gpu).total_bytes
    assert reading.total_bytes is not None
    assert reading.free_bytes is not None
    assert total_bytes is not None
    # NVML counts what the driver keeps for itself, too.
    assert 0.9 < total_bytes / reading.total_bytes <= 1.0
    assert reading.free_bytes <= reading.total_bytes - (256 << 20)


def test_events_of_the_device_can_be_asked_for(nvml: Nvml, gpu: DeviceId) -> None:
    try:
        events = nvml.watch((gpu,))
    except DriverError as error:
        pytest.skip(f"no GPU events here: {error.message}")
    try:
        assert events.wait(10) is None
    finally:
        events.close()


def test_the_xid_of_a_stray_write_is_told(nvml: Nvml, gpu: DeviceId, backend: CudaBackend) -> None:
    try:
        events = nvml.watch((gpu,))
    except DriverError as error:
        pytest.skip(f"no GPU events here: {error.message}")
    try:
        with sealed(backend, make_data(4 << 20)) as slab, peer("write") as writer:
            writer.send(encode(slab.entry), (slab.borrow_fd(),))
            assert writer.receive()[0] == b"ready"
            assert writer.receive()[0] == b"context lost"
            assert writer.wait() != 0
        event = events.wait(XID_WITHIN_MS)
        assert event is not None
        assert (event.device, event.xid) == (gpu, 31)  # an MMU fault
    finally:
        events.close()
