"""Placement and plan over arbitrary versions: every tensor in one place, nothing overlaps, bytes add up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from loaderd.checkpoint.header import TensorSource
from loaderd.placement import Placement, PlacementRules, place
from loaderd.plan import Candidate, DeviceMemory, Serving, Verdict, plan_push
from loaderd.residents import Residents
from shared.digest import digest_bytes, file_digest
from shared.ids import HOST_DEVICE, DeviceId, Digest, SlabId
from shared.layout import ALIGNMENT_BYTES, Layout, SlabEntry, TensorEntry
from shared.layout_table import decode_layout, encode_layout

SETTINGS = settings(max_examples=150, deadline=None)

rule_sets = st.builds(
    PlacementRules,
    slab_bytes=st.sampled_from([256, 1000, 4096, 1 << 20]),
    granularity_bytes=st.sampled_from([256, 512, 4096]),
    max_dead_ratio=st.sampled_from([0.0, 0.5, 1.0, 100.0]),
)


@dataclass(frozen=True)
class Version:
    """A version's tensors and digests; content is an integer whose size follows from it."""

    tensors: tuple[TensorSource, ...]
    digests: dict[str, Digest]

    @property
    def content_bytes(self) -> int:
        return sum({self.digests[t.name]: t.nbytes for t in self.tensors}.values())


def content_size(content: int) -> int:
    return (0, 1, 255, 256, 257, 1000, 5000)[content % 7]


@st.composite
def versions(draw: st.DrawFn) -> Version:
    """Up to 12 tensors over three files, drawn from few contents, so that versions share and alias."""
    contents = draw(st.lists(st.integers(0, 20), min_size=1, max_size=12))
    ends = dict.fromkeys("abc", 8)
    tensors: list[TensorSource] = []
    for index, content in enumerate(contents):
        file = draw(st.sampled_from("abc"))
        nbytes = content_size(content)
        tensors.append(TensorSource(f"t{index:02}", "U8", (nbytes,), nbytes, file, ends[file]))
        ends[file] += nbytes
    digests = {t.name: file_digest(b"%d" % content) for t, content in zip(tensors, contents, strict=True)}
    return Version(tuple(tensors), digests)


def layout_of(version: Version, placement: Placement, residents: Residents, prefix: str) -> Layout:
    """The layout table that a load of this placement produces."""
    new = [SlabEntry(SlabId(f"{prefix}-{i}"), HOST_DEVICE, size) for i, size in enumerate(placement.slabs)]
    old = [SlabEntry(slab, HOST_DEVICE, residents.slabs[slab].nbytes) for slab in placement.shared_slabs]
    rows = []
    for tensor in sorted(version.tensors, key=lambda t: t.name):
        digest, spot = version.digests[tensor.name], placement.places[tensor.name]
        crc32 = int.from_bytes(digest_bytes(digest)[:4], "big")
        rows.append(
            TensorEntry(
                tensor.name,
                tensor.dtype,
                tensor.shape,
                tensor.nbytes,
                spot.slab,
                spot.offset_bytes,
                crc32,
                digest,
            )
        )
    return Layout((*new, *old), tuple(rows))


def residents_of(layouts: Mapping[str, Layout]) -> Residents:
    """Versions with a copy on one device."""
    return Residents.of({name: [layout] for name, layout in layouts.items()})


def check_placement(
    version: Version, placement: Placement, residents: Residents, rules: PlacementRules
) -> None:
    by_name = {t.name: t for t in version.tensors}
    assert placement.places.keys() == by_name.keys()
    # Bounds, alignment, overlaps and aliases are what the receiving end checks.
    layout = layout_of(version, placement, residents, "new")
    assert decode_layout(encode_layout(layout)) == layout
    assert placement.bytes_to_read + placement.bytes_to_share == version.content_bytes == layout.total_bytes
    # Reads cover each distinct new place exactly once, and nothing else.
    written: dict[tuple[int, int], int] = {}
    for read in placement.reads:
        tensor = by_name[read.tensor]
        spot = placement.places[read.tensor]
        assert (read.file, read.file_offset, read.nbytes) == (tensor.file, tensor.file_offset, tensor.nbytes)
        assert (read.slab, read.slab_offset) == (spot.slab, spot.offset_bytes)
        written[(spot.slab, spot.offset_bytes)] = written.get((spot.slab, spot.offset_bytes), 0) + read.nbytes
    expected = {
        (spot.slab, spot.offset_bytes): by_name[name].nbytes
        for name, spot in placement.places.items()
        if by_name[name].nbytes and spot.slab < len(placement.slabs)
    }
    assert written == expected
    assert list(placement.reads) == sorted(placement.reads, key=lambda read: (read.file, read.file_offset))
    # One place per content, and slabs no larger than they need to be.
    spots: dict[Digest, set[tuple[int, int]]] = {}
    for name, spot in placement.places.items():
        spots.setdefault(version.digests[name], set()).add((spot.slab, spot.offset_bytes))
    assert all(len(places) == 1 for places in spots.values())
    for index, size in enumerate(placement.slabs):
        ends = [offset + nbytes for (slab, offset), nbytes in expected.items() if slab == index]
        assert size % rules.granularity_bytes == 0
        assert max(ends) <= size < max(ends) + rules.granularity_bytes
        assert max(ends) <= rules.slab_bytes or len(ends) == 1
    # What is shared is what is resident, and keeps no more alive than the rules allow.
    for entry in placement.shared:
        resident = residents.places[version.digests[entry.tensor]]
        assert (entry.slab_id, entry.offset_bytes, entry.nbytes) == (
            resident.slab_id, resident.offset_bytes, by_name[entry.tensor].nbytes,
        )  # fmt: skip
    slack = len(placement.shared_slabs) * rules.granularity_bytes
    assert placement.dead_bytes <= version.content_bytes * rules.max_dead_ratio + slack


@SETTINGS
@given(st.lists(versions(), min_size=1, max_size=4), rule_sets, st.randoms(use_true_random=False))
def test_a_chain_of_versions_is_placed_soundly(
    chain: list[Version], rules: PlacementRules, random: object
) -> None:
    layouts: dict[str, Layout] = {}
    for number, version in enumerate(chain):
        residents = residents_of(layouts)
        placement = place(version.tensors, version.digests, residents, rules)
        check_placement(version, placement, residents, rules)
        layouts[f"v{number}"] = layout_of(version, placement, residents, f"v{number}")
        if len(layouts) > 2:
            del layouts[min(layouts)]


@SETTINGS
@given(versions(), versions(), rule_sets, st.data())
def test_order_does_not_matter(
    first: Version, second: Version, rules: PlacementRules, data: st.DataObject
) -> None:
    layout = layout_of(first, place(first.tensors, first.digests, Residents(), rules), Residents(), "v0")
    residents = residents_of({"v0": layout})
    expected = place(second.tensors, second.digests, residents, rules)
    tensors = data.draw(st.permutations(second.tensors))
    digests = dict(data.draw(st.permutations(list(second.digests.items()))))
    places = dict(data.draw(st.permutations(list(residents.places.items()))))
    slabs = dict(data.draw(st.permutations(list(residents.slabs.items()))))
    assert place(tensors, digests, Residents(places, slabs), rules) == expected


@SETTINGS
@given(versions(), rule_sets)
def test_without_digests_every_tensor_is_read(version: Version, rules: PlacementRules) -> None:
    placement = place(version.tensors, {}, Residents(), rules)
    assert placement.bytes_to_read == sum(t.nbytes for t in version.tensors)
    taken: dict[int, list[tuple[int, int]]] = {}
    for tensor in version.tensors:
        spot = placement.places[tensor.name]
        assert spot.offset_bytes % ALIGNMENT_BYTES == 0
        if tensor.nbytes:
            taken.setdefault(spot.slab, []).append((spot.offset_bytes, spot.offset_bytes + tensor.nbytes))
    for spans in taken.values():
        spans.sort()
        assert all(before[1] <= after[0] for before, after in pairwise(spans))


def in_table_of(template: Version, version: Version) -> Version:
    """`template`'s table, with `version`'s bytes in the tensors that have the same size in both."""
    digests = {
        name: version.digests[name] if size_of(version, name) == size_of(template, name) else digest
        for name, digest in template.digests.items()
    }
    return replace(template, digests=digests)


def size_of(version: Version, name: str) -> int:
    return next((t.nbytes for t in version.tensors if t.name == name), -1)


@SETTINGS
@given(
    versions(), versions(), versions(), rule_sets, st.integers(0, 40_000), st.none() | st.integers(0, 60_000)
)
def test_a_plan_that_is_not_refused_fits(
    old: Version, now: Version, new: Version, rules: PlacementRules, free: int, limit: int | None
) -> None:
    layouts: dict[str, Layout] = {}
    for name, version in (("v0", old), ("v1", now)):
        residents = residents_of(layouts)
        placement = place(version.tensors, version.digests, residents, rules)
        layouts[name] = layout_of(version, placement, residents, name)
    residents = residents_of(layouts)
    target = in_table_of(now, new)
    candidate = Candidate("v2", target.tensors, target.digests, {}, {})
    serving = Serving("v1", layouts["v1"], {}, {})
    memory = DeviceMemory(free, limit)
    plan = plan_push(candidate, serving, residents, {HOST_DEVICE: memory}, retained="v0", rules=rules)
    assert not plan.tensor_changes
    assert plan.bytes_total == target.content_bytes
    assert plan.bytes_to_read + plan.bytes_to_share == plan.bytes_total
    if plan.verdict is Verdict.REFUSE:
        needed = sum(place(target.tensors, target.digests, Residents(), rules).slabs)
        assert needed > free + residents.bytes_on(HOST_DEVICE) or (limit is not None and needed > limit)
        return
    gone = {Verdict.HOT: {"v0"} if plan.sweep_first else set(), Verdict.COLD: {"v0", "v1"}}[plan.verdict]
    kept = {
        slab.slab_id: slab.nbytes
        for slab in residents.slabs.values()
        if slab.held_by - gone or slab.slab_id in plan.placement.shared_slabs
    }
    freed = residents.bytes_on(HOST_DEVICE) - sum(kept.values())
    assert plan.tightest.bytes_to_allocate <= free + freed
    assert plan.tightest.peak_bytes == sum(kept.values()) + plan.tightest.bytes_to_allocate
    assert limit is None or plan.tightest.peak_bytes <= limit
    assert kept.keys() >= set(plan.placement.shared_slabs)
    if plan.verdict is Verdict.COLD:
        assert plan.reasons
        assert not plan.placement.shared_slabs


def copy_on(layout: Layout, device: DeviceId) -> Layout:
    """The same layout in another device's slabs."""
    slabs = tuple(SlabEntry(SlabId(f"{device}-{s.slab_id}"), device, s.nbytes) for s in layout.slabs)
    return replace(layout, slabs=slabs)


DEVICES = (DeviceId("GPU-a"), DeviceId("GPU-b"), DeviceId("GPU-c"))
device_sets = st.sets(st.sampled_from(DEVICES), min_size=1).map(sorted)


@SETTINGS
@given(
    versions(), versions(), versions(), rule_sets, device_sets, device_sets, device_sets,
    st.lists(st.integers(0, 40_000), min_size=3, max_size=3),
)  # fmt: skip
def test_a_plan_for_several_devices_fits_each_of_them(
    old: Version,
    now: Version,
    new: Version,
    rules: PlacementRules,
    old_on: list[DeviceId],
    now_on: list[DeviceId],
    new_on: list[DeviceId],
    free: list[int],
) -> None:
    on_host: dict[str, Layout] = {}
    layouts: dict[str, list[Layout]] = {}
    for name, version, devices in (("v0", old, old_on), ("v1", now, now_on)):
        residents = residents_of(on_host)
        placement = place(version.tensors, version.digests, residents, rules)
        on_host[name] = layout_of(version, placement, residents, name)
        layouts[name] = [copy_on(on_host[name], device) for device in devices]
    residents = Residents.of(layouts, new_on)
    # Each slab counts once, on its device, whoever shares it.
    for device in DEVICES:
        slabs = {
            s.slab_id: s.nbytes
            for each in layouts.values()
            for c in each
            for s in c.slabs
            if s.device == device
        }
        assert residents.bytes_on(device) == sum(slabs.values())
        assert residents.freed_bytes(device, frozenset({"v0", "v1"}), frozenset()) == sum(slabs.values())
    target = in_table_of(now, new)
    candidate = Candidate("v2", target.tensors, target.digests, {}, {})
    memory = {device: DeviceMemory(free[DEVICES.index(device)]) for device in new_on}
    plan = plan_push(
        candidate, Serving("v1", on_host["v1"], {}, {}), residents, memory, retained="v0", rules=rules
    )
    assert [each.device for each in plan.devices] == new_on
    assert plan.bytes_to_read + plan.bytes_to_share == target.content_bytes
    if plan.verdict is Verdict.REFUSE:
        return
    for each in plan.devices:
        lacking = sum(s.nbytes for s in plan.shared_slabs if each.device not in s.replicas)
        assert each.bytes_to_allocate == sum(plan.slabs) + lacking
        assert each.bytes_to_allocate <= each.free_bytes + each.freed_bytes
        assert each.missing_bytes <= plan.tightest.missing_bytes <= 0
