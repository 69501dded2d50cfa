"""What a run measured, as rows with ratios, and whether it shows what it must.

Pure: a report is the JSON that `load.py` writes.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
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

NOT_COMPARED = "not compared"
"""Instead of how a load's bytes differ: it was ended before anyone looked."""


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
    of_limit: float | None  # the place's lowest limit is 1; at the cold disk the median of `of_direct`
    of_unverified: float | None  # the same loader's load without verification is 1
    alone_gb_s: float | None  # without opening and planning, where the loader tells them apart
    is_right: bool  # every byte was compared with what it must be
    is_cold: bool  # at the cold disk: nothing was cached, and the kernel is known to tell
    remark: str = ""
    of_direct: tuple[float, ...] = ()  # each load from the cold disk; direct reads before and after it are 1


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
    """The limits that hold at `place`, in GB/s, at the median; of several shapes of one kind the fastest
    counts."""
    samples: dict[tuple[str, str], list[float]] = defaultdict(list)
    for entry in report["limits"]:
        if entry["place"] == place:
            rates = [entry["bytes"] / seconds / 1e9 for seconds in entry["seconds"]]
            samples[entry["what"], str(sorted(entry["shape"].items()))] += rates
    best: dict[str, float] = {}
    for (what, _), rates in samples.items():
        best[what] = max(best.get(what, 0.0), statistics.median(rates))
    return best


def best_direct_shape(report: Report) -> dict[str, int] | None:
    """Of those that were tried, the one that got most of the disk."""
    tried = report["tried"]
    if not tried:
        return None
    shape: dict[str, int] = max(tried, key=lambda one: one["bytes"] / sum(one["seconds"]))["shape"]
    return shape


def of_direct(entry: Mapping[str, Any]) -> tuple[float, ...]:
    """Each load's rate, of the mean of what direct reads right before and right after it gave: a disk's rate
    drifts too much to compare it with any other time's."""
    rates = [entry["bytes"] / seconds / 1e9 for seconds in entry["seconds"]]
    return tuple(
        load / statistics.mean(beside) for load, beside in zip(rates, entry.get("beside", ()), strict=False)
    )


def rows(report: Report) -> list[Row]:
    """Places in order, at each place ours first and then the others, fastest first."""
    best: dict[tuple[str, str, Verification], Mapping[str, Any]] = {}
    for entry in report["loads"]:
        key = (entry["place"], entry["loader"], Verification(entry["verification"]))
        if key not in best or _order(entry) > _order(best[key]):
            best[key] = entry
    found = []
    for (place, loader, verification), entry in best.items():
        plain = best.get((place, loader, Verification.NONE))
        of_limit = _of_limit(entry, report)
        of_unverified = None
        if plain and verification is not Verification.NONE:
            of_unverified = rate(entry) / rate(plain)
            if of_direct(entry) and of_direct(plain):  # what drifted between them does not count
                of_unverified = statistics.median(of_direct(entry)) / statistics.median(of_direct(plain))
        found.append(
            Row(
                place,
                loader,
                verification,
                rate(entry),
                of_limit,
                of_unverified,
                _alone(entry),
                bool(entry["is_right"]),
                bool(entry["is_cold"]),
                _remark(entry, report),
                of_direct(entry),
            )
        )
    return sorted(found, key=lambda row: (PLACES.index(row.place), row.loader != OURS, -row.gb_s))


def _of_limit(entry: Mapping[str, Any], report: Report) -> float | None:
    ratios = of_direct(entry)
    if ratios:
        return statistics.median(ratios)
    ceiling = min(limits(report, entry["place"]).values(), default=None)
    return rate(entry) / ceiling if ceiling else None


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
    if entry["wrong"] == NOT_COMPARED:
        remarks.append("bytes not compared")
    elif not entry["is_right"]:
        remarks.append(f"WRONG BYTES: {entry['wrong']}")
    if entry["place"] == COLD and not entry["is_cold"]:
        remarks.append("not proven cold")
    ratios = of_direct(entry)
    if len(ratios) > 1:
        remarks.append(f"of limit {', '.join(f'{ratio:.0%}' for ratio in ratios)}")
    if entry["bytes"] < 0.99 * _model_bytes(entry["place"], report):
        remarks.append(f"{entry['bytes'] / 1e9:.1f} GB")
    return ", ".join(remarks)


def _model_bytes(place: str, report: Report) -> int:
    found: int = report[_COLD_MODEL if place == COLD and _COLD_MODEL in report else "model"]["bytes"]
    return found


def join(reports: Sequence[Report]) -> Report:
    """Several runs' reports as one: what was measured the same way counts as measured in one run.

    Raises ValueError where they are not of one kind of machine and of one model."""
    first, *others = reports
    joined: dict[str, Any] = {**first, "versions": dict(first["versions"])}
    for name in _LISTS:
        joined[name] = [dict(entry) for entry in first.get(name, [])]
    for other in others:
        for name in _SAME & (first.keys() | other.keys()):
            if _apart_from_memory(first.get(name)) != _apart_from_memory(other.get(name)):
                raise ValueError(f"{name} differs: {first.get(name)} and {other.get(name)}")
        for package, number in other["versions"].items():
            if joined["versions"].setdefault(package, number) != number:
                raise ValueError(f"{package} differs: {joined['versions'][package]} and {number}")
        joined["command"] += f"; {other['command']}"
        joined["date"] = max(joined["date"], other["date"])
        for name in _LISTS:
            joined[name] += [dict(entry) for entry in other.get(name, [])]
    joined["loads"] = _pooled(joined["loads"])
    measured = {(entry["loader"], entry["place"]) for entry in joined["loads"]}
    joined["skipped"] = [
        each for each in joined["skipped"] if (each["loader"], each["place"]) not in measured
    ]
    return joined


_COLD_MODEL = "cold_model"
_SAME = {"device", "machine", "model", _COLD_MODEL}
_LISTS = ("limits", "tried", "loads", "failures", "skipped")


def _apart_from_memory(value: Any) -> Any:
    """Machines of one kind have not always the same memory to the byte."""
    return {**value, "memory_bytes": 0} if isinstance(value, Mapping) else value


def _pooled(loads: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The loads of one setting at one place as one entry, right and cold if all are."""
    pooled: dict[str, dict[str, Any]] = {}
    for entry in loads:
        key = str([entry[name] for name in ("loader", "place", "verification", "bytes")]) + str(
            sorted(entry["setting"].items())
        )
        if key not in pooled:
            pooled[key] = dict(entry)
            continue
        whole = pooled[key]
        for name, value in entry.items():
            if isinstance(value, list):
                whole[name] = [*whole.get(name, []), *value]
        if not entry["is_right"] and whole["wrong"] in ("", NOT_COMPARED):
            whole |= {"is_right": False, "wrong": entry["wrong"]}
        whole["is_cold"] = whole["is_cold"] and entry["is_cold"]
    return list(pooled.values())


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
        for row in ours(place):
            reached = row.gb_s / ceiling if ceiling else None
            against = " or ".join(names)
            if row.of_direct:
                reached, against = row.of_limit, f"{against} before and after, median of {len(row.of_direct)}"
            text = f"{place}, {row.verification}: at least {share:.0%} of {against}"
            if reached and row.alone_gb_s:
                text += f" (the load alone: {reached * row.alone_gb_s / row.gb_s:.3f})"
            is_known = row.is_right and (place != COLD or row.is_cold)
            found.append(_target(text, reached, share, is_known=is_known))
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
            f"{name} {value:.2f} GB/s{_shapes(report, place, name)}{_range(report, place, name)}"
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


def _range(report: Report, place: str, what: str) -> str:
    """Between which rates direct reads drifted, and with what shape."""
    entries = [entry for entry in report["limits"] if entry["place"] == place and entry["what"] == what]
    rates = [entry["bytes"] / seconds / 1e9 for entry in entries for seconds in entry["seconds"]]
    if what != DIRECT or len(rates) < 2:
        return ""
    shape = entries[0]["shape"]
    return (
        f" ({min(rates):.2f} to {max(rates):.2f} in {len(rates)} reads, "
        f"{shape['threads']} threads of {shape['slot_bytes'] >> 10} KiB)"
    )


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
