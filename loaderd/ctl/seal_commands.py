"""`seal` and `verify`: what a folder or a resident version must hash to, and whether it does."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from getpass import getpass
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from loaderd.checkpoint.names import SEAL_FILE, SIGNATURE_FILE
from loaderd.ctl import tables
from loaderd.ctl.client import HASH_DEADLINE_S
from loaderd.ctl.exit_codes import ExitCode
from loaderd.ctl.hash_progress import HashProgress
from loaderd.ctl.session import Json, Session, folder_name, session_of
from loaderd.ctl.terminal import Terminal
from loaderd.ctl.text import duration, printable, rate, size
from loaderd.seal.check import verify_directory
from loaderd.seal.create import seal_directory
from loaderd.seal.document import Seal
from loaderd.signature.check import is_outdated
from loaderd.signature.keys import KeyRefused, SigningKey, TrustedKey
from shared.control import Verify, VerifyReport
from shared.errors import DaemonUnreachable, InvalidRequest, UnknownVersion

KEY_VARIABLE = "CHANGEOVER_KEY_PASSPHRASE"

_MOST_JOBS = 32

_STALE = (
    f"warning: {SIGNATURE_FILE} does not cover the new {SEAL_FILE}; sign the folder again "
    "(loaderctl seal DIR --key KEY), or remove it"
)

Jobs = Annotated[
    int | None,
    typer.Option(
        min=1, max=64, metavar="N", help="Threads that hash; as many files side by side.", show_default=False
    ),
]


@dataclass(frozen=True, slots=True)
class _Hashed:
    """A folder that was read, with which key it was signed or held against its signature, and what is
    to be said about it."""

    seal: Seal
    key_hint: str = ""
    key_file: Path | None = None
    warning: str = ""


def seal(
    context: typer.Context,
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", exists=True, file_okay=False, help="A checkpoint folder.")
    ],
    key: Annotated[
        Path | None,
        typer.Option(
            metavar="KEY",
            help="A private key (PEM; P-256, P-384 or P-521): sign the whole folder with it, too. The "
            f"passphrase of an encrypted one is asked for, or taken from {KEY_VARIABLE}.",
            show_default=False,
        ),
    ] = None,
    jobs: Jobs = None,
    json: Json = False,
) -> None:
    """Hash a checkpoint folder and write its seal.json, last and in one step; with a key also model.sig.

    This runs here and not in loaderd. A folder that changes meanwhile is neither sealed nor signed.
    """
    session = session_of(context, is_json=json)
    # Before anything is hashed: a key that cannot be used is told at once.
    signing = _signing_key(session.terminal, key) if key is not None else None

    def hashing(progress: HashProgress) -> _Hashed:
        made = seal_directory(directory, key=signing, jobs=jobs or _default_jobs(), progress=progress)
        if signing is not None:
            return _Hashed(made, signing.hint, key)
        return _Hashed(made, warning=_STALE if is_outdated(directory, made) else "")

    _hash(
        session.terminal,
        directory,
        "sealed and signed" if signing is not None else "sealed",
        "interrupted: no seal was written; an older one is as it was",
        hashing,
    )


def verify(
    context: typer.Context,
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET", help="A resident version; or a folder, told by a slash: ./DIR or DIR/."
        ),
    ],
    key: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="KEY",
            help="A public key (PEM) to trust: hold the folder against its signature, too. May be repeated.",
            show_default=False,
        ),
    ] = None,
    jobs: Jobs = None,
    json: Json = False,
) -> None:
    """Hash a resident version where it lies, while it serves; or a folder's files against its seal and,
    with --key, its signature."""
    session = session_of(context, is_json=json)
    if target not in (".", "..") and "/" not in target:
        given = "--key" if key else "--jobs" if jobs is not None else ""
        if given:
            raise InvalidRequest(f"{given} is for folders: {target} is a version, ./{target} a folder")
        _verify_resident(session, folder_name(target))
        return
    trusted = [TrustedKey.read(path) for path in key or ()]
    directory = Path(target)
    if not directory.is_dir():
        raise InvalidRequest(f"{target} is not a folder")

    def hashing(progress: HashProgress) -> _Hashed:
        found = verify_directory(directory, trusted=trusted, jobs=jobs or _default_jobs(), progress=progress)
        if found.key is None:
            return _Hashed(found.seal)
        return _Hashed(found.seal, found.key.hint, found.key.path)

    _hash(
        session.terminal,
        directory,
        "verified, signed with a trusted key" if trusted else "verified",
        "interrupted: not everything was verified",
        hashing,
    )


def _signing_key(terminal: Terminal, path: Path) -> SigningKey:
    try:
        key = SigningKey.read(path, lambda: _passphrase(path))
    except KeyboardInterrupt:
        _interrupted(terminal, "interrupted: nothing was sealed")
    if key.is_exposed:
        terminal.remark(f"warning: others than its owner can read {path}; chmod 600 it", "yellow")
    return key


def _passphrase(path: Path) -> str:
    """From the environment, else from the terminal; never an argument, which other users could read."""
    given = os.environ.get(KEY_VARIABLE)
    if given is not None:
        return given
    if not sys.stdin.isatty():
        raise KeyRefused(f"{path}: is encrypted; set {KEY_VARIABLE}, or use a terminal", file=str(path))
    try:
        return getpass(f"passphrase of {printable(str(path))}: ")
    except (EOFError, KeyboardInterrupt) as error:
        sys.stderr.write("\n")  # ends the line of the prompt
        if isinstance(error, KeyboardInterrupt):
            raise
        raise KeyRefused(f"{path}: is encrypted, and no passphrase was given", file=str(path)) from None


def _verify_resident(session: Session, name: str) -> None:
    with session.client() as client:
        try:
            report = client.ask(Verify(name=name), VerifyReport, HASH_DEADLINE_S)
        except (UnknownVersion, DaemonUnreachable) as error:
            if not Path(name).is_dir():
                raise
            hint = f"{name} is a folder here; to verify that: loaderctl verify ./{name}"
            raise type(error)(f"{error.message}; {hint}", **error.facts) from error
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


def _hash(
    terminal: Terminal,
    directory: Path,
    done: str,
    interrupted: str,
    hashing: Callable[[HashProgress], _Hashed],
) -> NoReturn:
    progress = HashProgress(terminal, "hashed")
    try:
        with progress:
            hashed = hashing(progress)
    except KeyboardInterrupt:
        _interrupted(terminal, interrupted)
    if hashed.warning:
        terminal.remark(hashed.warning, "yellow")
    made = hashed.seal
    elapsed_s = progress.elapsed_s
    nbytes = sum(file.nbytes for file in made.files.values())
    if terminal.is_json:
        facts: dict[str, object] = {"files": len(made.files), "tensors": len(made.tensors), "bytes": nbytes}
        if hashed.key_hint:
            facts |= {"key": hashed.key_hint, "key_file": str(hashed.key_file)}
        where = str(directory)
        _result(terminal, ExitCode.DONE, "", directory=where, digest=made.digest, seconds=elapsed_s, **facts)
    else:
        terminal.line(
            f"{done}: {directory}, {len(made.tensors)} tensors, {len(made.files)} files, {size(nbytes)} "
            f"in {duration(elapsed_s)} ({rate(nbytes, elapsed_s)})",
            "bold green",
        )
        terminal.line(f"  digest   {made.digest}")
        if hashed.key_hint:
            terminal.line(f"  key      {hashed.key_hint} ({hashed.key_file})")
    raise typer.Exit(ExitCode.DONE)


def _interrupted(terminal: Terminal, message: str) -> NoReturn:
    terminal.error(message)
    if terminal.is_json:
        _result(terminal, ExitCode.INTERRUPTED, message)
    raise typer.Exit(ExitCode.INTERRUPTED) from None


def _result(terminal: Terminal, code: ExitCode, message: str, **fields: object) -> None:
    terminal.json(
        {"event": "result", "outcome": code.label, "exit_code": code.value, "message": message, **fields}
    )


def _default_jobs() -> int:
    return min(_MOST_JOBS, len(os.sched_getaffinity(0)))
