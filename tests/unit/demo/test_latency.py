from __future__ import annotations

from demo.latency import Window, in_flight_during, split_gaps, summarize
from tests.unit.demo.recorded import answer


def test_percentiles_are_samples_by_nearest_rank() -> None:
    summary = summarize(float(n) for n in range(1, 201))
    assert summary is not None
    assert (summary.count, summary.p50, summary.p99, summary.max) == (200, 100.0, 198.0, 200.0)


def test_one_sample_is_every_percentile() -> None:
    summary = summarize([7.0])
    assert summary is not None
    assert (summary.p50, summary.p99, summary.max) == (7.0, 7.0, 7.0)


def test_no_samples_have_no_summary() -> None:
    assert summarize([]) is None


def test_a_gap_that_touches_a_window_is_busy() -> None:
    seen = answer(chunk_ns=(0, 10_000_000, 30_000_000, 31_000_000))
    gaps = split_gaps([seen], [Window(12_000_000, 13_000_000)])
    assert gaps.quiet_ms == (10.0, 1.0)
    assert gaps.busy_ms == (20.0,)


def test_gaps_are_never_counted_between_two_answers() -> None:
    gaps = split_gaps([answer(chunk_ns=(0,)), answer(chunk_ns=(5_000_000,))], [])
    assert gaps.quiet_ms == ()
    assert gaps.busy_ms == ()


def test_in_flight_counts_answers_that_overlap_the_window() -> None:
    answers = [answer(started_ns=0, ended_ns=9), answer(started_ns=8, ended_ns=20), answer(started_ns=30)]
    assert in_flight_during(answers, Window(9, 10)) == 2
    assert in_flight_during(answers, Window(21, 29)) == 0
