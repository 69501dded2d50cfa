"""The loading benchmark's figures: which limit holds, which setting counts, what is shown and what not."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest

from tests.bench.load_cache import Residency, is_proven_cold
from tests.bench.load_report import (
    CACHED,
    COLD,
    NOT_COMPARED,
    OURS,
    TMPFS,
    Verification,
    best_direct_shape,
    join,
    limits,
    of_direct,
    rows,
    targets,
    text,
)
from tests.bench.load_schedule import COLD_SETS, LIMITS, Step, cold_loads, samples, schedule

GB = 1_000_000_000


def limit(what: str, gb_s: float, place: str, **shape: int) -> dict[str, Any]:
    return {"what": what, "bytes": GB, "seconds": [1 / gb_s], "place": place, "shape": shape}


def load(loader: str, place: str, gb_s: float, verification: str = "none", **more: Any) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "loader": loader,
        "place": place,
        "verification": verification,
        "bytes": 10 * GB,
        "seconds": [10 / gb_s],
        "parts": [{}],
        "is_right": True,
        "wrong": "",
        "is_cold": place == COLD,
    }
    return entry | more


def report(*loads: dict[str, Any]) -> dict[str, Any]:
    return {
        "device": "cuda",
        "model": {"bytes": 10 * GB},
        "limits": [
            limit("pinned copy", 50, TMPFS),
            limit("pinned copy", 50, CACHED),
            limit("parallel pread", 40, TMPFS, slot_bytes=1 << 19),
            limit("parallel pread", 20, TMPFS, slot_bytes=1 << 20),
            limit("parallel pread", 30, CACHED),
            limit("direct read", 1.0, COLD, threads=4, slot_bytes=1 << 20),
            limit("direct read", 1.4, COLD, threads=4, slot_bytes=1 << 20),
            limit("direct read", 1.2, COLD, threads=4, slot_bytes=1 << 20),
        ],
        "tried": [],
        "loads": list(loads),
        "failures": [{"loader": "other", "place": TMPFS, "reason": "ended with -11: it said nothing"}],
        "skipped": [],
    }


def test_of_several_shapes_of_a_limit_the_fastest_counts_and_of_several_limits_the_lowest() -> None:
    measured = report(load(OURS, TMPFS, 20))
    assert limits(measured, TMPFS) == pytest.approx({"pinned copy": 50, "parallel pread": 40})
    assert limits(measured, COLD) == pytest.approx({"direct read": 1.2}), "copies do not bound a disk"
    (row,) = rows(measured)
    assert row.of_limit == pytest.approx(0.5)


def drifting(rates: list[float], beside: list[tuple[float, float]], **more: Any) -> dict[str, Any]:
    """Loads from the cold disk with what direct reads gave before and after each."""
    entry = load(OURS, COLD, 1, "digest") | more
    return entry | {"seconds": [10 / gb_s for gb_s in rates], "beside": beside}


def test_a_cold_load_is_related_to_the_direct_reads_right_before_and_after_it() -> None:
    entry = drifting([0.9, 1.8, 1.6], [(0.8, 1.2), (1.9, 2.1), (2.1, 1.9)])
    assert of_direct(entry) == pytest.approx((0.9, 0.9, 0.8))
    (row,) = rows(report(entry))
    assert row.of_limit == pytest.approx(0.9), "the median of the ratios, not a ratio of medians"
    assert "of limit 90%, 90%, 80%" in row.remark
    (target,) = targets(report(drifting([0.99], [(0.8, 1.2)])))
    assert target.is_met
    assert target.found == pytest.approx(0.99)
    assert target.text == "cold disk, digest: at least 97% of direct read before and after, median of 1"


def test_what_a_disk_drifts_between_loads_is_no_cost_of_verification() -> None:
    plain = drifting([2.0], [(2.0, 2.0)], verification="none")
    (verified,) = (row for row in rows(report(plain, drifting([0.9], [(1.0, 1.0)]))) if row.of_unverified)
    assert verified.of_unverified == pytest.approx(0.9)


def test_the_best_shape_is_that_with_the_best_rate_of_all_its_reads() -> None:
    once_fast = limit("direct read", 5, COLD, threads=4) | {"seconds": [0.2, 2.0]}
    steady = limit("direct read", 1, COLD, threads=16) | {"seconds": [0.9, 0.9]}
    assert best_direct_shape({"tried": [once_fast, steady]}) == {"threads": 16}
    assert best_direct_shape({"tried": []}) is None


def whole(*loads: dict[str, Any], **more: Any) -> dict[str, Any]:
    found = report(*loads) | {
        "machine": {"cpu": "a CPU", "cores": 16, "memory_bytes": 1000},
        "versions": {"torch": "2"},
        "command": "load run",
        "date": "2026-11-30",
    }
    return found | more


def test_runs_of_parts_are_joined_into_one_table() -> None:
    first = whole(
        load(OURS, TMPFS, 40, setting={"verify": "none"}, seconds=[1.0, 3.0]),
        skipped=[{"loader": "other", "place": COLD, "reason": "no time left"}],
    )
    again = load(
        OURS, TMPFS, 40, setting={"verify": "none"}, seconds=[2.0], is_right=False, wrong="w differs"
    )
    cold = load("other", COLD, 1, setting={})
    second = whole(again, cold, machine=first["machine"] | {"memory_bytes": 1001}, versions={"other": "1"})
    joined = join([first, second])
    assert [entry["seconds"] for entry in joined["loads"]] == [[1.0, 3.0, 2.0], [10.0]]
    assert rows(joined)[0].remark == "WRONG BYTES: w differs"
    assert joined["skipped"] == [], "the second run measured it"
    assert joined["versions"] == {"torch": "2", "other": "1"}
    assert len(first["loads"][0]["seconds"]) == 2, "the runs' own reports stay as they are"
    assert join([first]) == first


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ({"machine": {"cpu": "another", "cores": 16, "memory_bytes": 1000}}, "machine differs"),
        ({"model": {"bytes": 1}}, "model differs"),
        ({"cold_model": {"bytes": 1}}, "cold_model differs"),
        ({"versions": {"torch": "3"}}, "torch differs: 2 and 3"),
    ],
)
def test_runs_that_are_not_alike_are_not_joined(other: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        join([whole(), whole(**other)])


def test_the_median_of_a_settings_loads_counts_and_the_best_setting() -> None:
    slow = load("other", TMPFS, 1)
    uneven = load("other", TMPFS, 1) | {"seconds": [1.0, 0.5, 9.0]}
    (row,) = rows(report(slow, uneven))
    assert row.gb_s == pytest.approx(10)


def test_a_fast_setting_with_wrong_bytes_does_not_beat_a_right_one() -> None:
    wrong = load("other", TMPFS, 49, is_right=False, wrong="w differs")
    (row,) = rows(report(wrong, load("other", TMPFS, 3)))
    assert row.is_right
    assert row.gb_s == pytest.approx(3)
    (row,) = rows(report(wrong))
    assert row.remark == "WRONG BYTES: w differs"


def test_bytes_that_nobody_compared_are_not_called_wrong() -> None:
    unknown = load("other", TMPFS, 49, is_right=False, wrong=NOT_COMPARED)
    (row,) = rows(report(unknown))
    assert (row.is_right, row.remark) == (False, "bytes not compared")
    wrong = unknown | {"setting": {}, "wrong": "w differs"}
    runs = [whole(wrong), whole(unknown | {"setting": {}}), whole(load("other", TMPFS, 49, setting={}))]
    for order in permutations(runs):
        assert rows(join(order))[0].remark == "WRONG BYTES: w differs"
    assert rows(join(runs[1:]))[0].remark == "bytes not compared"


def test_verified_loads_are_related_to_the_same_loaders_unverified_one() -> None:
    table = rows(
        report(load(OURS, TMPFS, 40), load(OURS, TMPFS, 39, "digest"), load("other", TMPFS, 10, "sealed"))
    )
    assert [row.of_unverified for row in table] == [None, pytest.approx(0.975), None]


def test_ours_comes_first_then_the_fastest_and_places_are_in_order() -> None:
    table = rows(
        report(load("a", COLD, 1), load("a", TMPFS, 5), load("b", TMPFS, 9), load(OURS, TMPFS, 2, "digest"))
    )
    assert [(row.place, row.loader) for row in table] == [
        (TMPFS, OURS),
        (TMPFS, "b"),
        (TMPFS, "a"),
        (COLD, "a"),
    ]
    assert table[0].verification is Verification.DIGEST


def test_targets_are_met_missed_or_not_shown() -> None:
    measured = report(
        load(OURS, TMPFS, 39),
        load(OURS, TMPFS, 38.5, "digest"),
        load(OURS, CACHED, 26, "digest", parts=[{"open_s": 0.05, "load_s": 10 / 28.5}]),
        load(OURS, COLD, 1.19, "digest"),
        load("other", TMPFS, 38),
    )
    found = {target.text: target.is_met for target in targets(measured)}
    assert found == {
        "tmpfs, digest: at least 95% of pinned copy or parallel pread": True,
        "page cache, digest: at least 90% of parallel pread (the load alone: 0.950)": False,
        "cold disk, digest: at least 97% of direct read": True,
        "tmpfs, digest: within 3% of unverified": True,
        "tmpfs, digest: ahead of other": True,
    }


def test_a_load_that_may_have_come_from_memory_shows_nothing_of_the_disk() -> None:
    measured = report(load(OURS, COLD, 5, "digest", is_cold=False))
    assert [target.is_met for target in targets(measured)] == [None]
    assert rows(measured)[0].remark == "not proven cold"


def test_wrong_bytes_show_nothing() -> None:
    measured = report(load(OURS, CACHED, 30, "digest", is_right=False, wrong="w differs"))
    assert [target.is_met for target in targets(measured)] == [None]


def test_a_faster_loader_with_wrong_bytes_is_not_ahead() -> None:
    measured = report(load(OURS, TMPFS, 39, "digest"), load("other", TMPFS, 45, is_right=False, wrong="w"))
    assert not any("ahead" in target.text for target in targets(measured))


def test_the_table_says_everything_a_reader_must_know() -> None:
    part = load("other", TMPFS, 3, bytes=4 * GB, seconds=[4 / 3])
    said = text(report(load(OURS, TMPFS, 40), load(OURS, TMPFS, 30, "sealed"), part))
    assert said.splitlines()[0] == (
        "tmpfs: parallel pread 40.00 GB/s (512 KiB 40.00, 1024 KiB 20.00), pinned copy 50.00 GB/s"
    )
    assert "changeover  sealed    30.00     75.0%          75.0%" in said
    assert "4.0 GB" in said
    assert "failed: other, tmpfs: ended with -11: it said nothing" in said
    assert "NO         0.750  tmpfs, sealed: at least 95% of pinned copy or parallel pread" in said


def test_cold_is_proven_only_by_a_kernel_that_tells_what_is_cached() -> None:
    everything, nothing = Residency(100, 100), Residency(0, 100)
    assert is_proven_cold([everything], [nothing])
    assert not is_proven_cold([everything], [everything]), "nothing was dropped"
    assert not is_proven_cold([nothing], [nothing]), "it always says that nothing is cached"
    assert not is_proven_cold([], [nothing])
    assert not is_proven_cold([everything, nothing], [nothing])
    assert not is_proven_cold([everything], [nothing, Residency(2, 100)])


def test_one_process_measures_a_loader_everywhere_the_limits_and_ours_first() -> None:
    def needs_nothing(place: str) -> dict[str, str]:
        return {}

    def reads_from_memory(place: str) -> dict[str, str]:
        return {"DIRECT": "0"} if place == CACHED else {}

    peers = {"a": reads_from_memory, "b": needs_nothing, "c": needs_nothing}
    assert list(schedule([CACHED, COLD, TMPFS], peers, ["b"])) == [
        Step(LIMITS, (TMPFS, CACHED, COLD)),
        Step(OURS, (TMPFS, CACHED, COLD)),
        Step("a", (TMPFS, COLD)),
        Step("a", (CACHED,)),
        Step("c", (TMPFS, CACHED, COLD)),
    ]
    assert list(schedule([COLD], {}, [OURS])) == [Step(LIMITS, (COLD,))]


@pytest.mark.parametrize(("first_s", "count"), [(0.0, 5), (0.4, 5), (2.7, 3), (3.7, 2), (60.0, 1)])
def test_slow_loads_are_repeated_less(first_s: float, count: int) -> None:
    assert samples(5, first_s) == count


@pytest.mark.parametrize("first", range(COLD_SETS))
def test_cold_reads_treat_all_sets_of_files_alike(first: int) -> None:
    loads = cold_loads(2, 5, first)
    assert [load.setting for load in loads] == [0, 1] * 5
    assert [load.is_last for load in loads] == [False] * 8 + [True] * 2
    order = [first, *(files for load in loads for files in (load.files, load.direct_files))]
    assert order == [(first + number) % COLD_SETS for number in range(21)], "the longest ago of all"
    for setting in range(2):
        assert {load.files for load in loads if load.setting == setting} == set(range(COLD_SETS))
    assert {first, *(load.direct_files for load in loads)} == set(range(COLD_SETS))
