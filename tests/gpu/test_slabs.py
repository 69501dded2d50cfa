"""Slabs on a real GPU: what the contract suite cannot ask of every backend."""

from __future__ import annotations

import hashlib
import os
import tempfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shared import _native
from shared.errors import DriverError, InvariantError, ProtocolError
from shared.ids import DeviceId
from shared.memory.cuda import CudaBackend
from shared.memory.remapped_region import RemappedRegion
from tests.gpu.driver_calls import memset
from tests.gpu.slabs import STEP_BYTES, make_data, sealed
from tests.support.cold_files import make_cold


def test_devices_are_full_uuids_in_torchs_order(backend: CudaBackend) -> None:
    expected = [
        f"GPU-{torch.cuda.get_device_properties(index).uuid}" for index in range(torch.cuda.device_count())
    ]
    assert list(backend.devices()) == expected
    assert [_native.cuda_device_ordinal(uuid) for uuid in expected] == list(range(len(expected)))


def test_sizes_are_rounded_up_to_whole_steps(backend: CudaBackend, gpu: DeviceId) -> None:
    for asked, given in ((1, STEP_BYTES), (STEP_BYTES, STEP_BYTES), (STEP_BYTES + 1, 2 * STEP_BYTES)):
        with backend.create_slab(gpu, asked) as slab:
            assert slab.entry.nbytes == given


def test_the_exported_fd_closes_on_exec(backend: CudaBackend) -> None:
    with sealed(backend, b"weights") as slab:
        assert not os.get_inheritable(slab.borrow_fd())


@pytest.mark.parametrize("steps", [1, 3])
def test_a_wrong_size_is_refused(backend: CudaBackend, steps: int) -> None:
    with sealed(backend, bytes(2 * STEP_BYTES)) as slab:
        entry = replace(slab.entry, nbytes=steps * STEP_BYTES)
        with pytest.raises(ProtocolError):
            backend.import_slab(entry, os.dup(slab.borrow_fd()))


def test_nobody_can_write_after_seal(backend: CudaBackend, gpu: DeviceId) -> None:
    data = make_data(4096)
    ordinal = _native.cuda_device_ordinal(gpu)
    with sealed(backend, data) as slab:
        assert memset(ordinal, slab.tensor(0, "U8", (1,)).data_ptr(), 16) != 0
        with backend.import_slab(slab.entry, os.dup(slab.borrow_fd())) as copy:
            assert memset(ordinal, copy.tensor(0, "U8", (1,)).data_ptr(), 16) != 0
        assert slab.crc32(0, 4096) == zlib.crc32(data)


def test_cold_files_are_read_past_the_page_cache(gpu: DeviceId, tmp_path: Path) -> None:
    """Direct reads into pinned slots, whose pages are the driver's; where they are refused, the bytes must be
    right all the same."""
    data = make_data((9 << 20) + 12345)
    path = tmp_path / "weights"
    path.write_bytes(data)
    backend = CudaBackend(slot_bytes=1 << 20, slots_per_thread=2)
    with path.open("rb") as file, backend.create_slab(gpu, len(data)) as writable:
        for start, nbytes in ((0, len(data)), (777, 5 << 20), (len(data) - 3, 3)):
            make_cold(path)
            assert writable.read_file(file.fileno(), start, start, nbytes) == zlib.crc32(
                data[start : start + nbytes]
            )
        make_cold(path)
        pieces = [(4096, 1 << 20), (0, 100), (4 << 20, 3 << 20)]
        crcs = writable.read_pieces(file.fileno(), 1, pieces)
        with writable.seal() as slab:
            for (offset, nbytes), crc in zip(pieces, crcs, strict=True):
                assert slab.crc32(offset, nbytes) == crc


def test_both_digests_come_side_by_side(backend: CudaBackend) -> None:
    data = make_data((3 << 20) + 77)
    ranges = [(0, len(data)), (16, 1 << 20), (5, 0), (4096, 100)]
    with sealed(backend, data) as slab, ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: slab.digests_of(ranges, 64 << 10), range(8)):
            for (offset, nbytes), (crc, leaves) in zip(ranges, found, strict=True):
                piece = data[offset : offset + nbytes]
                assert crc == zlib.crc32(piece)
                assert leaves == _native.sha256_leaves(piece, 64 << 10)


def test_threads_fill_disjoint_ranges(gpu: DeviceId) -> None:
    # Slots far smaller than the reads: each is used again many times while copies are under way.
    backend = CudaBackend(slot_bytes=64 << 10)
    data = make_data(48 << 20)
    part = len(data) // 16
    with tempfile.TemporaryFile() as file, backend.create_slab(gpu, len(data)) as writable:
        file.write(data)
        file.flush()

        def fill(index: int) -> int:
            return writable.read_file(file.fileno(), index * part, index * part, part)

        with ThreadPoolExecutor(8) as pool:
            crcs = list(pool.map(fill, range(16)))
        assert crcs == [zlib.crc32(data[i * part : (i + 1) * part]) for i in range(16)]
        with writable.seal() as slab:
            assert slab.crc32(0, len(data)) == zlib.crc32(data)
            assert bytes(slab.tensor(0, "U8", (len(data),)).cpu().numpy()) == data


@pytest.mark.parametrize(
    ("offset", "nbytes"),
    [
        (0, 0),
        (0, 1),
        (0, 15),
        (0, 16),
        (1, 15),
        (3, 5000),
        (0, 2048),
        (0, 2047),
        (13, 2049),
        (0, 512 << 10),
        (0, (512 << 10) + 1),
        (16, (512 << 10) - 1),
        (7, (3 << 20) + 12345),
        (0, 8 << 20),
    ],
)
def test_digests_equal_those_of_the_standard_library(backend: CudaBackend, offset: int, nbytes: int) -> None:
    data = make_data(8 << 20)
    expected = data[offset : offset + nbytes]
    with sealed(backend, data) as slab:
        assert slab.crc32(offset, nbytes) == zlib.crc32(expected)
        for leaf in (64, 1000, 4096, 256 << 10, 1 << 40):
            if nbytes // leaf > 50_000:
                continue
            leaves = [hashlib.sha256(expected[at : at + leaf]).digest() for at in range(0, nbytes, leaf)]
            assert slab.sha256_leaves(offset, nbytes, leaf) == b"".join(leaves)


@pytest.mark.parametrize("nbytes", range(50, 135))
def test_every_length_of_a_last_block_is_padded_right(backend: CudaBackend, nbytes: int) -> None:
    data = make_data(256)
    with sealed(backend, data) as slab:
        assert slab.sha256_leaves(0, nbytes, 256) == hashlib.sha256(data[:nbytes]).digest()


def test_more_leaves_than_one_launch_holds(backend: CudaBackend) -> None:
    data = make_data(1 << 20)
    leaves = [hashlib.sha256(data[at : at + 8]).digest() for at in range(0, len(data), 8)]
    with sealed(backend, data) as slab:
        assert slab.sha256_leaves(0, len(data), 8) == b"".join(leaves)


def test_many_ranges_are_hashed_in_one_go(backend: CudaBackend) -> None:
    data = make_data(8 << 20)
    # Far more ranges, and more leaves, than one launch holds; some empty, some cut by its end.
    ranges = [(index * 512 % len(data), index % 700) for index in range(20_000)] + [(3, 7 << 20), (0, 0)]
    with sealed(backend, data) as slab:
        for leaf, some in ((64, ranges), (4096, ranges[-10:]), (1, [(0, 200_000)])):
            expected = [
                b"".join(
                    hashlib.sha256(data[at : min(at + leaf, offset + nbytes)]).digest()
                    for at in range(offset, offset + nbytes, leaf)
                )
                for offset, nbytes in some
            ]
            assert slab.sha256_leaves_of(some, leaf) == expected
            assert slab.sha256_leaves_of(some, leaf, 0.05) == expected, "in slices"
        assert slab.sha256_leaves_of([], 64) == []
        with pytest.raises(InvariantError):
            slab.sha256_leaves_of([(0, 1), (len(data), 1)], 64)
        with pytest.raises(InvariantError):
            slab.sha256_leaves_of([(0, 1)], 0)


def test_memory_waits_for_the_work_that_uses_it(backend: CudaBackend, gpu: DeviceId) -> None:
    data = make_data(STEP_BYTES)
    stream = torch.cuda.Stream()
    out = torch.empty(STEP_BYTES, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    slab = sealed(backend, data)
    tensor = slab.tensor(0, "U8", (STEP_BYTES,))
    with torch.cuda.stream(stream):
        torch.cuda._sleep(500_000_000)  # type: ignore[no-untyped-call]
        out.copy_(tensor)
    del tensor
    assert not stream.query()  # or the test shows nothing
    slab.close()
    assert stream.query()
    assert bytes(out.cpu().numpy()) == data


def test_a_tensors_end_does_not_wait(backend: CudaBackend, gpu: DeviceId) -> None:
    data = make_data(STEP_BYTES)
    stream = torch.cuda.Stream()
    out = torch.empty(STEP_BYTES, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    slab = sealed(backend, data)
    tensor = slab.tensor(0, "U8", (STEP_BYTES,))
    with torch.cuda.stream(stream):
        torch.cuda._sleep(500_000_000)  # type: ignore[no-untyped-call]
        out.copy_(tensor)
    slab.close()
    del tensor
    assert not stream.query()
    # Asking what is free waits for what is on its way back.
    backend.free_bytes(gpu)
    assert stream.query()
    assert bytes(out.cpu().numpy()) == data


def test_a_hundred_slabs_leave_memory_where_it_was(backend: CudaBackend, gpu: DeviceId) -> None:
    sealed(backend, make_data(STEP_BYTES)).close()
    free = backend.free_bytes(gpu)
    for _ in range(100):
        with backend.create_slab(gpu, 64 << 20) as writable, writable.seal() as slab:
            copy = backend.import_slab(slab.entry, os.dup(slab.borrow_fd()))
            slab.tensor(0, "U8", (1,))
            copy.close()
            assert backend.free_bytes(gpu) <= free - (64 << 20)
    assert backend.free_bytes(gpu) == free
    assert backend.used_bytes == 0


def test_legacy_memory_is_filled_and_hashed_alike(gpu: DeviceId) -> None:
    data = make_data(3 << 20)
    backend = CudaBackend(legacy_ipc=True)
    with sealed(backend, data) as slab:
        assert slab.entry.nbytes == 2 * STEP_BYTES
        assert slab.crc32(0, len(data)) == zlib.crc32(data)
        assert slab.tensor(0, "U8", (1,)).item() == data[0]
        with pytest.raises((DriverError, ProtocolError)):  # not in the exporting process
            backend.import_slab(slab.entry, os.dup(slab.borrow_fd()))
        with pytest.raises(ProtocolError):
            backend.import_slab(replace(slab.entry, nbytes=STEP_BYTES), os.dup(slab.borrow_fd()))
        with pytest.raises(InvariantError), RemappedRegion(gpu, slab.entry.nbytes) as region:
            region.exchange([slab])
