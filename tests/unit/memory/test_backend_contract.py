"""What every memory backend does; runs on the fake and on each real backend."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import tempfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shared.errors import (
    DriverError,
    InvalidRequest,
    InvariantError,
    OutOfMemory,
    ProtocolError,
    ReadFailed,
)
from shared.ids import DeviceId, SlabId
from shared.layout import SlabEntry
from shared.memory.backend import MemoryBackend, Slab
from shared.memory.cuda import CudaBackend
from shared.memory.host import HostBackend
from tests.support.gpu import visible_gpus
from tests.support.replica import replica_of

from .fake_backend import FakeBackend, FakeMemory
from .resources import open_fds

SLAB_BYTES = 2 * (2 << 20)  # in whole steps of what a GPU allocates
LIMIT_BYTES = 8 * SLAB_BYTES
DATA = random.Random(7).randbytes(SLAB_BYTES)


class Pair:
    """A writer's backend and a reader's, as in two processes, with memory limited to LIMIT_BYTES."""

    def __init__(self, writer: MemoryBackend, reader: MemoryBackend) -> None:
        self.writer = writer
        self.reader = reader
        self.device: DeviceId = writer.devices()[0]

    def sealed(self, data: bytes = DATA) -> Slab:
        with tempfile.TemporaryFile() as file:
            file.write(data)
            file.flush()
            with self.writer.create_slab(self.device, len(data)) as slab:
                slab.read_file(file.fileno(), 0, 0, len(data))
                return slab.seal()


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


# --- filling -------------------------------------------------------------------------------------


def test_what_is_read_is_what_is_resident(pair: Pair, data_fd: int) -> None:
    with pair.writer.create_slab(pair.device, SLAB_BYTES) as writable:
        assert writable.read_file(data_fd, 100, 0, 4000) == zlib.crc32(DATA[100:4100])
        assert writable.read_file(data_fd, 5, 4000, 8000) == zlib.crc32(DATA[5:8005])
        assert writable.read_file(data_fd, SLAB_BYTES, 0, 0) == 0
        entry = writable.entry
        slab = writable.seal()
    with slab:
        assert slab.entry == entry
        assert (entry.device, entry.nbytes) == (pair.device, SLAB_BYTES)
        assert slab.crc32(0, 12000) == zlib.crc32(DATA[100:4100] + DATA[5:8005])
        assert slab.crc32(SLAB_BYTES, 0) == 0


def test_neighbours_in_a_file_are_read_at_once_to_several_places(pair: Pair, data_fd: int) -> None:
    pieces = [(4096, 100), (0, 0), (512, 3000), (2 << 20, 1 << 20)]
    starts = [77, 177, 177, 3177]
    parts = [DATA[start : start + nbytes] for start, (_, nbytes) in zip(starts, pieces, strict=True)]
    with pair.writer.create_slab(pair.device, SLAB_BYTES) as writable:
        assert writable.read_pieces(data_fd, 77, pieces) == [zlib.crc32(part) for part in parts]
        assert writable.read_pieces(data_fd, 0, []) == []
        with pytest.raises(InvariantError):
            writable.read_pieces(data_fd, 0, [(0, 1), (SLAB_BYTES, 1)])
        slab = writable.seal()
    with slab:
        for (offset, nbytes), part in zip(pieces, parts, strict=True):
            assert slab.crc32(offset, nbytes) == zlib.crc32(part)


def test_ids_are_unique(pair: Pair) -> None:
    with pair.sealed() as one, pair.sealed() as other:
        assert one.entry.slab_id != other.entry.slab_id


def test_a_file_that_ends_early_is_an_error_without_number(pair: Pair, data_fd: int) -> None:
    with pair.writer.create_slab(pair.device, SLAB_BYTES) as writable:
        with pytest.raises(DriverError) as caught:
            writable.read_file(data_fd, 1, 0, SLAB_BYTES)
        assert (caught.value.call, caught.value.number) == ("pread", 0)
        assert isinstance(caught.value, ReadFailed)
        assert 0 < caught.value.byte <= SLAB_BYTES
        writable.read_file(data_fd, 0, 0, SLAB_BYTES)  # nothing is lost


def test_a_failed_read_names_call_and_number(pair: Pair) -> None:
    # Address 0 of a process is never mapped, and reading it answers EIO.
    fd = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
    try:
        with (
            pair.writer.create_slab(pair.device, SLAB_BYTES) as writable,
            pytest.raises(DriverError) as caught,
        ):
            writable.read_file(fd, 0, 0, 100)
    finally:
        os.close(fd)
    assert (caught.value.call, caught.value.number) == ("pread", errno.EIO)
    assert isinstance(caught.value, ReadFailed)
    assert caught.value.byte == 0


@pytest.mark.parametrize(
    ("file_offset", "offset", "nbytes"),
    [
        (0, 0, SLAB_BYTES + 1),
        (0, SLAB_BYTES, 1),
        (0, -1, 1),
        (0, 1, -1),
        (-1, 0, 1),
        (0, 2**64, 1),
        (0, 1, 2**64 - 1),
    ],
)
def test_reads_outside_the_slab_are_refused(
    pair: Pair, data_fd: int, file_offset: int, offset: int, nbytes: int
) -> None:
    with pair.writer.create_slab(pair.device, SLAB_BYTES) as writable, pytest.raises(InvariantError):
        writable.read_file(data_fd, file_offset, offset, nbytes)


# --- digests -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("offset", "nbytes", "leaf"),
    [(0, SLAB_BYTES, 4096), (3, 8192, 4096), (1, 100, 4096), (7, 0, 1), (0, 9, 1)],
)
def test_leaves_are_hashed_one_by_one(pair: Pair, offset: int, nbytes: int, leaf: int) -> None:
    data = DATA[offset : offset + nbytes]
    expected = b"".join(hashlib.sha256(data[at : at + leaf]).digest() for at in range(0, nbytes, leaf))
    with pair.sealed() as slab:
        assert slab.sha256_leaves(offset, nbytes, leaf) == expected


def test_both_digests_of_several_ranges_come_in_one_call(pair: Pair) -> None:
    ranges = [(256, 9000), (0, 0), (1, 1), (SLAB_BYTES - 7, 7), (4096, 2 << 20)]
    with pair.sealed() as slab:
        found = slab.digests_of(ranges, 4096)
        for (offset, nbytes), (crc, leaves) in zip(ranges, found, strict=True):
            assert crc == zlib.crc32(DATA[offset : offset + nbytes])
            assert leaves == slab.sha256_leaves(offset, nbytes, 4096)
        assert slab.sha256_leaves_of(ranges, 4096) == [leaves for _, leaves in found]
        assert slab.digests_of([], 4096) == []
        with pytest.raises(InvariantError):
            slab.digests_of([(0, 1), (SLAB_BYTES, 1)], 4096)


@pytest.mark.parametrize(("offset", "nbytes"), [(0, SLAB_BYTES + 1), (-1, 1), (SLAB_BYTES, 1), (2**64, 0)])
def test_ranges_outside_the_slab_are_refused(pair: Pair, offset: int, nbytes: int) -> None:
    with pair.sealed() as slab:
        with pytest.raises(InvariantError):
            slab.crc32(offset, nbytes)
        with pytest.raises(InvariantError):
            slab.sha256_leaves(offset, nbytes, 64)
        with pytest.raises(InvariantError):
            slab.tensor(offset, "U8", (nbytes,))
        with pytest.raises(InvariantError):
            slab.sha256_leaves(0, 64, 0)


# --- lifetime ------------------------------------------------------------------------------------


def test_closing_twice_is_an_error(pair: Pair) -> None:
    writable = pair.writer.create_slab(pair.device, SLAB_BYTES)
    writable.close()
    with pytest.raises(InvariantError):
        writable.close()
    slab = pair.sealed()
    slab.close()
    with pytest.raises(InvariantError):
        slab.close()


def test_sealing_consumes(pair: Pair, data_fd: int) -> None:
    writable = pair.writer.create_slab(pair.device, SLAB_BYTES)
    with writable.seal():
        with pytest.raises(InvariantError):
            writable.seal()
        with pytest.raises(InvariantError):
            writable.close()
        with pytest.raises(InvariantError):
            writable.read_file(data_fd, 0, 0, 1)


def test_a_closed_slab_cannot_be_used(pair: Pair, data_fd: int) -> None:
    writable = pair.writer.create_slab(pair.device, SLAB_BYTES)
    writable.close()
    with pytest.raises(InvariantError):
        writable.read_file(data_fd, 0, 0, 1)
    with pytest.raises(InvariantError):
        writable.seal()
    slab = pair.sealed()
    slab.close()
    for use in (
        slab.borrow_fd,
        lambda: slab.crc32(0, 1),
        lambda: slab.sha256_leaves(0, 1, 1),
        lambda: slab.tensor(0, "U8", (1,)),
    ):
        with pytest.raises(InvariantError):
            use()


def test_memory_comes_back(pair: Pair) -> None:
    free = pair.writer.free_bytes(pair.device)
    for _ in range(3):
        with pair.writer.create_slab(pair.device, SLAB_BYTES):
            assert pair.writer.free_bytes(pair.device) == free - SLAB_BYTES
        with pair.sealed():
            assert pair.writer.free_bytes(pair.device) == free - SLAB_BYTES
        assert pair.writer.free_bytes(pair.device) == free


def test_what_does_not_fit_says_what_was_needed_and_free(pair: Pair) -> None:
    free = pair.writer.free_bytes(pair.device)
    fds = open_fds()
    with pytest.raises(OutOfMemory) as caught:
        pair.writer.create_slab(pair.device, free + 1)
    assert caught.value.facts["needed_bytes"] == free + 1
    assert caught.value.facts["free_bytes"] == free
    with pytest.raises(OutOfMemory):
        pair.writer.create_slab(pair.device, 2**63)
    assert open_fds() == fds
    pair.writer.create_slab(pair.device, free).close()


def test_empty_slabs_and_foreign_devices_are_refused(pair: Pair) -> None:
    for nbytes in (0, -1):
        with pytest.raises(InvariantError):
            pair.writer.create_slab(pair.device, nbytes)
    with pytest.raises(InvariantError):
        pair.writer.create_slab(DeviceId("GPU-0"), 4096)
    with pytest.raises(InvariantError):
        pair.writer.free_bytes(DeviceId("GPU-0"))


# --- handing over --------------------------------------------------------------------------------


def test_a_reader_sees_the_writers_bytes(pair: Pair) -> None:
    slab = pair.sealed()
    copy = pair.reader.import_slab(slab.entry, os.dup(slab.borrow_fd()))
    slab.close()
    with copy:
        assert copy.entry == slab.entry
        assert copy.crc32(0, SLAB_BYTES) == zlib.crc32(DATA)
        again = pair.reader.import_slab(copy.entry, os.dup(copy.borrow_fd()))
        again.close()


def test_an_import_consumes_the_fd_where_it_fails(pair: Pair, data_fd: int) -> None:
    with pair.sealed() as slab:
        for entry, source in (
            (slab.entry, data_fd),  # no slab at all
            (replace(slab.entry, nbytes=SLAB_BYTES + 1), slab.borrow_fd()),
            (replace(slab.entry, nbytes=SLAB_BYTES - 1), slab.borrow_fd()),
            (replace(slab.entry, nbytes=0), slab.borrow_fd()),
            (replace(slab.entry, nbytes=-1), slab.borrow_fd()),
            (replace(slab.entry, nbytes=2**70), slab.borrow_fd()),
        ):
            fd = os.dup(source)
            with pytest.raises(ProtocolError):
                pair.reader.import_slab(entry, fd)
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.fstat(fd)


def test_a_slab_of_another_device_is_refused(pair: Pair) -> None:
    with pair.sealed() as slab:
        entry = replace(slab.entry, device=DeviceId("GPU-0"), slab_id=SlabId("other"))
        fd = os.dup(slab.borrow_fd())
        with pytest.raises(ProtocolError):
            pair.reader.import_slab(entry, fd)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


# --- copying --------------------------------------------------------------------------------------


def test_a_replica_has_the_same_bytes_and_a_life_of_its_own(pair: Pair) -> None:
    free = pair.writer.free_bytes(pair.device)
    for device in pair.writer.devices():  # a slab's own device is as good as another
        slab = pair.sealed()
        replica = replica_of(slab, pair.writer, device)
        assert replica.entry == SlabEntry(replica.entry.slab_id, device, SLAB_BYTES)
        assert replica.entry.slab_id != slab.entry.slab_id
        slab.close()
        assert replica.crc32(0, SLAB_BYTES) == zlib.crc32(DATA)
        leaves = [hashlib.sha256(DATA[at : at + 4096]).digest() for at in range(0, SLAB_BYTES, 4096)]
        assert replica.sha256_leaves(0, SLAB_BYTES, 4096) == b"".join(leaves)
        with pair.reader.import_slab(replica.entry, os.dup(replica.borrow_fd())) as copy:
            assert copy.tensor(7, "U8", (3,)).tolist() == list(DATA[7:10])
        replica.close()
    assert pair.writer.free_bytes(pair.device) == free


def test_a_replica_of_an_import_has_the_same_bytes(pair: Pair) -> None:
    with (
        pair.sealed() as slab,
        pair.reader.import_slab(slab.entry, os.dup(slab.borrow_fd())) as copy,
        replica_of(copy, pair.reader, pair.device) as replica,
    ):
        assert replica.crc32(0, SLAB_BYTES) == zlib.crc32(DATA)


def test_a_closed_slab_is_not_copied(pair: Pair) -> None:
    free = pair.writer.free_bytes(pair.device)
    slab = pair.sealed()
    slab.close()
    with pytest.raises(InvariantError):
        replica_of(slab, pair.writer, pair.device)
    assert pair.writer.free_bytes(pair.device) == free


def test_a_slab_is_filled_from_one_of_the_same_size_alone(pair: Pair) -> None:
    with pair.sealed() as slab:
        for device in pair.writer.devices():
            with (
                pair.writer.create_slab(device, SLAB_BYTES // 2) as smaller,
                pytest.raises(InvariantError),
            ):
                smaller.copy_from(slab)


# --- tensors -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("BOOL", torch.bool),
        ("U8", torch.uint8),
        ("I8", torch.int8),
        ("U16", torch.uint16),
        ("I16", torch.int16),
        ("U32", torch.uint32),
        ("I32", torch.int32),
        ("U64", torch.uint64),
        ("I64", torch.int64),
        ("F16", torch.float16),
        ("BF16", torch.bfloat16),
        ("F32", torch.float32),
        ("F64", torch.float64),
        ("C64", torch.complex64),
        ("F8_E4M3", torch.float8_e4m3fn),
        ("F8_E5M2", torch.float8_e5m2),
        ("F8_E4M3FNUZ", torch.float8_e4m3fnuz),
        ("F8_E5M2FNUZ", torch.float8_e5m2fnuz),
        ("F8_E8M0", torch.float8_e8m0fnu),
    ],
)
def test_tensors_show_the_resident_bytes(pair: Pair, dtype: str, expected: torch.dtype) -> None:
    with pair.sealed() as slab:
        tensor = slab.tensor(256, dtype, (2, 3))
        assert tensor.dtype == expected
        assert tensor.shape == (2, 3)
        assert tensor.is_contiguous()
        nbytes = 6 * expected.itemsize
        assert bytes(tensor.view(torch.uint8).flatten().tolist()) == DATA[256 : 256 + nbytes]
        # No copy: two tensors of the same place have the same address.
        assert slab.tensor(0, "U8", (1,)).data_ptr() + 256 == tensor.data_ptr()
        assert slab.tensor(256, "U8", (1,)).data_ptr() == tensor.data_ptr()


def test_scalars_and_empty_tensors_work(pair: Pair) -> None:
    with pair.sealed() as slab:
        assert slab.tensor(256, "I32", ()).item() == int.from_bytes(DATA[256:260], "little", signed=True)
        assert slab.tensor(256, "I32", ()).shape == ()
        for shape in ((0,), (3, 0), (0, 0, 5)):
            assert slab.tensor(0, "BF16", shape).shape == shape
            assert slab.tensor(SLAB_BYTES, "F32", shape).dtype == torch.float32


def test_two_f4_elements_share_a_byte(pair: Pair) -> None:
    with pair.sealed() as slab:
        tensor = slab.tensor(0, "F4", (3, 4))
        assert tensor.dtype == torch.float4_e2m1fn_x2
        assert tensor.shape == (3, 2)
        with pytest.raises(InvalidRequest):
            slab.tensor(0, "F4", (2, 3))
        with pytest.raises(InvalidRequest):
            slab.tensor(0, "F4", (4, 1))


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [("F6_E2M3", (4,)), ("F128", (1,)), ("", (1,)), ("F32", (-1,)), ("F32", (2**62, 2**62))],
)
def test_what_torch_cannot_show_is_refused(pair: Pair, dtype: str, shape: tuple[int, ...]) -> None:
    with pair.sealed() as slab, pytest.raises(InvalidRequest):
        slab.tensor(0, dtype, shape)


def test_an_address_that_does_not_suit_the_dtype_is_refused(pair: Pair) -> None:
    with pair.sealed() as slab, pytest.raises(InvariantError):
        slab.tensor(258, "F32", (1,))


def test_a_tensor_outlives_its_slab(pair: Pair) -> None:
    slab = pair.sealed()
    tensor = slab.tensor(512, "U8", (1000,))
    part = tensor[100:200]
    slab.close()
    del slab, tensor
    assert bytes(part.tolist()) == DATA[612:712]
