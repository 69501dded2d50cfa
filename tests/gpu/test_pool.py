"""The pool on a real device: memory is kept from others, goes into slabs and comes back."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from shared import _native
from shared.errors import ConfigError, DriverError, InvariantError, OutOfMemory
from shared.ids import DeviceId
from shared.memory.cuda import CudaBackend
from shared.memory.pool import PIECE_BYTES

POOL_BYTES = 12 * PIECE_BYTES
SLAB_BYTES = 5 * PIECE_BYTES + (2 << 20)


@pytest.fixture
def pooled(gpu: DeviceId, backend: CudaBackend) -> CudaBackend:
    if not _native.cuda_has_posix_fds(gpu):
        pytest.skip("the device has no fds")
    assert backend.reserve(gpu, POOL_BYTES) == 0
    return backend


@pytest.fixture
def crowded(gpu: DeviceId, pooled: CudaBackend) -> Iterator[CudaBackend]:
    """A pool on a device where other owners of memory leave next to nothing."""
    others = [_native.CudaReserve(gpu, nbytes) for nbytes in (1 << 30, 2 << 20)]
    for each in others:
        each.resize(1 << 20)
    assert _native.cuda_memory(gpu)[0] < PIECE_BYTES
    yield pooled
    for each in others:
        each.resize(0)


def test_the_reserve_is_taken_from_the_device_and_counts_as_free(gpu: DeviceId) -> None:
    backend = CudaBackend()
    free = backend.free_bytes(gpu)
    driver_free, _ = _native.cuda_memory(gpu)
    assert backend.reserve(gpu, POOL_BYTES) == 0
    assert _native.cuda_memory(gpu)[0] <= driver_free - POOL_BYTES
    assert free - PIECE_BYTES < backend.free_bytes(gpu) <= free
    usage = backend.usage(gpu)
    assert (usage.pool_bytes, usage.reserved_bytes) == (POOL_BYTES, POOL_BYTES)
    with pytest.raises(InvariantError, match="has a pool already"):
        backend.reserve(gpu, POOL_BYTES)


def test_a_slab_and_the_reserve_together_keep_their_size(gpu: DeviceId, pooled: CudaBackend) -> None:
    with pooled.create_slab(gpu, SLAB_BYTES) as writable:
        assert pooled.usage(gpu).reserved_bytes == POOL_BYTES - 6 * PIECE_BYTES
        slab = writable.seal()
    assert pooled.usage(gpu).reserved_bytes == POOL_BYTES - 6 * PIECE_BYTES
    driver_free, _ = _native.cuda_memory(gpu)
    slab.close()
    # Closing filled the reserve up by itself: nothing was asked in between.
    assert _native.cuda_memory(gpu)[0] <= driver_free
    assert pooled.usage(gpu).reserved_bytes == POOL_BYTES


def test_slabs_fit_although_others_took_the_rest(gpu: DeviceId, crowded: CudaBackend) -> None:
    slabs = [crowded.create_slab(gpu, SLAB_BYTES) for _ in range(2)]
    assert crowded.usage(gpu).reserved_bytes == PIECE_BYTES
    for slab in slabs:
        slab.close()
    assert crowded.usage(gpu).reserved_bytes == POOL_BYTES


def test_what_a_reader_still_maps_is_not_used_again(gpu: DeviceId, crowded: CudaBackend) -> None:
    reader = CudaBackend()
    with crowded.create_slab(gpu, SLAB_BYTES) as writable:
        slab = writable.seal()
    kept = reader.import_slab(slab.entry, os.dup(slab.borrow_fd()))
    before = kept.crc32(0, SLAB_BYTES)
    slab.close()
    reserved_bytes = crowded.usage(gpu).reserved_bytes
    assert reserved_bytes <= POOL_BYTES - 5 * PIECE_BYTES
    # Nearly all of the reserve goes into a new slab, and the reader's bytes stay what they were.
    with crowded.create_slab(gpu, reserved_bytes - (2 << 20)):
        assert kept.crc32(0, SLAB_BYTES) == before
    kept.close()
    assert crowded.usage(gpu).reserved_bytes == POOL_BYTES


def test_a_device_without_room_for_page_tables_is_out_of_memory(
    gpu: DeviceId, pooled: CudaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = _native.create_cuda_slab
    reserved = []

    def create_after(failures: int, number: int) -> Callable[..., object]:
        def attempt(*arguments: object) -> object:
            reserved.append(pooled._pools[gpu].reserved_bytes)
            if len(reserved) <= failures:
                raise DriverError("cuMemSetAccess", number, "planted")
            return create(*arguments)  # type: ignore[arg-type]

        return attempt

    monkeypatch.setattr(_native, "create_cuda_slab", create_after(2, 2))
    pooled.create_slab(gpu, PIECE_BYTES).close()
    assert reserved == [POOL_BYTES, POOL_BYTES - PIECE_BYTES, POOL_BYTES - 2 * PIECE_BYTES]
    assert pooled.usage(gpu).reserved_bytes == POOL_BYTES
    reserved.clear()
    monkeypatch.setattr(_native, "create_cuda_slab", create_after(1000, 2))
    with pytest.raises(OutOfMemory, match="mapping a slab"):
        pooled.create_slab(gpu, PIECE_BYTES)
    assert reserved[-1] == 0
    assert pooled.usage(gpu).reserved_bytes == POOL_BYTES
    monkeypatch.setattr(_native, "create_cuda_slab", create_after(2000, 700))
    with pytest.raises(DriverError):
        pooled.create_slab(gpu, PIECE_BYTES)


def test_blocks_of_legacy_ipc_have_no_pool(gpu: DeviceId) -> None:
    with pytest.raises(ConfigError, match="a pool needs slabs with fds"):
        CudaBackend(legacy_ipc=True).reserve(gpu, POOL_BYTES)


def test_a_reserve_holds_what_there_is(gpu: DeviceId, backend: CudaBackend) -> None:
    free, _ = _native.cuda_memory(gpu)
    reserve = _native.CudaReserve(gpu, PIECE_BYTES)
    held = reserve.resize(1 << 30)
    assert held == reserve.pieces > 0
    assert 0.9 * free < held * PIECE_BYTES <= free
    assert reserve.resize(0) == 0
    with pytest.raises(InvariantError):
        _native.CudaReserve(gpu, PIECE_BYTES + 1)
