"""Replicas on the other GPUs of a host; needs two."""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from shared import _native
from shared.digest import LEAF_BYTES
from shared.errors import InvariantError, ProtocolError
from shared.ids import DeviceId
from shared.memory.backend import Slab
from shared.memory.cuda import CudaBackend
from tests.gpu.driver_calls import memset
from tests.gpu.slabs import STEP_BYTES, encode, make_data, peer, sealed
from tests.support.gpu import visible_gpus
from tests.support.replica import replica_of
from tests.support.resident import leaves_of


@pytest.fixture
def gpus(gpu: DeviceId) -> tuple[DeviceId, ...]:
    if len(visible_gpus()) < 2:
        pytest.skip("fewer than two CUDA devices")
    return visible_gpus()


def replicas(backend: CudaBackend, slab: Slab, gpus: Sequence[DeviceId]) -> list[Slab]:
    """One on each of the GPUs, made at once."""
    with ThreadPoolExecutor(len(gpus)) as pool:
        return list(pool.map(lambda device: replica_of(slab, backend, device), gpus))


@pytest.mark.parametrize("legacy_ipc", [False, True])
def test_every_gpu_has_the_bytes_of_the_first(gpus: tuple[DeviceId, ...], legacy_ipc: bool) -> None:
    backend = CudaBackend(legacy_ipc=legacy_ipc)
    data = make_data(8 * STEP_BYTES)
    slab = sealed(backend, data)
    made = replicas(backend, slab, gpus[1:])
    slab.close()  # the replicas stand alone
    for replica, device in zip(made, gpus[1:], strict=True):
        with replica:
            assert (replica.entry.device, replica.entry.nbytes) == (device, len(data))
            assert replica.crc32(0, len(data)) == zlib.crc32(data)
            assert replica.sha256_leaves_of([(0, len(data))], LEAF_BYTES) == [leaves_of(data)]
            tensor = replica.tensor(100, "U8", (1000,))
            assert tensor.device == torch.device("cuda", _native.cuda_device_ordinal(device))
            assert bytes(tensor.cpu().numpy()) == data[100:1100]
            del tensor


def test_a_replica_of_a_replica_has_the_same_bytes(backend: CudaBackend, gpus: tuple[DeviceId, ...]) -> None:
    data = make_data(STEP_BYTES)
    with (
        sealed(backend, data) as slab,
        replica_of(slab, backend, gpus[1]) as there,
        replica_of(there, backend, gpus[0]) as back,
    ):
        assert back.crc32(0, len(data)) == zlib.crc32(data)


def test_nobody_can_write_to_a_replica_or_its_source(
    backend: CudaBackend, gpus: tuple[DeviceId, ...]
) -> None:
    data = make_data(STEP_BYTES)
    with sealed(backend, data) as slab, replica_of(slab, backend, gpus[1]) as replica:
        for each in (slab, replica):
            ordinal = _native.cuda_device_ordinal(each.entry.device)
            assert memset(ordinal, each.tensor(0, "U8", (1,)).data_ptr(), 16) != 0
            assert each.crc32(0, len(data)) == zlib.crc32(data)


def test_another_process_maps_the_replica_of_its_gpu(
    backend: CudaBackend, gpus: tuple[DeviceId, ...]
) -> None:
    data = make_data(STEP_BYTES)
    with (
        sealed(backend, data) as slab,
        replica_of(slab, backend, gpus[1]) as replica,
        peer("read") as reader,
    ):
        reader.send(encode(replica.entry), (replica.borrow_fd(),))
        answer, _ = reader.receive()
        crc, refused = answer.split()
        assert int(crc) == zlib.crc32(data)
        assert int(refused) != 0
        assert reader.wait() == 0


def test_memory_of_one_gpu_is_not_imported_as_anothers(
    backend: CudaBackend, gpus: tuple[DeviceId, ...]
) -> None:
    with sealed(backend, make_data(STEP_BYTES)) as slab, replica_of(slab, backend, gpus[1]) as replica:
        for each, device in ((slab, gpus[1]), (replica, gpus[0])):
            fd = os.dup(each.borrow_fd())
            with pytest.raises(ProtocolError):
                backend.import_slab(replace(each.entry, device=device), fd)
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.fstat(fd)


def test_replicas_leave_memory_where_it_was(backend: CudaBackend, gpus: tuple[DeviceId, ...]) -> None:
    with sealed(backend, make_data(8 * STEP_BYTES)) as slab:
        for replica in replicas(backend, slab, gpus):
            replica.close()  # contexts and links are set up now
        free = [backend.free_bytes(device) for device in gpus]
        for _ in range(20):
            for replica in replicas(backend, slab, gpus):
                replica.close()
        # The driver may keep a page table more; a replica that stayed would be more than that.
        for device, before in zip(gpus, free, strict=True):
            assert backend.free_bytes(device) > before - slab.entry.nbytes
    assert backend.used_bytes == 0


def test_a_closed_slab_is_not_replicated(backend: CudaBackend, gpus: tuple[DeviceId, ...]) -> None:
    slab = sealed(backend, b"weights")
    slab.close()
    free = backend.free_bytes(gpus[1])
    with pytest.raises(InvariantError):
        replica_of(slab, backend, gpus[1])
    assert backend.free_bytes(gpus[1]) == free
