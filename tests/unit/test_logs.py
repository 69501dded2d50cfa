"""Where log lines go, what they look like and what cannot get through them."""

from __future__ import annotations

import io
import json
import logging
import os
import socket
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from shared.errors import ConfigError
from shared.logs import (
    VALUE_CHARACTERS,
    LogStyle,
    choose_style,
    configure_logs,
    escape_controls,
    get_logger,
    route_library_logs,
)


@pytest.fixture(autouse=True)
def _restored_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    logging.captureWarnings(False)
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


@pytest.fixture
def out() -> io.StringIO:
    return io.StringIO()


def _lines(out: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.getvalue().splitlines()]


def test_a_json_line_starts_with_what_every_line_has(out: io.StringIO) -> None:
    configure_logs(stream=out)
    get_logger("loaderd.push").info("loaded", nbytes=12, version="v1")
    (line,) = _lines(out)
    assert list(line) == ["timestamp", "level", "logger", "event", "nbytes", "version"]
    assert (line["level"], line["logger"], line["event"]) == ("info", "loaderd.push", "loaded")
    assert line["nbytes"] == 12


@pytest.mark.parametrize("style", [LogStyle.JSON, LogStyle.JOURNAL])
def test_hostile_text_stays_one_line_of_data(out: io.StringIO, style: LogStyle) -> None:
    hostile = "x\n<0>{}\x1b[2J\x9b\u2028\u202e"
    configure_logs(stream=out, style=style)
    get_logger("t").warning(hostile, **{"k\ney": {"in\ner": [hostile]}}, odd=object)
    text = out.getvalue()
    assert text.count("\n") == 1
    assert text.isascii()
    line = json.loads(text.removeprefix("<4>"))
    escaped = r"x\n<0>{}\x1b[2J\x9b\u2028\u202e"
    assert line["event"] == escaped
    assert line["k\\ney"] == {"in\\ner": [escaped]}
    assert line["odd"] == "<class 'object'>"


def test_hostile_text_does_not_reach_a_terminal(out: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    configure_logs(stream=out, style=LogStyle.TERMINAL)
    hostile = "\x1b]0;owned\x07\r\x9b2J"
    try:
        raise ValueError(hostile)
    except ValueError:
        get_logger("t").exception("failed" + hostile, name=hostile)
    logging.getLogger("uvicorn.error").error("request %s", hostile)
    text = out.getvalue()
    assert not set(text) & {"\x1b", "\x07", "\r", "\x9b"}
    assert text.count(r"\x1b]0;owned\x07\r\x9b2J") == 4
    assert "Traceback (most recent call last):\n" in text


def test_a_terminal_gets_colours_unless_it_asks_for_none(
    out: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    configure_logs(stream=out, style=LogStyle.TERMINAL)
    get_logger("t").info("hello")
    assert "\x1b[" in out.getvalue()
    assert "hello" in out.getvalue()


def test_a_traceback_is_part_of_the_line(out: io.StringIO) -> None:
    configure_logs(stream=out)
    try:
        raise ValueError("boom")
    except ValueError:
        get_logger("t").exception("failed")
    (line,) = _lines(out)
    assert "Traceback" in line["exception"]
    assert line["exception"].endswith("ValueError: boom")


@pytest.mark.parametrize(("method", "priority"), [("info", 6), ("warning", 4), ("error", 3), ("critical", 2)])
def test_journald_is_told_the_priority(out: io.StringIO, method: str, priority: int) -> None:
    configure_logs(stream=out, style=LogStyle.JOURNAL)
    getattr(get_logger("t"), method)("said")
    getattr(logging.getLogger("library"), method)("said")
    for line in out.getvalue().splitlines():
        assert line.startswith(f"<{priority}>{{")
    assert out.getvalue().count("\n") == 2


def test_library_loggers_take_the_same_path(out: io.StringIO) -> None:
    library = logging.getLogger(f"{__name__}.early")
    elsewhere = io.StringIO()
    library.addHandler(logging.StreamHandler(elsewhere))
    library.propagate = False
    configure_logs(stream=out)
    library.warning("%d weights", 3)
    late = logging.getLogger(f"{__name__}.late")
    late.addHandler(logging.StreamHandler(elsewhere))
    late.propagate = False
    route_library_logs()
    late.warning("late")
    assert [(line["logger"], line["event"]) for line in _lines(out)] == [
        (f"{__name__}.early", "3 weights"),
        (f"{__name__}.late", "late"),
    ]
    assert elsewhere.getvalue() == ""


def test_warnings_are_logged(out: io.StringIO) -> None:
    configure_logs(stream=out)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(True)
        warnings.warn("old", DeprecationWarning, stacklevel=1)
    (line,) = _lines(out)
    assert line["logger"] == "py.warnings"
    assert "old" in line["event"]


def test_the_level_holds_for_both_kinds_of_loggers_and_can_change(out: io.StringIO) -> None:
    configure_logs("warning", stream=out)
    ours, library = get_logger("t"), logging.getLogger("library")
    ours.info("no")
    library.info("no")
    ours.warning("ours")
    library.warning("library")
    configure_logs("debug", stream=out)
    ours.debug("ours")
    library.debug("library")
    assert [line["event"] for line in _lines(out)] == ["ours", "library"] * 2


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ConfigError, match="'loud' is none of debug, info, warning, error"):
        configure_logs("loud")


def test_a_long_value_is_cut(out: io.StringIO) -> None:
    configure_logs(stream=out)
    get_logger("t").info("said", prompt="x" * 100_000)
    (line,) = _lines(out)
    assert line["prompt"] == "x" * VALUE_CHARACTERS + "… (100000 characters)"


def test_context_is_part_of_every_line(out: io.StringIO) -> None:
    configure_logs(stream=out)
    with structlog.contextvars.bound_contextvars(operation="op-1"):
        get_logger("t").info("ours")
        logging.getLogger("library").warning("theirs")
    assert [line["operation"] for line in _lines(out)] == ["op-1", "op-1"]


def test_the_style_follows_the_stream() -> None:
    with socket.socket() as journal, os.fdopen(os.dup(journal.fileno()), "wb", 0) as raw:
        stream = io.TextIOWrapper(raw)
        status = os.fstat(journal.fileno())
        is_ours = {"JOURNAL_STREAM": f"{status.st_dev}:{status.st_ino}"}
        assert choose_style(stream, is_ours) is LogStyle.JOURNAL
        # Inherited from a service whose stderr went elsewhere since.
        assert choose_style(stream, {"JOURNAL_STREAM": f"{status.st_dev}:1"}) is LogStyle.JSON
        assert choose_style(stream, {"JOURNAL_STREAM": "garbage"}) is LogStyle.JSON
        assert choose_style(stream, {}) is LogStyle.JSON
    assert choose_style(io.StringIO(), {}) is LogStyle.JSON
    leader, follower = os.openpty()
    with os.fdopen(leader, "wb", 0), os.fdopen(follower, "w") as terminal:
        assert choose_style(terminal, {}) is LogStyle.TERMINAL


def test_escaping_leaves_ordinary_text_alone() -> None:
    text = "café 模型 \\n 'quoted'"
    assert escape_controls(text) == text
