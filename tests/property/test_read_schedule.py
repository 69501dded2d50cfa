"""The order of reads over arbitrary placements: each extent once, each slab complete exactly once."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterable
from itertools import cycle, islice, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loaderd.checkpoint.header import TensorSource
from loaderd.placement import Placement, PlacementRules, ReadExtent, Residents, place
from loaderd.read_schedule import LAST_RUN_BYTES, RUN_BYTES, ReadRun, ReadSchedule
from shared._native import crc32_combine
from shared.errors import InvariantError
from tests.property.test_plan_placement import SETTINGS, Version, rule_sets, versions

MIB = 1 << 20
BLOCK = random.Random(0).randbytes(4099)


def in_files(extent: ReadExtent) -> tuple[str, int]:
    return extent.file, extent.file_offset


def content(extent: ReadExtent) -> bytes:
    """Other bytes for each file, and for each place of it."""
    start = (extent.file_offset + zlib.crc32(extent.file.encode())) % len(BLOCK)
    return bytes(islice(cycle(BLOCK), start, start + extent.nbytes))


def joined(extents: Iterable[ReadExtent]) -> list[tuple[str, int, int, int, int, str]]:
    """Extents put together where one goes on where another ends, in the file and in the slab."""
    whole: list[tuple[str, int, int, int, int, str]] = []
    for extent in sorted(extents, key=in_files):
        row = (extent.file, extent.file_offset, extent.slab, extent.slab_offset, extent.nbytes, extent.tensor)
        if whole:
            file, offset, slab, slab_offset, nbytes, tensor = whole[-1]
            if (file, offset + nbytes, slab, slab_offset + nbytes, tensor) == (*row[:4], row[5]):
                row = (file, offset, slab, slab_offset, nbytes + extent.nbytes, tensor)
                whole.pop()
        whole.append(row)
    return whole


@SETTINGS
@given(
    versions(),
    rule_sets,
    st.integers(1, 5),
    st.integers(1, 3),
    st.sampled_from([1, 300, 1 << 20]),
    st.randoms(use_true_random=False),
)
def test_slabs_complete_one_by_one_with_the_checksums_of_their_tensors(
    version: Version, rules: PlacementRules, readers: int, at_once: int, run_bytes: int, chance: random.Random
) -> None:
    placement = place(version.tensors, version.digests, Residents(), rules)
    expected: dict[str, int] = {}
    for extent in placement.reads:
        expected[extent.tensor] = zlib.crc32(content(extent), expected.get(extent.tensor, 0))
    schedule = ReadSchedule(
        placement, crc32_combine, readers=readers, run_bytes=run_bytes, slabs_at_once=at_once
    )
    under_way: list[tuple[int, ReadRun]] = []
    taken: list[ReadRun] = []
    left = [
        sum(extent.nbytes for extent in placement.reads if extent.slab == slab)
        for slab in range(len(placement.slabs))
    ]
    found: dict[str, int] = {}
    completed: list[int] = []
    while True:
        while len(under_way) < readers and (work := schedule.take()) is not None:
            under_way.append(work)
            taken.append(work[1])
            assert len({run.slab for run in taken} - set(completed)) <= at_once + readers
        if not under_way:
            break
        number, run = under_way.pop(chance.randrange(len(under_way)))
        left[run.slab] -= run.nbytes
        filled = schedule.finish(number, run, [zlib.crc32(content(extent)) for extent in run.extents])
        assert (filled is not None) == (left[run.slab] == 0)
        if filled is not None:
            completed.append(filled.index)
            found.update(filled.crcs)
    assert sorted(completed) == list(range(len(placement.slabs)))
    assert found == expected
    for run in taken:
        assert run.nbytes <= run_bytes
        assert all(a.file_offset + a.nbytes == b.file_offset for a, b in pairwise(run.extents))
        assert {(extent.file, extent.slab) for extent in run.extents} == {(run.file, run.slab)}
    for slab in range(len(placement.slabs)):
        starts = [(run.file, run.file_offset) for run in taken if run.slab == slab]
        assert starts == sorted(starts), "a file is read from its beginning to its end"
    assert joined(extent for run in taken for extent in run.extents) == joined(placement.reads)


def small(nbytes: int) -> Placement:
    """One tensor."""
    tensor = TensorSource("w", "U8", (nbytes,), nbytes, "a", 8)
    return place([tensor], {}, Residents(), PlacementRules())


def test_a_run_is_finished_once() -> None:
    schedule = ReadSchedule(small(150), crc32_combine, readers=2, run_bytes=100)
    work = schedule.take()
    assert work is not None
    assert schedule.finish(*work, [1]) is None
    with pytest.raises(InvariantError, match="read twice"):
        schedule.finish(*work, [1])


def test_readers_spread_over_slabs() -> None:
    tensors = [TensorSource(name, "U8", (400,), 400, "a", 8 + 400 * i) for i, name in enumerate("abc")]
    placement = place(tensors, {}, Residents(), PlacementRules(slab_bytes=400))
    schedule = ReadSchedule(placement, crc32_combine, readers=2, run_bytes=100, slabs_at_once=2)
    order = [work[1].slab for _ in range(4) if (work := schedule.take())]
    assert order == [0, 1, 0, 1]


def test_what_is_complete_last_is_the_smallest() -> None:
    sizes = {"a": 100, "b": 400, "c": 300}
    starts = {"a": 8, "b": 108, "c": 508}
    tensors = [TensorSource(name, "U8", (size,), size, "f", starts[name]) for name, size in sizes.items()]
    placement = place(tensors, {}, Residents(), PlacementRules(slab_bytes=100))
    schedule = ReadSchedule(placement, crc32_combine, readers=2, run_bytes=100)
    taken = [work[1].slab for _ in range(8) if (work := schedule.take())]
    assert taken == [1] * 4 + [2] * 3 + [0]
    assert schedule.order == [1, 2, 0]


def test_the_last_slabs_fill_one_after_the_other() -> None:
    tensors = [TensorSource(name, "U8", (400,), 400, "a", 8 + 400 * i) for i, name in enumerate("abc")]
    placement = place(tensors, {}, Residents(), PlacementRules(slab_bytes=400))
    schedule = ReadSchedule(placement, crc32_combine, readers=2, run_bytes=100, slabs_at_once=3)
    order, under_way = [], []
    while work := schedule.take():
        order.append(work[1].slab)
        under_way.append(work)
        if len(under_way) == 2:
            schedule.finish(*under_way.pop(0), [0])
    assert order == [0] * 4 + [1] * 4 + [2] * 4
    many = ReadSchedule(placement, crc32_combine, readers=2, run_bytes=100, slabs_at_once=3)
    spread = [work[1].slab for _ in range(6) if (work := many.take())]
    assert spread == [0, 0, 1, 1, 2, 2]


def test_runs_shrink_towards_the_end() -> None:
    schedule = ReadSchedule(small(300 * MIB), crc32_combine, readers=4)
    sizes = []
    while work := schedule.take():
        sizes.append(work[1].nbytes)
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[:11] == [RUN_BYTES] * 11, "as long as eight more are left"
    assert sizes[-8:] == [LAST_RUN_BYTES] * 7 + [sizes[-1]]


def test_a_byte_belongs_to_the_extent_that_has_it() -> None:
    schedule = ReadSchedule(small(256), crc32_combine, readers=1, run_bytes=100)
    parts = [part for _ in range(3) if (work := schedule.take()) for part in work[1].extents]
    run = ReadRun(tuple(parts))
    assert [run.extent_at(byte).file_offset for byte in (8, 107, 108, 263, 264)] == [8, 8, 108, 208, 8]
