"""`push`, `rollback` and `wait`: commands that change what is served, or wait for a change."""

from __future__ import annotations

from typing import Annotated, NoReturn

import typer

from loaderd.ctl.client import PLAN_DEADLINE_S, ControlClient
from loaderd.ctl.exit_codes import ExitCode
from loaderd.ctl.follow import Conclusion, Follower
from loaderd.ctl.live_view import LiveView
from loaderd.ctl.operation_view import JsonView, LineView, OperationView
from loaderd.ctl.session import (
    Detach,
    InFlight,
    Json,
    Model,
    Session,
    Timeout,
    Wait,
    folder_name,
    is_to_wait,
    session_of,
)
from loaderd.ctl.summary import reattach
from loaderd.ctl.terminal import Terminal
from shared.control import Push, PushReply, Rollback, RollbackReply
from shared.ids import check_name


def push(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Checkpoint folder below a model root.")],
    model: Model = None,
    in_flight: InFlight = "finish",
    wait: Wait = False,
    detach: Detach = False,
    timeout: Timeout = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan and change nothing.")] = False,
    json: Json = False,
) -> None:
    """Load, verify and prepare a checkpoint, then flip every inferd of its model to it.

    The plan comes first; a push that cannot work is refused (exit code 5).

    Ctrl-C stops the waiting, not the push.
    """
    session = session_of(context, is_json=json)
    wait = is_to_wait(wait=wait, detach=detach, timeout=timeout, dry_run=dry_run)
    body = Push(name=folder_name(name), model=_checked_model(model), dry_run=dry_run, in_flight=in_flight)
    with session.client() as client, _view(session.terminal) as view:
        try:
            reply = client.ask(body, PushReply, PLAN_DEADLINE_S)
        except KeyboardInterrupt:
            message = "interrupted before loaderd answered; see loaderctl status for what it does"
            _end(view, Conclusion(ExitCode.INTERRUPTED, "", None, message))
        view.plan(reply)
        if reply.plan.verdict != "hot":
            _end(view, Conclusion(ExitCode.REFUSED, "", None, _refusal(reply)))
        if reply.operation is None:
            _end(view, Conclusion(ExitCode.DONE, "", None))
        _go_on(session, client, view, reply.operation, wait=wait, timeout=timeout)


def rollback(
    context: typer.Context,
    model: Model = None,
    to: Annotated[str | None, typer.Option(metavar="VERSION", help="A version that is resident.")] = None,
    in_flight: InFlight = "finish",
    wait: Wait = False,
    detach: Detach = False,
    timeout: Timeout = None,
    json: Json = False,
) -> None:
    """Serve the retained version again: a flip, nothing is loaded."""
    session = session_of(context, is_json=json)
    wait = is_to_wait(wait=wait, detach=detach, timeout=timeout)
    to = None if to is None else check_name(to, "version (expected vN or MODEL-vN)")
    body = Rollback(model=_checked_model(model), to=to, in_flight=in_flight)
    with session.client() as client, _view(session.terminal) as view:
        try:
            reply = client.ask(body, RollbackReply)
        except KeyboardInterrupt:
            message = "interrupted before loaderd answered; see loaderctl status for what it does"
            _end(view, Conclusion(ExitCode.INTERRUPTED, "", None, message))
        _go_on(session, client, view, reply.operation, wait=wait, timeout=timeout)


def wait(
    context: typer.Context,
    operation: Annotated[str, typer.Argument(metavar="OPERATION", help="As push or status named it.")],
    timeout: Timeout = None,
    json: Json = False,
) -> None:
    """Wait for a push or rollback that is under way, or tell how it ended."""
    session = session_of(context, is_json=json)
    check_name(operation, "operation")
    with session.client() as client, _view(session.terminal) as view:
        _follow(client, view, operation, timeout, is_known=False)


def _view(terminal: Terminal) -> OperationView:
    if terminal.is_json:
        return JsonView(terminal)
    return LiveView(terminal) if terminal.is_interactive else LineView(terminal)


def _checked_model(model: str | None) -> str | None:
    return None if model is None else check_name(model, "model")


def _refusal(reply: PushReply) -> str:
    plan = reply.plan
    if plan.verdict == "cold":
        return f"{plan.name} does not fit into memory beside what serves; nothing was changed"
    return f"{plan.name} is refused; nothing was changed"


def _go_on(
    session: Session,
    client: ControlClient,
    view: OperationView,
    operation: str,
    *,
    wait: bool,
    timeout: float | None,
) -> None:
    if wait:
        _follow(client, view, operation, timeout, is_known=True)
        return
    view.started(operation)
    if session.terminal.is_json:
        _end(view, Conclusion(ExitCode.DONE, operation, None))


def _follow(
    client: ControlClient, view: OperationView, operation: str, timeout: float | None, *, is_known: bool
) -> None:
    with client.events(must_listen=False) as events:
        follower = Follower(client, events, view, operation, is_known=is_known, timeout_s=timeout)
        try:
            conclusion = follower.run()
        except KeyboardInterrupt:
            conclusion = Conclusion(
                ExitCode.INTERRUPTED, operation, follower.latest, f"interrupted; {reattach(operation)}"
            )
        _end(view, conclusion)


def _end(view: OperationView, conclusion: Conclusion) -> NoReturn:
    view.conclude(conclusion)
    raise typer.Exit(conclusion.code)
