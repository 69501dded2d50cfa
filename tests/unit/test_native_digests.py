"""Checksums and digests: known answers, refusals, and that they leave the interpreter to others."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections.abc import Callable

import pytest

from shared import _native
from shared.errors import InvariantError

MIB = 1 << 20


@pytest.mark.parametrize("isa", _native.crc32_isas())
def test_crc32_known_answers(isa: str) -> None:
    assert _native.crc32(b"123456789", isa=isa) == 0xCBF43926
    assert _native.crc32(b"", isa=isa) == 0
    assert _native.crc32(b"", 5, isa=isa) == 5
    assert _native.crc32(b"6789", _native.crc32(b"12345"), isa=isa) == 0xCBF43926


@pytest.mark.parametrize("isa", _native.sha256_isas())
def test_sha256_known_answers(isa: str) -> None:
    abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert _native.sha256(b"abc", isa=isa).hex() == abc
    assert _native.sha256(b"", isa=isa).hex() == empty
    assert _native.sha256_leaves(b"abcabcabc", 3, isa=isa).hex() == abc * 3
    assert _native.sha256_leaves(b"", 3, isa=isa) == b""


def test_the_portable_way_is_always_there() -> None:
    assert _native.crc32_isas()[0] == "portable"
    assert _native.sha256_isas()[0] == "portable"


def test_an_instruction_set_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="z80"):
        _native.crc32(b"", isa="z80")
    with pytest.raises(ValueError, match="z80"):
        _native.sha256(b"", isa="z80")


def test_a_leaf_has_at_least_one_byte() -> None:
    with pytest.raises(InvariantError):
        _native.sha256_leaves(b"abc", 0)


def test_buffers_of_all_kinds_are_read_in_place() -> None:
    data = bytearray(b"-123456789-")
    assert _native.crc32(memoryview(data)[1:-1]) == 0xCBF43926
    assert _native.crc32(memoryview(b"123456789123").cast("I")) == _native.crc32(b"123456789123")
    with pytest.raises(BufferError):
        _native.crc32(memoryview(data)[::2])
    with pytest.raises(TypeError):
        _native.crc32("text")  # type: ignore[arg-type]
    data.append(0)  # a buffer that is still held would refuse this


def test_combining_with_nothing_changes_nothing() -> None:
    assert _native.crc32_combine(0x1234, 0, 0) == 0x1234
    assert _native.crc32_combine(0, 0x1234, 2**63) == 0x1234


Work = Callable[[], object]


def hashing(fd: int) -> Work:
    data = os.pread(fd, MIB, 0)
    return lambda: _native.sha256(data)


def hashing_leaves(fd: int) -> Work:
    data = os.pread(fd, MIB, 0)
    return lambda: _native.sha256_leaves(data, 65536)


def checksumming(fd: int) -> Work:
    data = os.pread(fd, 8 * MIB, 0)
    return lambda: _native.crc32(data)


def hashing_a_slab(fd: int) -> Work:
    slab = _native.create_host_slab(_native.Budget(), "slab", MIB).seal()
    return lambda: slab.digests_of([(0, MIB)], 65536)


def checksumming_a_slab(fd: int) -> Work:
    slab = _native.create_host_slab(_native.Budget(), "slab", 8 * MIB).seal()
    return lambda: slab.crc32(0, 8 * MIB)


def reading_a_file(fd: int) -> Work:
    slab = _native.create_host_slab(_native.Budget(), "slab", 8 * MIB)
    return lambda: slab.read_file(fd, 0, 0, 8 * MIB)


@pytest.mark.parametrize(
    "prepare",
    [hashing, hashing_leaves, checksumming, hashing_a_slab, checksumming_a_slab, reading_a_file],
)
def test_other_threads_run_meanwhile(prepare: Callable[[int], Work]) -> None:
    with tempfile.TemporaryFile() as file:
        os.ftruncate(file.fileno(), 8 * MIB)
        assert is_stopped_by_other_thread(prepare(file.fileno()))


def test_the_test_above_finds_work_that_keeps_the_interpreter() -> None:
    assert not is_stopped_by_other_thread(lambda: sum(range(100)))


def is_stopped_by_other_thread(work: Work) -> bool:
    was_seen = threading.Event()
    stopped_by_other = []

    def run() -> None:
        # Nothing here gives up the interpreter but `work`; without it, this thread runs to the end
        # before the other one gets its turn.
        for _ in range(5000):
            work()
            if was_seen.is_set():
                stopped_by_other.append(True)
                return

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    try:
        thread = threading.Thread(target=run)
        thread.start()
        was_seen.set()
        thread.join()
    finally:
        sys.setswitchinterval(interval)
    return bool(stopped_by_other)
