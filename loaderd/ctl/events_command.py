"""`events`: follow what loaderd publishes."""

from __future__ import annotations

from typing import Annotated

import typer

from loaderd.ctl.event_stream import Numbering
from loaderd.ctl.session import Json, session_of
from loaderd.ctl.terminal import Terminal
from loaderd.ctl.text import fact, moment
from shared.control import Event
from shared.ids import check_name


def events(
    context: typer.Context,
    operation: Annotated[
        str | None, typer.Option(metavar="OPERATION", help="Only events of this push or rollback.")
    ] = None,
    json: Json = False,
) -> None:
    """Follow loaderd's events until Ctrl-C.

    Events tell what happens and may be lost: where their numbers have a gap, that is said. Ask
    `status` or `wait` for what is.
    """
    session = session_of(context, is_json=json)
    if operation is not None:
        check_name(operation, "operation")
    numbering = Numbering()
    unreadable = 0
    with session.client() as client, client.events(must_listen=True) as stream:
        while True:
            for event in stream.wait(None):
                notice = numbering.observe(event)
                if notice:
                    _notice(session.terminal, notice)
                if operation is None or event.operation == operation:
                    _show(session.terminal, event)
            if stream.unreadable > unreadable:
                _notice(session.terminal, f"{stream.unreadable - unreadable} frames could not be read")
                unreadable = stream.unreadable


def event_line(event: Event) -> str:
    """One event on one line, whatever its kind."""
    version = "-".join(part for part in (event.model, event.version) if part)
    facts = " ".join(f"{name}={fact(value)}" for name, value in sorted(event.data.items()))
    words = [
        moment(event.time_ns),
        f"#{event.sequence}",
        event.kind,
        version,
        event.operation,
        event.text,
        facts,
    ]
    return "  ".join(word for word in words if word)


def _show(terminal: Terminal, event: Event) -> None:
    if terminal.is_json:
        terminal.json({"event": "event", **event.model_dump(mode="json")})
    else:
        terminal.line(event_line(event))


def _notice(terminal: Terminal, text: str) -> None:
    if terminal.is_json:
        terminal.json({"event": "notice", "message": text})
    else:
        terminal.remark(text, "yellow")
