"""When work that is there and does not move is stuck."""

from __future__ import annotations

import pytest

from shared.progress import NS_PER_S, Progress, is_stuck


@pytest.mark.parametrize(
    ("has_work", "age_s", "expected"),
    [(True, 10.1, True), (True, 10.0, False), (True, 0.0, False), (False, 3600.0, False)],
)
def test_stuck_is_work_without_steps(has_work: bool, age_s: float, expected: bool) -> None:
    now_ns = 10**15
    assert is_stuck(has_work, now_ns - round(age_s * NS_PER_S), now_ns, 10.0) is expected


def _observed(*observations: tuple[bool, int, float]) -> Progress:
    progress = Progress(False, 0, 0)
    for has_work, steps, at_s in observations:
        progress = progress.observe(has_work, steps, round(at_s * NS_PER_S))
    return progress


@pytest.mark.parametrize(
    ("observations", "asked_at_s", "expected"),
    [
        # Idle for an hour, then work: the hour does not count.
        (((False, 7, 0), (False, 7, 3600), (True, 7, 3601)), 3602, False),
        (((False, 7, 0), (True, 7, 3601)), 3602, False),  # nobody looked during the idle hour
        (((False, 7, 0), (True, 7, 3601)), 3612, True),
        # Work that moves, however slowly, is not stuck.
        (((True, 0, 0), (True, 1, 8), (True, 2, 16)), 25, False),
        (((True, 0, 0), (True, 1, 8), (True, 1, 16)), 19, True),
        # The first request never made a step.
        (((True, 0, 1), (True, 0, 5)), 12, True),
        # Done, then idle.
        (((True, 0, 0), (True, 1, 8), (False, 1, 9)), 3600, False),
        # One request ended and another began between two looks: the step count has moved.
        (((True, 5, 0), (True, 6, 100)), 101, False),
    ],
)
def test_progress(
    observations: tuple[tuple[bool, int, float], ...], asked_at_s: float, expected: bool
) -> None:
    assert _observed(*observations).is_stuck(round(asked_at_s * NS_PER_S), 10.0) is expected
