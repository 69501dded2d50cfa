"""All of loaderctl: options that come before the command, and errors to exit codes."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Annotated

import typer

from loaderd.ctl import events_command, operation_commands, report_commands, seal_commands
from loaderd.ctl.exit_codes import ExitCode, exit_code_of, help_epilog
from loaderd.ctl.session import Session
from loaderd.ctl.terminal import OutputClosedError, Terminal
from shared.codec import PROTOCOL_VERSION
from shared.errors import ChangeoverError
from shared.run_dir import DEFAULT_RUN_DIR, RUN_DIR_VARIABLE

app = typer.Typer(
    name="loaderctl",
    help="Push weights to a running LLM service, watch them arrive, and take them back.",
    epilog=help_epilog(),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command()(operation_commands.push)
app.command()(operation_commands.rollback)
app.command()(operation_commands.wait)
app.command()(report_commands.status)
app.command()(report_commands.versions)
app.command()(report_commands.history)
app.command()(report_commands.diff)
app.command()(events_command.events)
app.command()(seal_commands.seal)
app.command()(seal_commands.verify)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        try:
            number = installed_version("changeover")
        except PackageNotFoundError:
            number = "not installed"
        typer.echo(f"loaderctl {number}, protocol {PROTOCOL_VERSION}")
        raise typer.Exit


@app.callback()
def _global_options(
    context: typer.Context,
    run_dir: Annotated[
        Path, typer.Option(metavar="DIR", envvar=RUN_DIR_VARIABLE, help="Where loaderd's sockets are.")
    ] = DEFAULT_RUN_DIR,
    no_color: Annotated[
        bool, typer.Option("--no-color", help="No colours; so does the variable NO_COLOR.")
    ] = False,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    context.ensure_object(Session).configure(run_dir, is_plain=no_color)


def run() -> None:
    """Run one command and exit with its code."""
    for stream in (sys.stdout, sys.stderr):
        # A locale that lacks a character must not stop a push from being watched.
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    session = Session.start()
    try:
        code = _run(session)
    except OutputClosedError:
        session.terminal.discard()
        code = ExitCode.CLOSED_PIPE
    sys.exit(code)


def _run(session: Session) -> ExitCode:
    try:
        app(obj=session, prog_name="loaderctl")
    except ChangeoverError as error:
        return _tell(session.terminal, error)
    return ExitCode.DONE


def _tell(terminal: Terminal, error: ChangeoverError) -> ExitCode:
    code = exit_code_of(error)
    terminal.error(error.message or str(error))
    if terminal.is_json:
        terminal.json(
            {
                "event": "error",
                "code": error.code,
                "message": error.message,
                "facts": dict(error.facts),
                "outcome": code.label,
                "exit_code": code.value,
            }
        )
    return code
