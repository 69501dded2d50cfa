"""loaderd's reports as tables; every text from a report passes through `printable`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from loaderd.ctl.operation_view import progress_detail
from loaderd.ctl.summary import version_name
from loaderd.ctl.text import age, duration, fact, moment, printable, rate, short_digest, size
from shared.control import (
    DiffReport,
    FolderReport,
    HistoryReport,
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
    none_attached = Text("no inferd is attached", style="yellow")
    parts: list[RenderableType] = [
        models(report.models) if report.models else Text("no model is known"),
        *operations(report.models),
        inferds(report.inferds) if report.inferds else none_attached,
        *resident(report.versions, now_ns),
        *memory(report.memory),
    ]
    return Group(*_spaced([head, *parts]))


def models(reports: Iterable[ModelReport]) -> RenderableType:
    """What serves and what can be rolled back to."""
    table = _table("models", "model", "active", "epoch>", "retained")
    for report in reports:
        table.add_row(
            _plain(report.model),
            _plain(_tag(report.active), _STATE_STYLE["active"]),
            _plain(str(report.epoch)),
            _plain(_tag(report.retained), _STATE_STYLE["retained"]),
        )
    return table


def operations(reports: Iterable[ModelReport]) -> Iterator[RenderableType]:
    """A table of what is under way or was done last, if there is any."""
    table = _table("operations", "operation", "what", "version", "state", "stage", "progress~")
    for report in reports:
        operation = report.operation
        if operation is not None:
            table.add_row(
                _plain(operation.operation),
                _plain(operation.kind),
                _plain(version_name(operation)),
                _plain(operation.state, _STATE_STYLE.get(operation.state, "")),
                _plain(operation.stage),
                _plain(progress_detail(operation)),
            )
    if table.row_count:
        yield table


def inferds(reports: Iterable[InferdReport]) -> RenderableType:
    """Attached daemons, each with both slots: state, version, references and age."""
    table = _table(
        "inferds",
        "inferd",
        "pid>",
        "model",
        "device",
        "epoch>",
        "attached>",
        "running>",
        "waiting>",
        "slot 0~",
        "slot 1~",
    )
    for report in reports:
        slots = {slot.slot: slot for slot in report.slots}
        table.add_row(
            _plain(report.name),
            _plain(str(report.pid)),
            _plain(report.model),
            _plain(report.device),
            _plain("-" if report.epoch is None else str(report.epoch)),
            _plain(age(report.attached_s)),
            _plain(str(report.running)),
            _plain(str(report.waiting)),
            _slot(slots.get(0)),
            _slot(slots.get(1)),
        )
    return table


def resident(reports: Sequence[VersionReport], now_ns: int) -> Iterator[RenderableType]:
    """Versions that loaderd knows; then, if there is any, what is damaged, and who keeps whose memory and
    since when."""
    if not reports:
        yield Text("no version is resident")
        return
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
        "copies on~",
    )
    holders = _table("holders", "version", "held by", "pid>", "device", "state", "references>", "age>")
    for report in reports:
        name = f"{report.tag.model}-{report.tag.version}"
        table.add_row(
            _plain(name),
            _plain(short_digest(report.tag.digest)),
            _plain(report.state, _STATE_STYLE.get(report.state, "")),
            _plain(age(max(0, now_ns - report.since_ns) / 1e9)),
            _plain(size(report.nbytes)),
            _plain(size(report.shared_bytes) if report.shared_bytes else "-"),
            _plain(str(report.tensors)),
            _plain(report.verified),
            _plain(" ".join(report.devices)),
        )
        for holder in report.holders:
            holders.add_row(
                _plain(name),
                _plain(holder.inferd),
                _plain(str(holder.pid)),
                _plain(holder.device),
                _plain(holder.state, _STATE_STYLE.get(holder.state, "")),
                _plain(str(holder.references)),
                _plain(age(holder.age_s)),
            )
    yield table
    for report in reports:
        if report.damaged:
            names = ", ".join(report.damaged)
            yield _plain(f"{report.tag.model}-{report.tag.version} is DAMAGED: {names}", "bold red")
    if holders.row_count:
        yield holders


def memory(reports: Iterable[MemoryReport]) -> Iterator[RenderableType]:
    """Weight memory by device, and below it what is known of the devices themselves."""
    table = _table("memory", "device", "used>", "free>", "peak>")
    columns = ("total>", "nvml free>", "pool>", "reserved>", "largest>", "frag>", "ecc>")
    devices = _table("devices", "device", *columns)
    for report in reports:
        table.add_row(
            _plain(report.device),
            _plain(size(report.used_bytes)),
            _plain(size(report.free_bytes)),
            _plain(size(report.peak_bytes)),
        )
        if report.total_bytes is None:
            continue
        devices.add_row(
            _plain(report.device),
            _plain(size(report.total_bytes)),
            _plain(_size_or_dash(report.nvml_free_bytes)),
            _plain(_size_or_dash(report.pool_bytes or None)),
            _plain(_size_or_dash(report.reserved_bytes if report.pool_bytes else None)),
            _plain(_size_or_dash(report.largest_free_bytes)),
            _plain(f"{report.fragmentation:.0%}"),
            _plain("-" if report.uncorrected_errors is None else str(report.uncorrected_errors)),
        )
    yield table
    if devices.row_count:
        yield devices


def _size_or_dash(nbytes: int | None) -> str:
    return "-" if nbytes is None else size(nbytes)


def folders(reports: Iterable[FolderReport]) -> RenderableType:
    """Checkpoint folders that could be pushed."""
    table = _table("folders", "name", "size>", "sealed", "resident", "root~")
    for report in reports:
        table.add_row(
            _plain(report.name),
            _plain(size(report.nbytes)),
            _plain("broken", "red") if report.seal_fault else _plain("yes" if report.sealed else "no"),
            _plain("yes" if report.resident else "no"),
            _plain(report.root),
        )
    return table


def resident_and_folders(report: VersionsReport, now_ns: int) -> RenderableType:
    """Both halves of `loaderctl versions`."""
    pushable = folders(report.folders) if report.folders else Text("no folder can be pushed")
    return Group(*_spaced([*resident(report.resident, now_ns), pushable]))


def history(report: HistoryReport) -> RenderableType:
    """Journal entries, oldest first."""
    if not report.entries:
        return Text("the journal has no entry")
    table = _table("", "#>", "time", "what", "version", "operation", "cause~", "facts~")
    for entry in report.entries:
        version = "-".join(part for part in (entry.model, entry.version) if part)
        facts = " ".join(f"{name}={fact(value)}" for name, value in sorted(entry.data.items()))
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


_AGAINST = {
    "digest": "the digests taken when it was loaded",
    "sealed": "its seal",
    "signed": "what was signed",
}


def verification(report: VerifyReport) -> Iterator[str]:
    """The outcome of hashing what is resident, in lines."""
    name = f"{report.tag.model}-{report.tag.version}"
    against = _AGAINST[report.against]
    speed = rate(report.nbytes, report.seconds)
    speed = f", {speed}" if speed else ""
    yield (
        f"{name}: {report.tensors} tensors on {' '.join(report.devices)}, {size(report.nbytes)} hashed in "
        f"{duration(report.seconds)}{speed}, against {against}"
    )
    yield f"  digest   {report.tag.digest}"
    if report.damaged:
        yield f"  on       {' '.join(report.damaged_devices)}"
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
    """A table; a column whose name ends in `>` is aligned to the right, one in `~` may be folded."""
    table = Table(
        title=title or None, title_justify="left", title_style="underline", box=None, pad_edge=False
    )
    for column in columns:
        table.add_column(
            column.rstrip(">~"),
            justify="right" if column.endswith(">") else "left",
            no_wrap=not column.endswith("~"),
            overflow="fold" if column.endswith("~") else "ellipsis",
        )
    return table


def _spaced(parts: Sequence[RenderableType]) -> Iterator[RenderableType]:
    """The parts with an empty line before each but the first."""
    for number, part in enumerate(parts):
        if number:
            yield Text("")
        yield part


def _plain(text: str, style: str = "") -> Text:
    return Text(printable(text), style=style)


def _tag(tag: Tag | None) -> str:
    return "-" if tag is None else f"{tag.version}@{short_digest(tag.digest)}"


def _slot(slot: SlotReport | None) -> Text:
    if slot is None:
        return Text("-")
    words = [slot.state]
    if slot.tag is not None:
        words += [slot.tag.version, f"refs {slot.references}", age(slot.age_s)]
    if slot.is_damaged:
        return _plain(" ".join([*words, "DAMAGED"]), "bold red")
    return _plain(" ".join(words), _STATE_STYLE.get(slot.state, ""))
