"""What a run measured, as rows with ratios, and whether it shows what it must.

Pure: a report is the JSON that `load.py` writes.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

Report = Mapping[str, Any]

OURS = "changeover"

TMPFS = "tmpfs"
CACHED = "page cache"
COLD = "cold disk"
PLACES = (TMPFS, CACHED, COLD)


COPY = "pinned copy"
PLAIN_COPY = "memory copy"
PREAD = "parallel pread"
DIRECT = "direct read"


class Verification(StrEnum):
    """What a load checks of the bytes it brings."""

    NONE = "none"
    DIGEST = "digest"  # CRC32 while reading against CRC32 where resident, SHA-256 where resident
    SEALED = "sealed"  # the same, and against digests that were stored with the files


@dataclass(frozen=True, slots=True)
class Row:
    """A loader at one place, with the best of its settings."""

    place: str
    loader: str
    verification: Verification
    gb_s: float
    of_limit: float | None  # the place's lowest limit is 1
    of_unverified: float | None  # the same loader's load without verification is 1
    alone_gb_s: float | None  # without opening and planning, where the loader tells them apart
    is_right: bool  # every byte was compared with what it must be
    is_cold: bool  # at the cold disk: nothing was cached, and the kernel is known to tell
    remark: str = ""


@dataclass(frozen=True, slots=True)
class Target:
    """What a run must show; None where it did not measure it."""

    text: str
    found: float | None
    is_met: bool | None


def rate(entry: Mapping[str, Any]) -> float:
    """GB/s at the median."""
    seconds: float = statistics.median(entry["seconds"])
    return float(entry["bytes"]) / seconds / 1e9


def limits(report: Report, place: str) -> dict[str, float]:
    """The limits that hold at `place`, in GB/s; of several shapes of one kind the fastest counts."""
    best: dict[str, float] = {}
    for entry in report["limits"]:
        if entry["place"] == place:
            best[entry["what"]] = max(best.get(entry["what"], 0.0), rate(entry))
    return best


def rows(report: Report) -> list[Row]:
    """Places in order, at each place ours first and then the others, fastest first."""
    best: dict[tuple[str, str, Verification], Mapping[str, Any]] = {}
    for entry in report["loads"]:
        key = (entry["place"], entry["loader"], Verification(entry["verification"]))
        if key not in best or _order(entry) > _order(best[key]):
            best[key] = entry
    found = []
    for (place, loader, verification), entry in best.items():
        ceiling = min(limits(report, place).values(), default=None)
        plain = best.get((place, loader, Verification.NONE))
        found.append(
            Row(
                place,
                loader,
                verification,
                rate(entry),
                rate(entry) / ceiling if ceiling else None,
                rate(entry) / rate(plain) if plain and verification is not Verification.NONE else None,
                _alone(entry),
                bool(entry["is_right"]),
                bool(entry["is_cold"]),
                _remark(entry, report),
            )
        )
    return sorted(found, key=lambda row: (PLACES.index(row.place), row.loader != OURS, -row.gb_s))


def _alone(entry: Mapping[str, Any]) -> float | None:
    durations = [part["load_s"] for part in entry["parts"] if "load_s" in part]
    if not durations:
        return None
    seconds: float = statistics.median(durations)
    return float(entry["bytes"]) / seconds / 1e9


def _order(entry: Mapping[str, Any]) -> tuple[bool, float]:
    """A setting that gives right bytes is better than any that does not."""
    return bool(entry["is_right"]), rate(entry)


def _remark(entry: Mapping[str, Any], report: Report) -> str:
    remarks = []
    if not entry["is_right"]:
        remarks.append(f"WRONG BYTES: {entry['wrong']}")
    if entry["place"] == COLD and not entry["is_cold"]:
        remarks.append("not proven cold")
    if entry["bytes"] < 0.99 * report["model"]["bytes"]:
        remarks.append(f"{entry['bytes'] / 1e9:.1f} GB")
    return ", ".join(remarks)


def targets(report: Report) -> list[Target]:
    """The figures that a run on a GPU must show, on all verified loads of ours."""
    by_key = {(row.place, row.loader, row.verification): row for row in rows(report)}

    def ours(place: str) -> list[Row]:
        return [
            row
            for (at, loader, verification), row in by_key.items()
            if at == place and loader == OURS and verification is not Verification.NONE
        ]

    found = []
    for place, share in ((TMPFS, 0.95), (CACHED, 0.90), (COLD, 0.97)):
        known = limits(report, place)
        names = (PREAD,) if place == CACHED else tuple(known)
        ceiling = min((known[name] for name in names if name in known), default=None)
        found += [
            _target(
                f"{place}, {row.verification}: at least {share:.0%} of {' or '.join(names)}"
                + (
                    f" (the load alone: {row.alone_gb_s / ceiling:.3f})" if ceiling and row.alone_gb_s else ""
                ),
                row.gb_s / ceiling if ceiling else None,
                share,
                is_known=row.is_right and (place != COLD or row.is_cold),
            )
            for row in ours(place)
        ]
    for row in ours(TMPFS):
        found.append(
            _target(f"{TMPFS}, {row.verification}: within 3% of unverified", row.of_unverified, 0.97)
        )
        others = [
            row for row in by_key.values() if row.place == TMPFS and row.loader != OURS and row.is_right
        ]
        fastest = max(others, key=lambda each: each.gb_s, default=None)
        if fastest is not None:
            found.append(
                _target(
                    f"{TMPFS}, {row.verification}: ahead of {fastest.loader}", row.gb_s / fastest.gb_s, 1.0
                )
            )
    return found


def _target(text: str, found: float | None, least: float, *, is_known: bool = True) -> Target:
    return Target(text, found, found >= least if found is not None and is_known else None)


# --- text ----------------------------------------------------------------------------------------


def text(report: Report) -> str:
    """The table of a run, its failures, and what it shows."""
    lines = []
    table = rows(report)
    for place in PLACES:
        here = [row for row in table if row.place == place]
        ceilings = limits(report, place)
        if not here and not ceilings:
            continue
        named = ", ".join(
            f"{name} {value:.2f} GB/s{_shapes(report, place, name)}"
            for name, value in sorted(ceilings.items())
        )
        lines += [f"{place}: {named or 'no limit measured'}", *_aligned(map(_cells, here), _HEADER), ""]
    for failure in report["failures"]:
        lines.append(f"failed: {failure['loader']}, {failure['place']}: {failure['reason']}")
    for skipped in report["skipped"]:
        lines.append(f"skipped: {skipped['loader']}, {skipped['place']}: {skipped['reason']}")
    verdicts = {True: "yes", False: "NO", None: "not shown"}
    for target in targets(report) if report["device"] == "cuda" else []:
        found = "" if target.found is None else f"{target.found:.3f}"
        lines.append(f"{verdicts[target.is_met]:9} {found:>6}  {target.text}")
    return "\n".join(lines).rstrip()


def _shapes(report: Report, place: str, what: str) -> str:
    """The fastest of each size of buffer, where several were measured."""
    best: dict[int, float] = {}
    for entry in report["limits"]:
        if entry["place"] == place and entry["what"] == what and "slot_bytes" in entry["shape"]:
            size = int(entry["shape"]["slot_bytes"])
            best[size] = max(best.get(size, 0.0), rate(entry))
    if len(best) < 2:
        return ""
    return f" ({', '.join(f'{size >> 10} KiB {best[size]:.2f}' for size in sorted(best))})"


_HEADER = ("loader", "verified", "GB/s", "of limit", "of unverified", "load alone", "")


def _cells(row: Row) -> tuple[str, ...]:
    def share(value: float | None) -> str:
        return "" if value is None else f"{value:.1%}"

    verified = "" if row.verification is Verification.NONE else row.verification.value
    return (
        row.loader,
        verified,
        f"{row.gb_s:.2f}",
        share(row.of_limit),
        share(row.of_unverified),
        "" if row.alone_gb_s is None else f"{row.alone_gb_s:.2f}",
        row.remark,
    )


def _aligned(cells: Iterable[Sequence[str]], header: Sequence[str]) -> list[str]:
    table = [header, *cells]
    widths = [max(len(line[column]) for line in table) for column in range(len(header))]
    return [
        "  ".join(
            cell.ljust(width) if column in (0, 1, len(header) - 1) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in table
    ]
