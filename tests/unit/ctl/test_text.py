"""Sizes, times and printable text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loaderd.ctl.text import age, duration, fact, microseconds, moment, printable, printable_lines, rate, size


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1 << 20, "1.0 MiB"),
        ((1 << 20) - 1, "1.0 MiB"),
        ((1 << 30) - 1, "1.0 GiB"),
        (1536 << 20, "1.5 GiB"),
        (3 << 40, "3.0 TiB"),
    ],
)
def test_size(nbytes: int, text: str) -> None:
    assert size(nbytes) == text


@given(st.integers(0, 1 << 62))
def test_a_size_never_shows_1024_of_a_unit(nbytes: int) -> None:
    number, unit = size(nbytes).split()
    assert unit == "TiB" or float(number) < 1024


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0.0 ms"),
        (0.00042, "0.4 ms"),
        (0.0099, "9.9 ms"),
        (0.0123, "12 ms"),
        (0.9999, "1.0 s"),
        (83.25, "83.2 s"),
    ],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (59.9, "59s"), (723, "12m03s"), (11_220, "3h07m"), (1_051_200, "12d04h")],
)
def test_age(seconds: float, text: str) -> None:
    assert age(seconds) == text


def test_rate_and_microseconds() -> None:
    assert rate(3 << 30, 1.5) == "2.0 GiB/s"
    assert rate(3 << 30, 0.0) == ""
    assert microseconds(18_449) == "18.4 µs"


def test_a_moment_outside_of_the_calendar_is_a_number() -> None:
    assert moment((1 << 63) - 1).startswith("2262-")
    assert moment(1 << 200) == f"{1 << 200} ns"


@given(st.text(st.characters(codec=None)))
def test_printable_text_is_printable_and_printable_text_stays(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable()
    assert printable(shown) == shown
    if text.isprintable():
        assert shown == text


def test_a_story_keeps_its_lines() -> None:
    assert printable_lines("a\n  b\x1b") == ["a", r"  b\x1b"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (7, "7"),
        (0.03887044499970216, "0.03887"),
        ("sha256:" + "ab" * 32, "abababababab"),
        ("sha256:x", "sha256:x"),
    ],
)
def test_facts_are_short(value: str | int | float, text: str) -> None:
    assert fact(value) == text
