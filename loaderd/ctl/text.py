"""Text from outside made safe for a terminal, and sizes and times as people read them."""

from __future__ import annotations

from datetime import UTC, datetime

from shared.ids import is_digest

_KIB = 1 << 10
_MIB = 1 << 20
_GIB = 1 << 30
_TIB = 1 << 40


def printable(text: str) -> str:
    """`text` on one line with every control, format and unassigned character spelled as an escape.

    Covers ESC sequences, C1 controls, bidirectional overrides and lone surrogates.
    """
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape", "surrogatepass").decode("ascii")
        for char in text
    )


def printable_lines(text: str) -> list[str]:
    """`text` split at its line ends, each line printable; for messages that tell a story."""
    return [printable(line) for line in text.split("\n")]


def size(nbytes: int) -> str:
    """Binary size with one decimal, as `12.3 MiB`; whole bytes below one KiB."""
    if nbytes < _KIB:
        return f"{nbytes} B"
    for unit, name in ((_TIB, "TiB"), (_GIB, "GiB"), (_MIB, "MiB")):
        # Rounds up into the next unit at the point where one decimal would show 1024.0.
        if nbytes >= unit - unit // 20480:
            return f"{nbytes / unit:.1f} {name}"
    return f"{nbytes / _KIB:.1f} KiB"


def rate(nbytes: int, seconds: float) -> str:
    """Throughput, as `1.2 GiB/s`; empty where there is nothing to divide."""
    return f"{size(round(nbytes / seconds))}/s" if nbytes and seconds > 0 else ""


def duration(seconds: float) -> str:
    """Time a step took, as `0.4 ms`, `340 ms` or `12.3 s`."""
    if seconds >= 0.9995:
        return f"{seconds:.1f} s"
    if seconds >= 0.00995:
        return f"{seconds * 1e3:.0f} ms"
    return f"{seconds * 1e3:.1f} ms"


def microseconds(nanoseconds: int) -> str:
    """Time of a flip, as `12.3 µs`."""
    return f"{nanoseconds / 1e3:.1f} µs"


def age(seconds: float) -> str:
    """How long something has been so, as `45s`, `12m03s`, `3h07m` or `12d04h`."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def moment(time_ns: int) -> str:
    """Wall-clock time of an entry in the local zone, to the millisecond; the raw number if the
    calendar has no such time."""
    try:
        instant = datetime.fromtimestamp(time_ns / 1e9, tz=UTC).astimezone()
    except (OverflowError, ValueError, OSError):
        return f"{time_ns} ns"
    return instant.isoformat(sep=" ", timespec="milliseconds")


def fact(value: str | int | float) -> str:
    """A fact of an event or a journal entry: digests and fractions as short as tables show them."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, str) and is_digest(value):
        return short_digest(value)
    return str(value)


def short_digest(digest: str) -> str:
    """The first twelve hex digits, as tables show a digest; `--json` has all of it."""
    return digest.removeprefix("sha256:")[:12]
