"""What the global options decided, for the commands."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from loaderd.ctl.client import ControlClient
from loaderd.ctl.terminal import Terminal
from shared import messages
from shared.errors import InvalidRequest
from shared.ids import check_name
from shared.run_dir import DEFAULT_RUN_DIR, RunDir

Json = Annotated[bool, typer.Option("--json", help="Write JSON to stdout, and nothing else.")]
Timeout = Annotated[
    float | None,
    typer.Option(
        min=0, metavar="SECONDS", help="Stop waiting after this time (exit code 4); the operation goes on."
    ),
]
Wait = Annotated[bool, typer.Option("--wait", help="Wait for the end; so it does unless told to detach.")]
Detach = Annotated[bool, typer.Option("--detach", help="Return at once, and say how to wait for the end.")]
InFlight = Annotated[
    messages.InFlight,
    typer.Option(
        help="What becomes of requests that run at the flip: they finish on the old version, switch to "
        "the new weights over the keys and values they have, restart on them, or are aborted."
    ),
]
Model = Annotated[str | None, typer.Option(metavar="MODEL", help="Which model, where it cannot be told.")]


def is_to_wait(*, wait: bool, detach: bool, timeout: float | None, dry_run: bool = False) -> bool:
    """What the options about waiting say together; raises InvalidRequest where one would be of no use."""
    given = {"--wait": wait, "--detach": detach, "--timeout": timeout is not None}
    if dry_run and any(given.values()):
        named = " and ".join(option for option, is_given in given.items() if is_given)
        raise InvalidRequest(f"--dry-run starts nothing that could be waited for; leave out {named}")
    if wait and detach:
        raise InvalidRequest("--wait and --detach exclude each other")
    if detach and timeout is not None:
        raise InvalidRequest(
            "--detach does not wait, and --timeout says for how long to wait; leave one of them out"
        )
    return not detach


def folder_name(name: str) -> str:
    """`name`, if loaderd may look it up below its model roots; raises InvalidName, also for a path."""
    return check_name(name, "version (expected MODEL-vN, the name of a folder below a model root, no path)")


@dataclass(slots=True)
class Session:
    """One run of loaderctl."""

    terminal: Terminal
    run_dir: RunDir

    @classmethod
    def start(cls) -> Session:
        """As it is before any option was read."""
        return cls(Terminal(), RunDir(DEFAULT_RUN_DIR))

    def configure(self, run_dir: Path, *, is_plain: bool) -> None:
        """Apply the global options."""
        self.run_dir = RunDir(run_dir.absolute())
        if is_plain:
            self.terminal = Terminal(is_plain=True)

    def client(self) -> ControlClient:
        """A client of this session's daemon; the caller closes it."""
        return ControlClient(self.run_dir)


def session_of(context: typer.Context, *, is_json: bool = False) -> Session:
    """The session that `main` put into the command's context."""
    session: Session = context.ensure_object(Session)
    session.terminal.is_json = is_json
    return session
