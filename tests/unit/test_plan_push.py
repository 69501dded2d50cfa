"""The plan: verdicts with their reasons, and what memory they stand for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from loaderd.checkpoint.header import TensorSource
from loaderd.placement import PlacementRules, place
from loaderd.plan import Candidate, DeviceMemory, Plan, Serving, Verdict, plan_push
from loaderd.residents import Residents
from shared.digest import file_digest
from shared.errors import InvariantError
from shared.ids import HOST_DEVICE, Digest, SlabId
from shared.layout import Layout, SlabEntry, TensorEntry

KIB = 1024
RULES = PlacementRules(slab_bytes=64 * KIB, granularity_bytes=KIB)
CONFIG: Mapping[str, object] = {"model_type": "tiny", "hidden_size": 8}
ASSETS = {"config.json": file_digest(b"{}"), "tokenizer.json": file_digest(b"t")}
FREE = DeviceMemory(free_bytes=1 << 30)


def source(name: str, nbytes: int, offset: int = 0, file: str = "m.safetensors") -> TensorSource:
    return TensorSource(name, "U8", (nbytes,), nbytes, file, offset)


def in_one_file(sizes: Mapping[str, int]) -> list[TensorSource]:
    offset, tensors = 100, []
    for name, nbytes in sizes.items():
        tensors.append(source(name, nbytes, offset))
        offset += nbytes
    return tensors


SIZES = {"a": 4 * KIB, "b": 3 * KIB, "c": KIB}


def digests(version: int, **kept: int) -> dict[str, Digest]:
    """A digest per tensor, by the version its bytes came with."""
    return {name: file_digest(f"{name}{kept.get(name, version)}".encode()) for name in SIZES}


def candidate(version: int = 2, **kept: int) -> Candidate:
    return Candidate(f"m-v{version}", in_one_file(SIZES), digests(version, **kept), CONFIG, ASSETS)


def resident(version: int = 1, slab: str = "s", **kept: int) -> Layout:
    """The layout of a version that lies in one slab of 8 KiB."""
    tensors, offset = [], 0
    for name, digest in digests(version, **kept).items():
        tensors.append(TensorEntry(name, "U8", (SIZES[name],), SIZES[name], 0, offset, 0, digest))
        offset += SIZES[name]
    return Layout((SlabEntry(SlabId(f"{slab}{version}"), HOST_DEVICE, 8 * KIB),), tuple(tensors))


SERVING = Serving("m-v1", resident(1), CONFIG, ASSETS)
RESIDENTS = Residents.of({"m-v1": [resident(1)]})


def plan(
    new: Candidate | None = None,
    serving: Serving | None = SERVING,
    residents: Residents = RESIDENTS,
    memory: DeviceMemory = FREE,
    retained: str | None = None,
) -> Plan:
    return plan_push(
        new or candidate(), serving, residents, {HOST_DEVICE: memory}, retained=retained, rules=RULES
    )


def test_a_first_load_reads_everything() -> None:
    first = plan(serving=None, residents=Residents())
    assert (first.verdict, first.reasons, first.warnings) == (Verdict.HOT, (), ())
    assert (first.bytes_total, first.bytes_to_read, first.bytes_to_share) == (8 * KIB, 8 * KIB, 0)
    assert (first.slabs, first.tightest.peak_bytes, first.sweep_first) == ((8 * KIB,), 8 * KIB, False)
    assert [(r.tensor, r.file_offset, r.slab_offset, r.nbytes) for r in first.reads] == [
        ("a", 100, 0, 4 * KIB), ("b", 100 + 4 * KIB, 4 * KIB, 3 * KIB), ("c", 100 + 7 * KIB, 7 * KIB, KIB),
    ]  # fmt: skip


def test_a_push_reads_what_changed_and_shares_the_rest() -> None:
    hot = plan(candidate(2, a=1, c=1))
    assert hot.verdict is Verdict.HOT
    assert [read.tensor for read in hot.reads] == ["b"]
    assert [(s.tensor, s.slab_id, s.offset_bytes) for s in hot.shared] == [
        ("a", "s1", 0),
        ("c", "s1", 7 * KIB),
    ]
    assert (hot.bytes_to_read, hot.bytes_to_share, hot.tightest.bytes_to_allocate) == (
        3 * KIB,
        5 * KIB,
        3 * KIB,
    )
    assert hot.tightest.peak_bytes == 11 * KIB
    assert {name: (p.slab, p.offset_bytes) for name, p in hot.placement.places.items()} == {
        "a": (1, 0), "b": (0, 0), "c": (1, 7 * KIB),
    }  # fmt: skip
    assert hot.placement.dead_bytes == 3 * KIB


def test_the_same_content_allocates_nothing() -> None:
    same = plan(candidate(2, a=1, b=1, c=1))
    assert (same.verdict, same.slabs, same.reads) == (Verdict.HOT, (), ())
    assert same.warnings == ("all tensors of m-v2 are resident already",)


def test_without_a_seal_nothing_is_shared() -> None:
    unsealed = plan(replace(candidate(), digests={}))
    assert (unsealed.verdict, unsealed.bytes_to_share) == (Verdict.HOT, 0)
    assert unsealed.warnings == ("m-v2 has no seal: nothing can be shared, and only reading it shows damage",)
    (warning,) = plan(replace(candidate(), digests={}, is_signed=True)).warnings
    assert warning == "m-v2 has no seal: all of it is hashed before it is loaded, and only then shared"


def changed(name: str, **fields: object) -> Candidate:
    tensors = [replace(t, **fields) if t.name == name else t for t in candidate().tensors]  # type: ignore[arg-type]
    return replace(candidate(), tensors=tensors)


def test_another_shape_is_refused_with_expected_and_found() -> None:
    refused = plan(changed("b", shape=(3, KIB)))
    assert refused.verdict is Verdict.REFUSE
    assert refused.reasons == ("tensor 'b' is U8 [3, 1024], the serving version has U8 [3072]",)
    assert refused.tensor_changes.reshaped == ("b",)


def test_another_dtype_is_refused() -> None:
    refused = plan(changed("b", dtype="I8"))
    assert refused.verdict is Verdict.REFUSE
    assert refused.reasons == ("tensor 'b' is I8 [3072], the serving version has U8 [3072]",)
    assert (refused.tensor_changes.retyped, refused.tensor_changes.reshaped) == (("b",), ())


def test_added_and_removed_tensors_and_the_total_size_are_refused() -> None:
    renamed = replace(candidate(), tensors=[*candidate().tensors[:2], source("d", 2 * KIB, 9000)])
    refused = plan(renamed)
    assert refused.verdict is Verdict.REFUSE
    assert refused.reasons == (
        "tensor 'd' is not in the serving version",
        "tensor 'c' of the serving version is missing",
        "tensors have 9216 bytes in all, the serving version's have 8192",
    )
    assert (refused.tensor_changes.added, refused.tensor_changes.removed) == (("d",), ("c",))


def test_many_differences_are_counted_after_the_first_few() -> None:
    more = [source(f"x{i}", 1, i) for i in range(10)]
    assert plan(replace(candidate(), tensors=[*candidate().tensors, *more])).reasons[:4] == (
        "tensor 'x0' is not in the serving version",
        "tensor 'x1' is not in the serving version",
        "tensor 'x2' is not in the serving version",
        "7 more tensors are not in it either",
    )
    wide = [replace(t, dtype="I8") for t in more]
    layout = Layout(SERVING.layout.slabs, tuple(
        TensorEntry(t.name, "U8", t.shape, 1, 0, 0, 0, file_digest(b"")) for t in more))  # fmt: skip
    reasons = plan(replace(candidate(), tensors=wide), replace(SERVING, layout=layout)).reasons
    assert reasons[-1] == "7 more tensors have another shape or dtype"


def test_a_config_of_another_architecture_is_refused_and_other_keys_are_told() -> None:
    config = {**CONFIG, "hidden_size": 16, "eos_token_id": 2, "transformers_version": "9"}
    refused = plan(replace(candidate(), config=config))
    assert refused.verdict is Verdict.REFUSE
    assert refused.reasons == ("config.json: hidden_size is 16, the serving version's is 8",)
    assert refused.warnings == ("config.json: eos_token_id is 2, the serving version's is absent",)


def test_many_config_differences_are_counted_after_the_first_few() -> None:
    config = {**CONFIG, **{f"x{i:02}": i for i in range(20)}, **{f"x{i:02}_size": i for i in range(10)}}
    refused = plan(replace(candidate(), config=config))
    assert (len(refused.reasons), refused.reasons[-1]) == (9, "2 more keys of config.json differ")
    assert (len(refused.warnings), refused.warnings[-1]) == (9, "12 more keys of config.json differ")


def test_a_tokenizer_or_generation_change_is_a_warning() -> None:
    assets = {**ASSETS, "tokenizer.json": file_digest(b"u"), "generation_config.json": file_digest(b"g")}
    hot = plan(replace(candidate(), assets=assets))
    assert (hot.verdict, hot.tokenizer_changed) == (Verdict.HOT, True)
    assert hot.files_changed == ("generation_config.json", "tokenizer.json")
    assert hot.warnings == (
        "generation_config.json differs from the serving version's",
        "tokenizer.json differs from the serving version's: the same text may become other tokens",
    )
    assert not plan().tokenizer_changed


def test_ignored_files_are_told() -> None:
    assert plan(replace(candidate(), ignored=[f"{i}.bin" for i in range(9)])).warnings == (
        "0.bin", "1.bin", "2.bin", "6 more files or tensors of the folder are ignored",
    )  # fmt: skip


# --- memory: v1 serves and v0 is retained, 8 KiB each; v2 needs 8 KiB ------------------------------

BOTH = Residents.of({"m-v1": [resident(1)], "m-v0": [resident(0)]})


@pytest.mark.parametrize("memory", [DeviceMemory(8 * KIB), DeviceMemory(1 << 30, limit_bytes=24 * KIB)])
def test_what_fits_beside_everything_sweeps_nothing(memory: DeviceMemory) -> None:
    hot = plan(residents=BOTH, memory=memory, retained="m-v0")
    assert (hot.verdict, hot.sweep_first, hot.tightest.peak_bytes) == (Verdict.HOT, False, 24 * KIB)


@pytest.mark.parametrize(
    "memory", [DeviceMemory(8 * KIB - 1), DeviceMemory(1 << 30, limit_bytes=24 * KIB - 1)]
)
def test_what_fits_after_a_sweep_is_hot(memory: DeviceMemory) -> None:
    hot = plan(residents=BOTH, memory=memory, retained="m-v0")
    assert (hot.verdict, hot.sweep_first, hot.reasons) == (Verdict.HOT, True, ())
    assert hot.tightest.peak_bytes == 16 * KIB


def test_sharing_with_the_retained_version_is_given_up_where_its_slab_must_go() -> None:
    # Everything but c is resident in v0's slab: sharing keeps 8 KiB and needs 1 KiB more, of which
    # none is free; without it the slab goes and v2 fits in its place.
    mixed = candidate(2, a=0, b=0)
    roomy = plan(mixed, residents=BOTH, memory=DeviceMemory(KIB), retained="m-v0")
    assert (roomy.sweep_first, roomy.bytes_to_share) == (False, 7 * KIB)
    tight = plan(mixed, residents=BOTH, memory=DeviceMemory(KIB - 1), retained="m-v0")
    assert (tight.verdict, tight.sweep_first, tight.bytes_to_share) == (Verdict.HOT, True, 0)
    assert tight.tightest.peak_bytes == 16 * KIB


def test_what_fits_only_after_unloading_is_cold_and_says_what_is_missing() -> None:
    cold = plan(memory=DeviceMemory(3 * KIB))
    assert (cold.verdict, cold.sweep_first, cold.tightest.peak_bytes) == (Verdict.COLD, False, 8 * KIB)
    assert cold.reasons == (
        f"{5 * KIB} bytes are missing on host to hold m-v2 beside m-v1, "
        "which serves and which no push unloads",
    )


def test_a_limit_that_is_too_small_is_named_with_one_that_would_do() -> None:
    limit_bytes = 15 * KIB
    cold = plan(memory=DeviceMemory(1 << 30, limit_bytes))
    assert cold.verdict is Verdict.COLD
    assert cold.reasons[0].endswith(f"; memory_limit_bytes is {limit_bytes}, at least {16 * KIB} is needed")
    assert plan(memory=DeviceMemory(1 << 30, 16 * KIB)).verdict is Verdict.HOT
    memory_is_less = plan(memory=DeviceMemory(6 * KIB, limit_bytes))
    assert memory_is_less.verdict is Verdict.COLD
    assert "memory_limit_bytes" not in memory_is_less.reasons[0]


def test_a_cold_load_shares_nothing_that_is_unloaded() -> None:
    cold = plan(candidate(2, a=1), memory=DeviceMemory(KIB))
    assert (cold.verdict, cold.bytes_to_share, cold.tightest.bytes_to_allocate) == (Verdict.COLD, 0, 8 * KIB)
    assert cold.reasons[0].startswith(f"{3 * KIB} bytes are missing on host")


def test_what_never_fits_is_refused_with_needed_and_free() -> None:
    refused = plan(residents=Residents.of({"m-v1": [resident(1)], "other": [resident(7)]}),
                   memory=DeviceMemory(1 << 30, limit_bytes=14 * KIB))  # fmt: skip
    assert (refused.verdict, refused.sweep_first) == (Verdict.REFUSE, False)
    assert refused.reasons == (
        f"m-v2 needs {8 * KIB} bytes on host, 0 are free there (memory_limit_bytes is {14 * KIB}), "
        f"and unloading what it may replace frees {8 * KIB}: {2 * KIB} bytes are missing",
    )
    first = plan(serving=None, residents=Residents(), memory=DeviceMemory(KIB))
    assert first.reasons == (
        f"m-v2 needs {8 * KIB} bytes on host, {KIB} are free there, and unloading what it may replace "
        f"frees 0: {7 * KIB} bytes are missing",
    )


def test_a_slab_that_another_version_holds_is_not_freed_by_a_sweep() -> None:
    shared = Residents.of({"m-v1": [resident(1)], "m-v0": [resident(0)], "other": [resident(0)]})
    assert plan(residents=shared, memory=DeviceMemory(7 * KIB), retained="m-v0").verdict is Verdict.COLD


def test_incompatible_and_too_large_gives_both_reasons() -> None:
    refused = plan(changed("b", dtype="I8"), memory=DeviceMemory(0, limit_bytes=KIB))
    assert refused.verdict is Verdict.REFUSE
    assert len(refused.reasons) == 2


# --- placement --------------------------------------------------------------------------------------


def test_large_tensors_get_their_own_slab_and_small_ones_fill_the_first_that_fits() -> None:
    sizes = {"a": 40 * KIB, "huge": 100 * KIB, "b": 30 * KIB, "c": 20 * KIB, "d": 30 * KIB}
    placement = place(in_one_file(sizes), {}, Residents(), RULES)
    assert {name: p.slab for name, p in placement.places.items()} == {
        "a": 0,
        "huge": 1,
        "b": 2,
        "c": 0,
        "d": 2,
    }
    assert placement.slabs == (60 * KIB, 100 * KIB, 60 * KIB)


def test_tensors_start_at_multiples_of_256_and_slabs_end_at_the_granularity() -> None:
    placement = place(in_one_file({"a": 1, "b": 257, "c": 5}), {}, Residents(), RULES)
    assert [p.offset_bytes for p in placement.places.values()] == [0, 256, 768]
    assert placement.slabs == (KIB,)


def test_aliases_are_read_once_and_count_once() -> None:
    tensors = in_one_file({"embed": 4 * KIB, "head": 4 * KIB, "x": KIB})
    same = {"embed": file_digest(b"e"), "head": file_digest(b"e"), "x": file_digest(b"x")}
    placement = place(tensors, same, Residents(), RULES)
    assert placement.places["embed"] == placement.places["head"]
    assert [read.tensor for read in placement.reads] == ["embed", "x"]
    assert placement.slabs == (5 * KIB,)
    layout = Layout(
        (SlabEntry(SlabId("s"), HOST_DEVICE, 5 * KIB),),
        tuple(
            TensorEntry(t.name, "U8", t.shape, t.nbytes, 0, placement.places[t.name].offset_bytes, 0, digest)
            for t, digest in zip(tensors, same.values(), strict=True)
        ),
    )
    again = place(tensors, same, Residents.of({"v": [layout]}), RULES)
    assert (again.bytes_to_share, again.slabs, len(again.shared)) == (5 * KIB, (), 3)


def test_empty_tensors_take_no_place() -> None:
    placement = place([source("e", 0), source("z", 0)], {"e": file_digest(b"")}, Residents(), RULES)
    assert placement.slabs == ()
    assert {(p.slab, p.offset_bytes) for p in placement.places.values()} == {(0, 0)}


def test_a_digest_claimed_for_another_size_is_not_shared() -> None:
    # Only a seal that lies can do this; reading the tensor shows it.
    claimed = {"a": digests(1)["b"], "b": digests(1)["b"]}
    placement = place(in_one_file({"a": 5 * KIB, "b": 3 * KIB}), claimed, RESIDENTS, RULES)
    assert [read.tensor for read in placement.reads] == ["a"]
    assert [shared.tensor for shared in placement.shared] == ["b"]
    twice = place(in_one_file({"a": 5 * KIB, "b": 3 * KIB}), claimed, Residents(), RULES)
    assert twice.bytes_to_read == 8 * KIB


def test_a_slab_is_not_kept_for_a_few_of_its_tensors() -> None:
    # c is 1 of 8 KiB: sharing it would keep 7 KiB alive for nothing once v1 is gone.
    strict = replace(RULES, max_dead_ratio=0.5)
    assert place(in_one_file(SIZES), digests(2, c=1), RESIDENTS, RULES).bytes_to_share == KIB
    assert place(in_one_file(SIZES), digests(2, c=1), RESIDENTS, strict).bytes_to_share == 0
    assert place(in_one_file(SIZES), digests(2, a=1), RESIDENTS, strict).bytes_to_share == 4 * KIB


def test_layouts_that_disagree_on_a_slab_are_a_broken_invariant() -> None:
    other = replace(resident(1), slabs=(replace(resident(1).slabs[0], nbytes=16 * KIB),))
    with pytest.raises(InvariantError, match="disagree on the size of slab s1"):
        Residents.of({"x": [resident(1)], "y": [other]})


# --- who holds memory ----------------------------------------------------------------------------

HELD = "GPU memory is held by pid 7 (vllm) with 3 MiB"


def test_missing_device_memory_names_who_holds_it() -> None:
    memory = DeviceMemory(free_bytes=KIB, holders=HELD)
    refused = plan_push(candidate(), None, Residents.of({}), {HOST_DEVICE: memory}, rules=RULES)
    assert refused.verdict is Verdict.REFUSE
    assert refused.reasons[-1].endswith(f"bytes are missing; {HELD}")
    cold = plan_push(candidate(), SERVING, RESIDENTS, {HOST_DEVICE: memory}, rules=RULES)
    assert cold.verdict is Verdict.COLD
    assert cold.reasons[-1].endswith(f"no push unloads; {HELD}")


def test_holders_are_not_named_where_the_limit_for_weights_is_what_is_missing() -> None:
    memory = DeviceMemory(free_bytes=1 << 30, limit_bytes=KIB, holders=HELD)
    refused = plan_push(candidate(), None, Residents.of({}), {HOST_DEVICE: memory}, rules=RULES)
    assert refused.verdict is Verdict.REFUSE
    assert HELD not in " ".join(refused.reasons)
