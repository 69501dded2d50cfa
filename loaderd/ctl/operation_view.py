"""Showing a push or rollback as it goes: JSON lines for programs, plain lines for logs."""

from __future__ import annotations

import time
from collections.abc import Callable, Container
from types import TracebackType
from typing import Protocol, Self

from loaderd.ctl.follow import Conclusion
from loaderd.ctl.summary import failure, hashed_bytes, outcome_lines, plan_lines, reattach, version_name
from loaderd.ctl.terminal import Terminal
from loaderd.ctl.text import rate, size
from shared.control import OperationReport, PushReply, Stage

PROGRESS_EVERY_S = 2.0


class OperationView(Protocol):
    """Shows one operation; used as a context, so that a live display ends with it."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def plan(self, reply: PushReply) -> None:
        """The daemon has planned a push."""
        ...

    def started(self, operation: str) -> None:
        """An operation runs and nobody waits for it."""
        ...

    def report(self, report: OperationReport) -> None:
        """The operation has come this far; called often, also without news."""
        ...

    def lost(self, reason: str) -> None:
        """The daemon does not answer; it will be asked again."""
        ...

    def found(self) -> None:
        """The daemon answers again."""
        ...

    def conclude(self, conclusion: Conclusion) -> None:
        """Waiting is over."""
        ...


class JsonView:
    """One JSON object per line; the last has `event` = `result`."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._latest: OperationReport | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def plan(self, reply: PushReply) -> None:
        """A line `plan`."""
        self._terminal.json(
            {"event": "plan", "operation": reply.operation, "plan": reply.plan.model_dump(mode="json")}
        )

    def started(self, operation: str) -> None:
        """A line `started`."""
        self._terminal.json({"event": "started", "operation": operation})

    def report(self, report: OperationReport) -> None:
        """A line `stage` for a new stage, and a line `progress` for any news."""
        before, self._latest = self._latest, report
        if before == report:
            return
        if before is None or before.stage != report.stage:
            self._terminal.json({"event": "stage", "operation": report.operation, "stage": report.stage})
        self._terminal.json({"event": "progress", "report": report.model_dump(mode="json")})

    def lost(self, reason: str) -> None:
        """A line `unreachable`."""
        self._terminal.json({"event": "unreachable", "message": reason})

    def found(self) -> None:
        """A line `reconnected`."""
        self._terminal.json({"event": "reconnected"})

    def conclude(self, conclusion: Conclusion) -> None:
        """The line `result`."""
        report = conclusion.report
        self._terminal.json(
            {
                "event": "result",
                "operation": conclusion.operation or None,
                "outcome": conclusion.code.label,
                "exit_code": conclusion.code.value,
                "message": failure(conclusion),
                "report": None if report is None else report.model_dump(mode="json"),
            }
        )


class TextView:
    """What people read before anything moves, and what of the plan is needed later."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._verify_bytes = 0
        self._warnings: tuple[str, ...] = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def plan(self, reply: PushReply) -> None:
        """The plan's lines."""
        self._verify_bytes, self._warnings = reply.plan.bytes_total, reply.plan.warnings
        for line in plan_lines(reply.plan):
            self._terminal.line(line.text, line.style)

    def started(self, operation: str) -> None:
        """How to wait for it."""
        self._terminal.line(reattach(operation))


class LineView(TextView):
    """Plain lines: one per stage, and one about every PROGRESS_EVERY_S while bytes move."""

    def __init__(self, terminal: Terminal, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(terminal)
        self._clock = clock
        self._start = clock()
        self._stage: Stage | None = None
        self._said = ""
        self._said_at = self._start

    def report(self, report: OperationReport) -> None:
        """A line if the stage is new, or if there is news and the last line is old enough."""
        now = self._clock()
        detail = progress_detail(report, self._verify_bytes)
        is_new_stage = report.stage != self._stage
        if not is_new_stage and (detail == self._said or now - self._said_at < PROGRESS_EVERY_S):
            return
        if self._stage is None:
            self._terminal.line(f"{report.kind} of {version_name(report)} is {report.operation}")
        if report.stage != "finished":
            self._terminal.line(f"{now - self._start:7.1f} s  {report.stage:<10}  {detail}".rstrip())
        self._stage, self._said, self._said_at = report.stage, detail, now

    def lost(self, reason: str) -> None:
        """A remark on stderr."""
        self._terminal.remark(f"{reason}; still trying, the operation may go on", "yellow")

    def found(self) -> None:
        """A remark on stderr."""
        self._terminal.remark("loaderd answers again", "green")

    def conclude(self, conclusion: Conclusion) -> None:
        """The outcome on stdout and, if it is not success, why on stderr."""
        show_conclusion(self._terminal, conclusion, self._warnings)


def progress_detail(report: OperationReport, verify_bytes: int = 0) -> str:
    """How far the present stage is.

    `verify_bytes` is how many the plan wants verified, 0 where it is not known: all of the version's,
    while `report.bytes_total` counts only those that are read.
    """
    match report.stage:
        case "hashing" | "loading":
            speed = rate(report.bytes_read, report.load_s)
            return _amount(report.bytes_read, report.bytes_total, speed) + _throttled(report)
        case "verifying":
            speed = rate(hashed_bytes(report), report.verify_s)
            return _amount(report.bytes_verified, verify_bytes, speed) + _throttled(report)
        case "preparing":
            return f"{report.inferds_prepared} of {report.inferds_total} inferds"
        case "committing":
            return f"{report.inferds_committed} of {report.inferds_total} inferds"
        case "planning" | "finished":
            return ""


def show_conclusion(terminal: Terminal, conclusion: Conclusion, said: Container[str]) -> None:
    """The outcome on stdout and, if it is not success, why on stderr; `said` are known warnings."""
    for line in outcome_lines(conclusion, said):
        terminal.line(line.text, line.style)
    message = failure(conclusion)
    if message:
        terminal.error(message)


def _throttled(report: OperationReport) -> str:
    if report.limit_bytes_per_s is None:
        return ""
    return f", throttled to {size(report.limit_bytes_per_s)}/s to spare requests"


def _amount(done_bytes: int, total_bytes: int, speed: str) -> str:
    tail = f", {speed}" if speed else ""
    if not total_bytes:
        return size(done_bytes) + tail if done_bytes else ""
    return f"{size(done_bytes)} of {size(total_bytes)} ({done_bytes * 100 // total_bytes} %){tail}"
