"""The order of reads over arbitrary placements: each extent once, each slab complete exactly once."""

from __future__ import annotations

import random
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loaderd.checkpoint.header import TensorSource
from loaderd.placement import PlacementRules, ReadExtent, Residents, place
from loaderd.read_schedule import ReadSchedule
from shared._native import crc32_combine
from shared.errors import InvariantError
from tests.property.test_plan_placement import SETTINGS, Version, rule_sets, versions


def content(extent: ReadExtent) -> bytes:
    """Other bytes for each place of a file."""
    return random.Random(f"{extent.file} {extent.file_offset}").randbytes(extent.nbytes)


@SETTINGS
@given(versions(), rule_sets, st.integers(1, 5), st.randoms(use_true_random=False))
def test_slabs_complete_one_by_one_with_the_checksums_of_their_tensors(
    version: Version, rules: PlacementRules, readers: int, chance: random.Random
) -> None:
    placement = place(version.tensors, version.digests, Residents(), rules)
    expected: dict[str, int] = {}
    for extent in placement.reads:
        expected[extent.tensor] = zlib.crc32(content(extent), expected.get(extent.tensor, 0))
    schedule = ReadSchedule(placement, crc32_combine)
    under_way: list[ReadExtent] = []
    taken: list[ReadExtent] = []
    left = [sum(extent.slab == slab for extent in placement.reads) for slab in range(len(placement.slabs))]
    found: dict[str, int] = {}
    completed: list[int] = []
    while True:
        while len(under_way) < readers and (extent := schedule.take()) is not None:
            under_way.append(extent)
            taken.append(extent)
        if not under_way:
            break
        extent = under_way.pop(chance.randrange(len(under_way)))
        left[extent.slab] -= 1
        filled = schedule.finish(extent, zlib.crc32(content(extent)))
        assert (filled is not None) == (left[extent.slab] == 0)
        if filled is not None:
            completed.append(filled.index)
            found.update(filled.crcs)
    assert sorted(completed) == list(range(len(placement.slabs)))
    assert found == expected
    assert taken == sorted(placement.reads, key=lambda read: (read.slab, read.file, read.file_offset))


def test_an_extent_is_finished_once() -> None:
    tensor = TensorSource("w", "U8", (150,), 150, "a", 8)
    placement = place([tensor], {}, Residents(), PlacementRules(read_bytes=100))
    schedule = ReadSchedule(placement, crc32_combine)
    extent = schedule.take()
    assert extent is not None
    assert schedule.finish(extent, 1) is None
    with pytest.raises(InvariantError, match="read twice"):
        schedule.finish(extent, 1)
