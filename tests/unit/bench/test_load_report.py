"""The loading benchmark's figures: which limit holds, which setting counts, what is shown and what not."""

from __future__ import annotations

from typing import Any

import pytest

from tests.bench.load_cache import Residency, is_proven_cold
from tests.bench.load_report import CACHED, COLD, OURS, TMPFS, Verification, limits, rows, targets, text
from tests.bench.load_schedule import LIMITS, Step, schedule

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
            limit("direct read", 1.2, COLD),
            limit("direct read", 1.0, COLD),
        ],
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


def test_the_median_of_a_settings_loads_counts_and_the_best_setting() -> None:
    slow = load("other", TMPFS, 1)
    drifting = load("other", TMPFS, 1) | {"seconds": [1.0, 0.5, 9.0]}
    (row,) = rows(report(slow, drifting))
    assert row.gb_s == pytest.approx(10)


def test_a_fast_setting_with_wrong_bytes_does_not_beat_a_right_one() -> None:
    wrong = load("other", TMPFS, 49, is_right=False, wrong="w differs")
    (row,) = rows(report(wrong, load("other", TMPFS, 3)))
    assert row.is_right
    assert row.gb_s == pytest.approx(3)
    (row,) = rows(report(wrong))
    assert row.remark == "WRONG BYTES: w differs"


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
    assert is_proven_cold(everything, nothing)
    assert not is_proven_cold(everything, everything), "nothing was dropped"
    assert not is_proven_cold(nothing, nothing), "it always says that nothing is cached"
    assert not is_proven_cold(everything, Residency(2, 100))


def test_what_must_be_shown_is_measured_before_the_others_at_the_slower_places() -> None:
    steps = list(schedule([CACHED, COLD, TMPFS], ["a", "b"], ["b"]))
    assert steps == [
        Step(TMPFS, LIMITS),
        Step(TMPFS, OURS),
        Step(TMPFS, "a"),
        Step(CACHED, LIMITS),
        Step(CACHED, OURS),
        Step(COLD, LIMITS),
        Step(COLD, OURS),
        Step(COLD, LIMITS),
        Step(CACHED, "a"),
        Step(COLD, "a"),
    ]
    assert {step.place for step in schedule([COLD], ["a"], [OURS])} == {COLD}
