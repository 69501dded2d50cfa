"""loaderd's reports as tables; every text from a report passes through `printable`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from loaderd.ctl.operation_view import progress_detail
from loaderd.ctl.summary import version_name
from loaderd.ctl.text import age, duration, moment, printable, rate, short_digest, size
from shared.control import (
    DiffReport,
    FolderReport,
    HistoryReport,
    HolderReport,
    InferdReport,
    MemoryReport,
    ModelReport,
    SlotReport,
    StatusReport,
    VerifyReport,
    VersionReport,
    VersionsReport,
)
from shared.messages import Tag

_STATE_STYLE = {
    "active": "bold green",
    "serving": "bold green",
    "retained": "cyan",
    "prepared": "cyan",
    "draining": "yellow",
    "failed": "bold red",
}


def status(report: StatusReport, now_ns: int) -> RenderableType:
    """Everything about one daemon: models, inferds, versions with their holders, memory."""
    head = Text(
        printable(
            f"loaderd pid {report.pid}, up {age(report.uptime_s)}, backend {report.backend}, "
            f"generation {report.generation}"
        )
    )
    parts: list[RenderableType] = [head, models(report.models)]
    if report.inferds:
        parts.append(inferds(report.inferds))
    else:
        parts.append(Text("no inferd is attached", style="yellow"))
    if report.versions:
        parts.append(versions(report.versions, now_ns))
    parts.append(memory(report.memory))
    return Group(*parts)


def models(reports: Iterable[ModelReport]) -> RenderableType:
    """What serves, what can be rolled back to, what is under way."""
    table = _table("models", "model", "active", "epoch>", "retained", "operation")
    for report in reports:
        operation = report.operation
        doing = ""
        if operation is not None:
            detail = progress_detail(operation) if operation.state == "running" else ""
            stage = operation.stage if operation.state == "running" else operation.state
            doing = f"{operation.operation}: {operation.kind} of {version_name(operation)}, {stage}"
            doing += f" {detail}" if detail else ""
        table.add_row(
            _plain(report.model),
            _plain(_tag(report.active), "bold green"),
            _plain(str(report.epoch)),
            _plain(_tag(report.retained), "cyan"),
            _plain(doing),
        )
    return table


def inferds(reports: Iterable[InferdReport]) -> RenderableType:
    """Attached daemons, each with both slots: state, version, references and age."""
    table = _table(
        "inferds",
        "inferd",
        "pid>",
        "model",
        "epoch>",
        "attached>",
        "running>",
        "waiting>",
        "slot 0",
        "slot 1",
    )
    for report in reports:
        slots = {slot.slot: slot for slot in report.slots}
        table.add_row(
            _plain(report.name),
            _plain(str(report.pid)),
            _plain(report.model),
            _plain("-" if report.epoch is None else str(report.epoch)),
            _plain(age(report.attached_s)),
            _plain(str(report.running)),
            _plain(str(report.waiting)),
            _slot(slots.get(0)),
            _slot(slots.get(1)),
        )
    return table


def versions(reports: Iterable[VersionReport], now_ns: int) -> RenderableType:
    """Versions that loaderd knows, each with who keeps its memory and since when."""
    table = _table(
        "versions",
        "version",
        "digest",
        "state",
        "age>",
        "size>",
        "shared>",
        "tensors>",
        "verified",
        "held by",
    )
    for report in reports:
        table.add_row(
            _plain(f"{report.tag.model}-{report.tag.version}"),
            _plain(short_digest(report.tag.digest)),
            _plain(report.state, _STATE_STYLE.get(report.state, "")),
            _plain(age(max(0, now_ns - report.since_ns) / 1e9)),
            _plain(size(report.nbytes)),
            _plain(size(report.shared_bytes) if report.shared_bytes else "-"),
            _plain(str(report.tensors)),
            _plain(report.verified),
            _plain("\n".join(_holder(holder) for holder in report.holders) or "-", is_multiline=True),
        )
    return table


def memory(reports: Iterable[MemoryReport]) -> RenderableType:
    """Weight memory by device."""
    table = _table("memory", "device", "used>", "free>", "peak>")
    for report in reports:
        table.add_row(
            _plain(report.device),
            _plain(size(report.used_bytes)),
            _plain(size(report.free_bytes)),
            _plain(size(report.peak_bytes)),
        )
    return table


def folders(reports: Iterable[FolderReport]) -> RenderableType:
    """Checkpoint folders that could be pushed."""
    table = _table("folders", "name", "size>", "sealed", "resident", "root")
    for report in reports:
        table.add_row(
            _plain(report.name),
            _plain(size(report.nbytes)),
            _plain("yes" if report.sealed else "no"),
            _plain("yes" if report.resident else "no"),
            _plain(report.root),
        )
    return table


def resident_and_folders(report: VersionsReport, now_ns: int) -> RenderableType:
    """Both halves of `loaderctl versions`."""
    resident: RenderableType = Text("no version is resident")
    if report.resident:
        resident = versions(report.resident, now_ns)
    if not report.folders:
        return Group(resident, Text("no folder can be pushed"))
    return Group(resident, folders(report.folders))


def history(report: HistoryReport) -> RenderableType:
    """Journal entries, oldest first."""
    if not report.entries:
        return Text("the journal has no entry")
    table = _table("", "#>", "time", "what", "version", "operation", "cause", "facts")
    for entry in report.entries:
        version = "-".join(part for part in (entry.model, entry.version) if part)
        facts = " ".join(f"{name}={value}" for name, value in sorted(entry.data.items()))
        table.add_row(
            _plain(str(entry.sequence)),
            _plain(moment(entry.time_ns)),
            _plain(entry.kind),
            _plain(version),
            _plain(entry.operation),
            _plain(entry.cause),
            _plain(facts),
        )
    return table


def verification(report: VerifyReport) -> Iterator[str]:
    """The outcome of hashing what is resident, in lines."""
    name = f"{report.tag.model}-{report.tag.version}"
    against = "its seal" if report.against == "sealed" else "the digests taken when it was loaded"
    speed = rate(report.nbytes, report.seconds)
    speed = f", {speed}" if speed else ""
    yield (
        f"{name}: {report.tensors} tensors, {size(report.nbytes)} hashed in "
        f"{duration(report.seconds)}{speed}, against {against}"
    )
    yield f"  digest   {report.tag.digest}"
    for tensor in report.damaged:
        yield f"  damaged  {tensor}"


def difference(report: DiffReport) -> Iterator[str]:
    """Where two versions differ, in lines."""
    yield (
        f"{report.before} -> {report.after}: {size(report.changed_bytes)} of "
        f"{size(report.total_bytes)} differ"
    )
    for title, names in (
        ("changed", report.changed),
        ("added", report.added),
        ("removed", report.removed),
        ("reshaped", report.reshaped),
        ("file", report.files_changed),
    ):
        for name in names:
            yield f"  {title:<8}  {name}"
    if report.truncated:
        yield "  …         more names than are shown; the sizes above count all of them"


def _table(title: str, *columns: str) -> Table:
    """A table whose column names end in `>` where the column is aligned to the right."""
    table = Table(title=title or None, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for column in columns:
        is_right = column.endswith(">")
        table.add_column(column.removesuffix(">"), justify="right" if is_right else "left", overflow="fold")
    return table


def _plain(text: str, style: str = "", *, is_multiline: bool = False) -> Text:
    """A cell; only texts that this module joined by line ends itself are multi-line."""
    lines = text.split("\n") if is_multiline else [text]
    return Text("\n".join(printable(line) for line in lines), style=style)


def _tag(tag: Tag | None) -> str:
    return "-" if tag is None else f"{tag.version}@{short_digest(tag.digest)}"


def _slot(slot: SlotReport | None) -> Text:
    if slot is None:
        return Text("-")
    words = [slot.state]
    if slot.tag is not None:
        words += [slot.tag.version, f"refs {slot.references}", age(slot.age_s)]
    return _plain(" ".join(words), _STATE_STYLE.get(slot.state, ""))


def _holder(holder: HolderReport) -> str:
    name = printable(holder.inferd)
    return (
        f"{name} (pid {holder.pid}) {printable(holder.state)}, refs {holder.references}, {age(holder.age_s)}"
    )
