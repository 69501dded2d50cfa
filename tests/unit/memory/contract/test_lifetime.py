"""How slabs are created, closed, and handed to a reader."""

from __future__ import annotations

import os
import zlib
from dataclasses import replace

import pytest

from shared.errors import InvariantError, OutOfMemory, ProtocolError
from shared.ids import DeviceId, SlabId
from tests.support.procfs import open_fds

from .pair import DATA, SLAB_BYTES, Pair


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


def test_ids_are_unique(pair: Pair) -> None:
    with pair.sealed() as one, pair.sealed() as other:
        assert one.entry.slab_id != other.entry.slab_id


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
