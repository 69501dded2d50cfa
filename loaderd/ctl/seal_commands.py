"""`seal` and `verify`: what a folder or a resident version must hash to, and whether it does."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from loaderd.ctl import tables
from loaderd.ctl.client import HASH_DEADLINE_S
from loaderd.ctl.exit_codes import ExitCode
from loaderd.ctl.hash_progress import HashProgress
from loaderd.ctl.session import Json, Session, session_of
from loaderd.ctl.terminal import Terminal
from loaderd.ctl.text import duration, rate, size
from loaderd.seal.check import verify_directory
from loaderd.seal.create import seal_directory
from loaderd.seal.document import Seal
from shared.control import Verify, VerifyReport
from shared.errors import InvalidRequest
from shared.ids import check_name

_MOST_JOBS = 8

Jobs = Annotated[
    int | None,
    typer.Option(min=1, max=64, metavar="N", help="Files to hash side by side.", show_default=False),
]
Hashing = Callable[[HashProgress], Seal]


def seal(
    context: typer.Context,
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", exists=True, file_okay=False, help="A checkpoint folder.")
    ],
    jobs: Jobs = None,
    json: Json = False,
) -> None:
    """Hash a checkpoint folder and write its seal.json, last and in one step.

    This runs here and not in loaderd. A folder that changes meanwhile is not sealed.
    """
    session = session_of(context, is_json=json)
    _hash(
        session.terminal,
        directory,
        "sealed",
        "interrupted: no seal was written; an older one is as it was",
        lambda progress: seal_directory(directory, jobs=jobs or _default_jobs(), progress=progress),
    )


def verify(
    context: typer.Context,
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET", help="A resident version; or a folder, told by a slash: ./DIR or DIR/."
        ),
    ],
    jobs: Jobs = None,
    json: Json = False,
) -> None:
    """Hash a resident version where it lies, while it serves; or a folder's files against its seal."""
    session = session_of(context, is_json=json)
    if target not in (".", "..") and "/" not in target:
        _verify_resident(session, check_name(target, "version"))
        return
    directory = Path(target)
    if not directory.is_dir():
        raise InvalidRequest(f"{target} is not a folder")
    _hash(
        session.terminal,
        directory,
        "verified",
        "interrupted: not everything was verified",
        lambda progress: verify_directory(directory, jobs=jobs or _default_jobs(), progress=progress),
    )


def _verify_resident(session: Session, name: str) -> None:
    with session.client() as client:
        report = client.ask(Verify(name=name), VerifyReport, HASH_DEADLINE_S)
    code = ExitCode.FAILED if report.damaged else ExitCode.DONE
    message = f"{len(report.damaged)} of {report.tensors} tensors are damaged" if report.damaged else ""
    if session.terminal.is_json:
        _result(session.terminal, code, message, report=report.model_dump(mode="json"))
    else:
        for line in tables.verification(report):
            session.terminal.line(line)
    if message:
        session.terminal.error(message)
    raise typer.Exit(code)


def _hash(terminal: Terminal, directory: Path, done: str, interrupted: str, hashing: Hashing) -> NoReturn:
    progress = HashProgress(terminal, "hashed")
    try:
        with progress:
            made = hashing(progress)
    except KeyboardInterrupt:
        terminal.error(interrupted)
        if terminal.is_json:
            _result(terminal, ExitCode.INTERRUPTED, interrupted)
        raise typer.Exit(ExitCode.INTERRUPTED) from None
    elapsed_s = progress.elapsed_s
    nbytes = sum(file.nbytes for file in made.files.values())
    if terminal.is_json:
        facts = {"files": len(made.files), "tensors": len(made.tensors), "bytes": nbytes}
        where = str(directory)
        _result(terminal, ExitCode.DONE, "", directory=where, digest=made.digest, seconds=elapsed_s, **facts)
    else:
        terminal.line(
            f"{done}: {directory}, {len(made.tensors)} tensors, {len(made.files)} files, {size(nbytes)} "
            f"in {duration(elapsed_s)} ({rate(nbytes, elapsed_s)})",
            "bold green",
        )
        terminal.line(f"  digest   {made.digest}")
    raise typer.Exit(ExitCode.DONE)


def _result(terminal: Terminal, code: ExitCode, message: str, **fields: object) -> None:
    terminal.json(
        {"event": "result", "outcome": code.label, "exit_code": code.value, "message": message, **fields}
    )


def _default_jobs() -> int:
    return min(_MOST_JOBS, len(os.sched_getaffinity(0)))
