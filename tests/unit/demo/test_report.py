from __future__ import annotations

import json
from dataclasses import replace

import pytest

from demo.evidence import Answer
from demo.latency import Window
from demo.report import DemoRun, Probes, StepKind, build_report, expectations, judge_all, session_strays
from tests.unit.demo.recorded import REFERENCES, V1, V2, answer, operation, run, step

KEYS = {
    "model",
    "requests_total",
    "requests_failed",
    "requests_mixed_version",
    "swaps",
    "rollbacks",
    "refused",
    "flip_us",
    "rollback_us",
    "load_s",
    "itl_ms_quiet",
    "itl_ms_push",
    "peak_weight_bytes",
    "versions",
}


def unmet(recorded: DemoRun) -> list[str]:
    return [e.text for e in expectations(recorded, judge_all(recorded)) if not e.is_met]


def test_a_run_without_fault_passes_and_its_report_has_every_key() -> None:
    assert unmet(run()) == []
    report = build_report(run())
    assert report["passed"] is True
    assert report.keys() >= KEYS
    json.dumps(report, allow_nan=False)


def test_numbers_come_from_the_steps_and_answers() -> None:
    back = step(
        "v1",
        kind=StepKind.ROLLBACK,
        operation=operation("v1", kind="rollback", flip_ns=(3_000,), bytes_read=0, ended_ns=5_000_001),
        window=Window(60_000_000, 70_000_000),
    )
    refused = step(kind=StepKind.BROKEN, exit_code=5, expected_exit=5, operation=None)
    report = build_report(run(steps=(*run().steps, back, refused)))
    assert (report["swaps"], report["rollbacks"], report["refused"]) == (2, 1, 1)
    assert report["flip_us"] == {"count": 2, "p50": 2.0, "p99": 2.0, "max": 2.0, "samples": [2.0, 2.0]}
    assert report["rollback_us"] == {"count": 1, "p50": 3.0, "p99": 3.0, "max": 3.0, "samples": [3.0]}
    assert report["rollback_operation_ms"] == {
        "count": 1,
        "p50": 5.0,
        "p99": 5.0,
        "max": 5.0,
        "samples": [5.0],
    }
    assert report["load_s"] == {"count": 2, "p50": 0.5, "p99": 0.5, "max": 0.5, "samples": [0.5, 0.5]}
    assert report["versions"] == [{"tag": V1, "requests": 1}, {"tag": V2, "requests": 1}]


def test_nothing_measured_is_null_and_not_zero() -> None:
    report = build_report(run(answers=()))
    assert report["itl_ms_quiet"] is None
    assert report["itl_ms_push"] is None
    assert report["rollback_us"] is None


MIXED: list[Answer] = [
    answer(fingerprints=(V1, V2)),
    answer(text=REFERENCES[V2]["sun"]),
    answer(text=REFERENCES[V1]["sun"][:5] + REFERENCES[V2]["sun"][5:]),
]


@pytest.mark.parametrize("planted", MIXED, ids=["by label", "by content", "spliced"])
def test_one_planted_mixed_answer_among_many_fails_the_run(planted: Answer) -> None:
    recorded = run(answers=(*run().answers * 20, planted))
    report = build_report(recorded)
    assert report["requests_mixed_version"] == 1
    assert report["passed"] is False
    assert unmet(recorded) == ["no request was answered by more than one version"]


def test_one_failed_request_fails_the_run() -> None:
    recorded = run(answers=(*run().answers, answer(error="APITimeoutError: late")))
    assert build_report(recorded)["requests_failed"] == 1
    assert unmet(recorded) == ["no request failed"]


def test_a_wrong_exit_code_a_missing_word_or_a_wrong_version_each_fail_the_run() -> None:
    good = step(
        kind=StepKind.BROKEN,
        exit_code=3,
        expected_exit=3,
        expected_words=("a.safetensors",),
        output="error in A.safetensors",
    )
    assert unmet(run(steps=(*run().steps, good))) == []
    for bad in (
        replace(good, exit_code=0),
        replace(good, output="error"),
        replace(good, active=V1),
        replace(good, active=""),
    ):
        found = [e for e in expectations(*_judged(run(steps=(*run().steps, bad)))) if not e.is_met]
        assert len(found) == 1
        assert f"exit code {bad.exit_code}" in found[0].detail


def _judged(recorded: DemoRun) -> tuple[DemoRun, tuple[tuple[Answer, object], ...]]:
    return recorded, judge_all(recorded)


def test_a_command_without_traffic_proves_nothing() -> None:
    late = step(window=Window(10**12, 10**12 + 1))
    assert unmet(run(steps=(step("v1", has_traffic=False), late))) == [
        "requests were in flight during every command"
    ]


def test_a_version_that_answered_nothing_fails_the_run() -> None:
    assert unmet(run(answers=(answer(),))) == ["every committed version answered requests"]


def test_versions_that_say_the_same_prove_nothing() -> None:
    same = {V1: {"france": "Paris."}, V2: {"france": "Paris."}}
    answers = tuple(answer(header=t, fingerprints=(t,), prompt="france", text="Paris.") for t in (V1, V2))
    assert unmet(run(references=same, answers=answers)) == ["most prompts tell the versions apart"]


def test_a_daemon_that_ended_badly_or_was_never_ended_fails_the_run() -> None:
    text = "both daemons ended with exit code 0 on SIGTERM"
    assert unmet(run(exit_codes={"inferd": -9, "loaderd": 0})) == [text]
    assert unmet(run(exit_codes={})) == [text]
    assert unmet(run(exit_codes={}, were_kept=True)) == []


@pytest.mark.parametrize("probes", [None, Probes(200, 200, 200, 200), Probes(200, 503, 200, 503)])
def test_wrong_health_fails_the_run(probes: Probes | None) -> None:
    assert unmet(run(probes=probes)) == [
        "inferd was live but not ready before the first push, and ready after it"
    ]


def test_a_session_may_move_only_once_its_version_is_gone() -> None:
    first = answer(session="s", started_ns=0, ended_ns=10)
    second = replace(first, header=V2, started_ns=20, ended_ns=30)
    sweep = step(kind=StepKind.BROKEN, window=Window(25, 40))
    assert session_strays(run(answers=(first, second))) == (f"s moved from {V1} to {V2}",)
    assert session_strays(run(answers=(first, second), steps=(sweep,))) == ()
    early = replace(second, ended_ns=24)
    assert len(session_strays(run(answers=(first, early), steps=(sweep,)))) == 1
