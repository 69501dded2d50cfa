"""`status`, `versions`, `history` and `diff`: commands that only look."""

from __future__ import annotations

import time
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from loaderd.ctl import tables
from loaderd.ctl.client import HASH_DEADLINE_S, ControlClient
from loaderd.ctl.session import Json, Session, folder_name, session_of
from loaderd.ctl.text import printable
from shared.control import (
    Diff,
    DiffReport,
    History,
    HistoryReport,
    Status,
    StatusReport,
    Versions,
    VersionsReport,
)
from shared.errors import DaemonUnreachable
from shared.ids import check_name

_WATCH_EVERY_S = 1.0


def status(
    context: typer.Context,
    watch: Annotated[bool, typer.Option("--watch", help="Keep showing it until Ctrl-C.")] = False,
    json: Json = False,
) -> None:
    """Show models, inferds with their slots, versions with their holders, and memory."""
    session = session_of(context, is_json=json)
    with session.client() as client:
        report = client.ask(Status(), StatusReport)
        if watch:
            _watch(session, client, report)
        _show_status(session, report)


def versions(context: typer.Context, json: Json = False) -> None:
    """Show resident versions, and the checkpoint folders that could be pushed."""
    session = session_of(context, is_json=json)
    with session.client() as client:
        report = client.ask(Versions(), VersionsReport)
    if json:
        session.terminal.json(report.model_dump(mode="json"))
    else:
        session.terminal.show(tables.resident_and_folders(report, time.time_ns()))


def history(
    context: typer.Context,
    model: Annotated[str | None, typer.Option(metavar="MODEL", help="Only entries of this model.")] = None,
    limit: Annotated[int, typer.Option("-n", "--limit", min=1, max=1000, help="How many entries.")] = 50,
    json: Json = False,
) -> None:
    """Show the newest journal entries, oldest first."""
    session = session_of(context, is_json=json)
    model = None if model is None else check_name(model, "model")
    with session.client() as client:
        report = client.ask(History(model=model, limit=limit), HistoryReport)
    if json:
        session.terminal.json(report.model_dump(mode="json"))
    else:
        session.terminal.show(tables.history(report))


def diff(
    context: typer.Context,
    before: Annotated[str, typer.Argument(metavar="A", help="Version or folder to compare from.")],
    after: Annotated[str, typer.Argument(metavar="B", help="Version or folder to compare to.")],
    json: Json = False,
) -> None:
    """Compare two versions tensor by tensor; sizes are bytes of B."""
    session = session_of(context, is_json=json)
    body = Diff(before=folder_name(before), after=folder_name(after))
    with session.client() as client:
        report = client.ask(body, DiffReport, HASH_DEADLINE_S)
    if json:
        session.terminal.json(report.model_dump(mode="json"))
        return
    for line in tables.difference(report):
        session.terminal.line(line)


def _show_status(session: Session, report: StatusReport) -> None:
    if session.terminal.is_json:
        session.terminal.json(report.model_dump(mode="json"))
    else:
        session.terminal.show(tables.status(report, time.time_ns()))


def _watch(session: Session, client: ControlClient, report: StatusReport) -> None:
    """Show the status again after each event and every _WATCH_EVERY_S; ends by Ctrl-C only."""
    terminal = session.terminal
    lost = ""
    with client.events(must_listen=False) as events:
        if not terminal.is_interactive:
            while True:
                if lost:
                    terminal.remark(lost)
                else:
                    _show_status(session, report)
                events.wait(_WATCH_EVERY_S)
                report, lost = _refresh(client, report)
        with Live(console=terminal.out, auto_refresh=False, screen=True) as live:
            while True:
                live.update(_screen(report, lost), refresh=True)
                events.wait(_WATCH_EVERY_S)
                report, lost = _refresh(client, report)


def _refresh(client: ControlClient, before: StatusReport) -> tuple[StatusReport, str]:
    try:
        return client.ask(Status(), StatusReport), ""
    except DaemonUnreachable as error:
        return before, error.message


def _screen(report: StatusReport, lost: str) -> RenderableType:
    table = tables.status(report, time.time_ns())
    return Group(Text(printable(lost), style="bold red"), table) if lost else table
