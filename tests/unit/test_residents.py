"""What is resident on several devices: replicas belong together, and every slab counts once."""

from __future__ import annotations

import pytest

from loaderd.placement import PlacementRules, place
from loaderd.plan import Candidate, DeviceMemory, Plan, Serving, Verdict, plan_push
from loaderd.residents import Residents
from shared.digest import file_digest
from shared.errors import InvariantError
from shared.ids import DeviceId, SlabId
from shared.layout import Layout, SlabEntry, TensorEntry
from tests.unit.test_plan_push import in_one_file

KIB = 1024
A, B, C = DeviceId("GPU-a"), DeviceId("GPU-b"), DeviceId("GPU-c")
RULES = PlacementRules(slab_bytes=64 * KIB, granularity_bytes=KIB)
SIZES = {"a": 4 * KIB, "b": 4 * KIB}


def layout(device: DeviceId, *slab_ids: str, contents: str = "ab", nbytes: int = 4 * KIB) -> Layout:
    """A tensor in each slab, of the content that its letter names."""
    slabs = tuple(SlabEntry(SlabId(slab_id), device, nbytes) for slab_id in slab_ids)
    tensors = tuple(
        TensorEntry(name, "U8", (4 * KIB,), 4 * KIB, index, 0, 0, file_digest(content.encode()))
        for index, (name, content) in enumerate(zip(SIZES, contents, strict=False))
    )
    return Layout(slabs, tensors)


def candidate(contents: str = "ab") -> Candidate:
    tensors = in_one_file(SIZES)
    digests = {t.name: file_digest(c.encode()) for t, c in zip(tensors, contents, strict=True)}
    return Candidate("m-v2", tensors, digests, {}, {})


def plan(residents: Residents, contents: str = "ab", **free: int) -> Plan:
    """A push to the devices named, each with so many KiB free."""
    memory = {DeviceId(f"GPU-{name}"): DeviceMemory(kib * KIB) for name, kib in free.items()}
    return plan_push(candidate(contents), None, residents, memory, rules=RULES)


def test_slabs_at_one_index_of_a_versions_copies_are_replicas() -> None:
    residents = Residents.of({"v1": [layout(A, "a0", "a1"), layout(B, "b0", "b1")]})
    assert set(residents.slabs) == {"a0", "a1"}
    assert {device: each.slab_id for device, each in residents.slabs[SlabId("a1")].replicas.items()} == {
        A: "a1",
        B: "b1",
    }
    assert (residents.bytes_on(A), residents.bytes_on(B), residents.bytes_on(C)) == (8 * KIB, 8 * KIB, 0)
    assert residents.replica_on(A, SlabId("b0")) == "a0"
    assert residents.replica_on(C, SlabId("b0")) is None
    assert residents.replica_on(A, SlabId("unknown")) is None


def test_a_version_with_fewer_copies_joins_the_replicas_it_shares() -> None:
    residents = Residents.of(
        {"v1": [layout(A, "a0", "a1")], "v2": [layout(A, "a0", "a2", contents="ac"), layout(B, "b0", "b2")]}
    )
    assert set(residents.slabs[SlabId("a0")].replicas) == {A, B}
    assert residents.slabs[SlabId("a0")].held_by == {"v1", "v2"}
    assert residents.freed_bytes(A, frozenset({"v2"}), frozenset()) == 4 * KIB, "v1 keeps a0 there"
    assert residents.freed_bytes(B, frozenset({"v2"}), frozenset()) == 8 * KIB
    assert residents.freed_bytes(B, frozenset({"v2"}), frozenset({SlabId("a2")})) == 4 * KIB


def test_a_second_slab_with_the_same_bytes_on_one_device_stands_alone() -> None:
    """v2's copy on B was made again while nobody knew of v1's there."""
    residents = Residents.of(
        {
            "v1": [layout(A, "a0", "a1"), layout(B, "b0", "b1")],
            "v2": [layout(A, "a0", "a1"), layout(B, "x0", "x1")],
        }
    )
    assert set(residents.slabs) == {"a0", "a1", "x0", "x1"}
    assert residents.bytes_on(B) == 16 * KIB
    assert residents.freed_bytes(B, frozenset({"v2"}), frozenset()) == 8 * KIB
    assert residents.freed_bytes(A, frozenset({"v2"}), frozenset()) == 0


def test_copies_of_other_sizes_are_a_broken_invariant() -> None:
    with pytest.raises(InvariantError, match="disagree on the size of slab b0"):
        Residents.of({"v1": [layout(A, "a0"), layout(B, "b0", nbytes=8 * KIB)]})


def test_content_is_taken_from_the_version_that_is_on_the_devices_asked_for() -> None:
    versions = {"x": [layout(A, "a0", "a1")], "y": [layout(B, "b0", "b1")]}
    for device, slab in ((A, "a0"), (B, "b0")):
        residents = Residents.of(versions, [device])
        placement = place(candidate().tensors, candidate().digests, residents, RULES)
        assert placement.shared_slabs[0] == slab
        assert residents.bytes_lacking(device, placement.shared_slabs) == 0


def test_the_tightest_device_decides_and_is_named() -> None:
    refused = plan(Residents(), a=100, b=3, c=5)
    assert refused.verdict is Verdict.REFUSE
    assert refused.tightest.device == B
    assert refused.reasons == (
        f"m-v2 needs {8 * KIB} bytes on GPU-b, {3 * KIB} are free there, and unloading what it may replace "
        f"frees 0: {5 * KIB} bytes are missing",
    )
    assert [(d.device, d.bytes_to_allocate, d.free_bytes) for d in refused.devices] == [
        (A, 8 * KIB, 100 * KIB),
        (B, 8 * KIB, 3 * KIB),
        (C, 8 * KIB, 5 * KIB),
    ]


def test_bytes_are_read_once_for_all_devices() -> None:
    hot = plan(Residents(), a=8, b=8)
    assert (hot.verdict, hot.bytes_to_read) == (Verdict.HOT, 8 * KIB)
    assert [each.peak_bytes for each in hot.devices] == [8 * KIB, 8 * KIB]


def test_a_shared_slab_that_a_device_lacks_is_allocated_there() -> None:
    residents = Residents.of({"v1": [layout(A, "a0", "a1")]})
    hot = plan(residents, a=0, b=8)
    assert (hot.verdict, hot.bytes_to_read, hot.bytes_to_share) == (Verdict.HOT, 0, 8 * KIB)
    assert [each.bytes_to_allocate for each in hot.devices] == [0, 8 * KIB]
    assert [slab.slab_id for slab in hot.shared_slabs] == ["a0", "a1"]
    assert plan(residents, a=0, b=7).verdict is Verdict.REFUSE


def test_a_limit_holds_for_each_device() -> None:
    residents = Residents.of({"v1": [layout(A, "a0", "a1")]})
    memory = {device: DeviceMemory(1 << 30, limit_bytes=12 * KIB) for device in (A, B)}
    new = candidate("cd")
    hot = plan_push(new, None, residents, {B: memory[B]}, rules=RULES)
    assert hot.verdict is Verdict.HOT, "what lies on A does not count on B"
    refused = plan_push(new, None, residents, memory, rules=RULES)
    assert (refused.verdict, refused.tightest.device) == (Verdict.REFUSE, A)


def test_a_sweep_frees_memory_on_each_device() -> None:
    both = [layout(A, "a0", "a1"), layout(B, "b0", "b1")]
    residents = Residents.of({"m-v1": both, "m-v0": [layout(A, "a2", "a3", contents="xy")]})
    serving = Serving("m-v1", both[0], {}, {})
    memory = {A: DeviceMemory(0), B: DeviceMemory(8 * KIB)}
    hot = plan_push(candidate("cd"), serving, residents, memory, retained="m-v0", rules=RULES)
    assert (hot.verdict, hot.sweep_first) == (Verdict.HOT, True)
    assert [each.freed_bytes for each in hot.devices] == [8 * KIB, 0]
    memory = {A: DeviceMemory(0), B: DeviceMemory(7 * KIB)}
    cold = plan_push(candidate("cd"), serving, residents, memory, retained="m-v0", rules=RULES)
    assert cold.verdict is Verdict.COLD
    assert cold.reasons[0].startswith(f"{KIB} bytes are missing on GPU-b to hold m-v2")
