"""Checksums, digests and reads against zlib and hashlib: all lengths, alignments and splits."""

from __future__ import annotations

import hashlib
import os
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared import _native

# Long enough for every path: tables, 128-, 256- and 512-bit folding, and the steps between them.
lengths = st.one_of(st.integers(0, 1100), st.integers(0, 20000))
skips = st.integers(0, 64)


def buffer(length: int, skip: int, seed: int) -> memoryview:
    """`length` reproducible bytes that begin at any alignment."""
    state = seed | 1
    words = bytearray()
    while len(words) < length + skip:
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        words += state.to_bytes(8, "little")
    return memoryview(words)[skip : skip + length]


buffers = st.builds(buffer, lengths, skips, st.integers(0, 2**64 - 1))


@pytest.mark.parametrize("isa", _native.crc32_isas())
@given(data=buffers, start=st.integers(0, 2**32 - 1))
def test_crc32_is_zlibs(isa: str, data: memoryview, start: int) -> None:
    assert _native.crc32(data, start, isa=isa) == zlib.crc32(data, start)


@given(data=buffers, at=st.floats(0, 1))
def test_crc32_of_parts_combines(data: memoryview, at: float) -> None:
    split = int(at * len(data))
    first, second = _native.crc32(data[:split]), _native.crc32(data[split:])
    assert _native.crc32_combine(first, second, len(data) - split) == zlib.crc32(data)
    assert _native.crc32(data[split:], first) == zlib.crc32(data)


@pytest.mark.parametrize("isa", _native.sha256_isas())
@given(data=buffers)
def test_sha256_is_hashlibs(isa: str, data: memoryview) -> None:
    assert _native.sha256(data, isa=isa) == hashlib.sha256(data).digest()


@pytest.mark.parametrize("isa", _native.sha256_isas())
@given(
    data=st.builds(buffer, st.integers(0, 2000), skips, st.integers(0, 2**64 - 1)), leaf=st.integers(1, 2100)
)
def test_leaves_are_hashed_one_by_one(isa: str, data: memoryview, leaf: int) -> None:
    expected = b"".join(hashlib.sha256(data[at : at + leaf]).digest() for at in range(0, len(data), leaf))
    assert _native.sha256_leaves(data, leaf, isa=isa) == expected


@given(data=buffers, file_skip=skips, slab_skip=skips)
def test_a_read_brings_the_bytes_and_their_crc(data: memoryview, file_skip: int, slab_skip: int) -> None:
    fd = os.memfd_create("file", os.MFD_CLOEXEC)
    try:
        os.write(fd, bytes(file_skip) + data)
        writable = _native.create_host_slab(_native.Budget(), "slab", slab_skip + len(data) + 1)
        crc = writable.read_file(fd, file_skip, slab_skip, len(data))
    finally:
        os.close(fd)
    slab = writable.seal()
    assert crc == zlib.crc32(data) == slab.crc32(slab_skip, len(data))
    # Nothing else was touched.
    assert slab.crc32(0, slab_skip) == zlib.crc32(bytes(slab_skip))
    assert slab.crc32(slab_skip + len(data), 1) == zlib.crc32(b"\0")
    slab.close()
