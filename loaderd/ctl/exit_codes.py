"""What loaderctl's exit status says; scripts decide by it, so a number never changes its meaning."""

from __future__ import annotations

from enum import IntEnum

from shared.errors import (
    CallerError,
    ChangeoverError,
    CheckpointError,
    DaemonUnreachable,
    DeadlineExceeded,
    NotPermitted,
    PeerError,
    PlanRefused,
    Superseded,
    WarmupFailed,
)


class ExitCode(IntEnum):
    """One outcome per code; 1 is left to Python for a crash."""

    meaning: str

    DONE = 0, "done"
    USAGE = 2, "not possible as asked: an option, a name, a key, nothing to roll back to"
    FAILED = 3, "failed, rolled back, or no good folder: what served before serves"
    TIMED_OUT = 4, "timed out: loaderctl stopped waiting, the push continues"
    REFUSED = 5, "refused by the plan: nothing was changed"
    UNREACHABLE = 6, "loaderd is unreachable"
    NOT_PERMITTED = 7, "not permitted"
    SUPERSEDED = 8, "superseded: a newer push took this one's place"
    INTERRUPTED = 130, "interrupted by Ctrl-C: loaderctl stopped waiting, the push continues"
    CLOSED_PIPE = 141, "the reader of the output went away"

    def __new__(cls, number: int, meaning: str) -> ExitCode:
        """A member with its meaning for help and documentation."""
        code = int.__new__(cls, number)
        code._value_ = number
        code.meaning = meaning
        return code

    @property
    def label(self) -> str:
        """The name as JSON output spells it."""
        return self.name.lower()


_BY_ERROR: tuple[tuple[type[ChangeoverError], ExitCode], ...] = (
    (NotPermitted, ExitCode.NOT_PERMITTED),
    (PlanRefused, ExitCode.REFUSED),
    (Superseded, ExitCode.SUPERSEDED),
    (DeadlineExceeded, ExitCode.TIMED_OUT),
    (DaemonUnreachable, ExitCode.UNREACHABLE),
    (CheckpointError, ExitCode.FAILED),
    (WarmupFailed, ExitCode.FAILED),
    (CallerError, ExitCode.USAGE),
    (PeerError, ExitCode.UNREACHABLE),  # something answers, but not in a way that can be used
)


def exit_code_of(error: ChangeoverError) -> ExitCode:
    """The exit code for an error that ended a command."""
    return next((code for kind, code in _BY_ERROR if isinstance(error, kind)), ExitCode.FAILED)


def help_epilog() -> str:
    """The table of exit codes for `--help`."""
    return "\n".join(["Exit codes:", *(f"{code.value:>4}  {code.meaning}" for code in ExitCode)])
