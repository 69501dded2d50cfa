"""How slabs get their bytes: from files and from each other."""

from __future__ import annotations

import errno
import hashlib
import os
import zlib

import pytest

from shared.errors import DriverError, InvariantError, ReadFailed
from shared.layout import SlabEntry
from tests.support.replica import replica_of

from .pair import DATA, SLAB_BYTES, Pair


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
