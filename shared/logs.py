"""Structured logs on stderr: pretty on a terminal, JSON lines elsewhere.

Under journald each line starts with its syslog priority (`<3>` for an error), which journald takes
off, so that `journalctl -p err` works.  Nothing that came from outside reaches a terminal or a line
based reader raw: control characters are escaped and long values are cut.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Mapping, MutableMapping
from enum import StrEnum
from typing import Any, TextIO

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from shared.errors import ConfigError

LEVELS: Mapping[str, int] = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}

VALUE_CHARACTERS = 8192
"""Longest text of one field; journald splits lines at 48 KiB."""

_SYSLOG_PRIORITY = {"debug": 7, "info": 6, "warning": 4, "error": 3, "critical": 2, "exception": 3}

_LEADING = ("timestamp", "level", "logger", "event")

# C0, DEL and C1 controls, line and paragraph separators, and the marks that reorder text.
_CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069]")
_CONTROLS_BUT_LINES = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069]"
)


class LogStyle(StrEnum):
    """How a log line is written."""

    TERMINAL = "terminal"
    JSON = "json"
    JOURNAL = "journal"


def escape_controls(text: str) -> str:
    r"""`text` with control and text-reordering characters as `\n`, `\x1b` or `\u202e`."""
    return _CONTROLS.sub(_escaped, text)


def _escaped(match: re.Match[str]) -> str:
    return match.group().encode("unicode_escape").decode("ascii")


def choose_style(stream: TextIO, environ: Mapping[str, str]) -> LogStyle:
    """The style for `stream`: journald's if it is the journal socket that JOURNAL_STREAM names."""
    if stream.isatty():
        return LogStyle.TERMINAL
    device, _, inode = environ.get("JOURNAL_STREAM", "").partition(":")
    try:
        stat = os.fstat(stream.fileno())
    except OSError:  # a stream without a file
        return LogStyle.JSON
    is_journal = (device, inode) == (str(stat.st_dev), str(stat.st_ino))
    return LogStyle.JOURNAL if is_journal else LogStyle.JSON


def configure_logs(
    level: str = "info", *, stream: TextIO | None = None, style: LogStyle | None = None
) -> None:
    """Send everything that structlog and the standard library's logging say to `stream` (stderr).

    May be called again, for instance once the configuration is known; loggers that exist follow.
    Raises ConfigError for an unknown level.
    """
    if level not in LEVELS:
        raise ConfigError(f"log level {level!r} is none of {', '.join(LEVELS)}", level=level)
    out = sys.stderr if stream is None else stream
    chosen = choose_style(out, os.environ) if style is None else style
    origin: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *origin,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
    )
    handler = logging.StreamHandler(out)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.format_exc_info,
                _make_harmless,
                *_renderers(chosen),
            ],
            foreign_pre_chain=[structlog.stdlib.PositionalArgumentsFormatter(), *origin],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(LEVELS[level])
    logging.captureWarnings(True)
    route_library_logs()


def route_library_logs() -> None:
    """Take the handlers off all loggers but the root, so that every line takes the one path.

    Call it again after importing a library that installs handlers of its own (transformers does).
    """
    for logger in tuple(logging.Logger.manager.loggerDict.values()):
        if isinstance(logger, logging.Logger):
            logger.handlers[:] = []
            logger.propagate = True


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """A logger with this name; what it says before `configure_logs` is written by structlog's default."""
    logger: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(name)
    return logger


def _renderers(style: LogStyle) -> list[Processor]:
    match style:
        case LogStyle.TERMINAL:
            colours = "NO_COLOR" not in os.environ
            plain = structlog.dev.plain_traceback
            return [structlog.dev.ConsoleRenderer(colors=colours, exception_formatter=plain)]
        case LogStyle.JSON:
            return [structlog.processors.JSONRenderer(default=_shown)]
        case LogStyle.JOURNAL:
            return [_JournalRenderer()]


class _JournalRenderer:
    """A JSON line after the priority that journald reads off its head."""

    def __init__(self) -> None:
        self._json = structlog.processors.JSONRenderer(default=_shown)

    def __call__(self, logger: WrappedLogger, method: str, event: EventDict) -> str:
        priority = _SYSLOG_PRIORITY.get(str(event.get("level", method)), 6)
        line = self._json(logger, method, event)
        text = line if isinstance(line, str) else line.decode()
        return f"<{priority}>{text}"


def _shown(value: object) -> str:
    return escape_controls(_cut(repr(value)))


def _cut(text: str) -> str:
    if len(text) <= VALUE_CHARACTERS:
        return text
    return f"{text[:VALUE_CHARACTERS]}… ({len(text)} characters)"


def _make_harmless(_logger: WrappedLogger, _method: str, event: MutableMapping[str, Any]) -> EventDict:
    harmless: EventDict = {key: "" for key in _LEADING if key in event}  # what every line has comes first
    for key, value in event.items():
        if key in ("exception", "stack") and isinstance(value, str):
            # A traceback keeps its lines; the end is what says what happened.
            harmless[key] = _CONTROLS_BUT_LINES.sub(_escaped, value[-4 * VALUE_CHARACTERS :])
        else:
            harmless[escape_controls(str(key))] = _harmless_value(value)
    return harmless


def _harmless_value(value: object) -> object:
    if isinstance(value, str):
        return escape_controls(_cut(value))
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {escape_controls(str(key)): _harmless_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_harmless_value(item) for item in value]
    return _shown(value)
