"""Checksums and hashes of the bytes that are resident."""

from __future__ import annotations

import hashlib
import zlib

import pytest

from shared.errors import InvariantError

from .pair import DATA, SLAB_BYTES, Pair


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
