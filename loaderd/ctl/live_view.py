"""Showing a push or rollback on a terminal: bars for bytes read, verified and inferds prepared."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.progress import BarColumn, Progress, TaskID

from loaderd.ctl.follow import Conclusion
from loaderd.ctl.operation_view import show_conclusion
from loaderd.ctl.progress_columns import Amount, Title
from loaderd.ctl.summary import plan_lines, reattach, version_name
from loaderd.ctl.terminal import Terminal
from loaderd.ctl.text import rate, size
from shared.control import OperationReport, PushReply

_STAGES = ("planning", "loading", "verifying", "preparing", "committing", "finished")


class LiveView:
    """Bars that are redrawn in place at each report; everything else is printed above them."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        # Redrawn by `report` alone: no thread that could write to the terminal after the end.
        self._progress = Progress(
            Title(), BarColumn(bar_width=32), Amount(), console=terminal.out, auto_refresh=False
        )
        self._is_shown = False
        self._bars: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hide()

    def plan(self, reply: PushReply) -> None:
        """The plan's lines."""
        for line in plan_lines(reply.plan):
            self._terminal.line(line.text, line.style)

    def started(self, operation: str) -> None:
        """How to wait for it."""
        self._terminal.line(reattach(operation))

    def report(self, report: OperationReport) -> None:
        """Bring every bar up to date and redraw."""
        if report.kind == "push" or report.bytes_total:
            self._bytes("read", "loading", report.bytes_read, report.load_s, report)
            self._bytes("verified", "verifying", report.bytes_verified, report.verify_s, report)
        prepared, total = report.inferds_prepared, report.inferds_total
        self._bar("prepared", prepared, total or None, f"{prepared} of {total} inferds")
        if self._is_shown:
            self._progress.refresh()
            return
        self._terminal.line(f"{report.kind} of {version_name(report)} is {report.operation}")
        self._progress.start()
        self._is_shown = True

    def lost(self, reason: str) -> None:
        """A remark above the bars."""
        self._terminal.line(f"{reason}; still trying, the operation may go on", "yellow")

    def found(self) -> None:
        """A remark above the bars."""
        self._terminal.line("loaderd answers again", "green")

    def conclude(self, conclusion: Conclusion) -> None:
        """End the bars; the outcome on stdout and, if it is not success, why on stderr."""
        self._hide()
        show_conclusion(self._terminal, conclusion)

    def _bytes(self, title: str, stage: str, done: int, seconds: float, report: OperationReport) -> None:
        # Shared tensors are not read: past its stage a bar is full, whatever the version's size.
        is_past = report.state == "running" and _STAGES.index(report.stage) > _STAGES.index(stage)
        is_full = is_past or report.state == "done"
        total = done if is_full else report.bytes_total
        speed = rate(done, seconds)
        amount = f"{size(done)}" if is_full else f"{size(done)} of {size(report.bytes_total)}"
        self._bar(title, done or int(is_full), total or 1, amount + (f", {speed}" if speed else ""))

    def _bar(self, title: str, done: int, total: int | None, amount: str) -> None:
        if title not in self._bars:
            self._bars[title] = self._progress.add_task(title, total=total, amount=amount)
        self._progress.update(self._bars[title], completed=done, total=total, amount=amount)

    def _hide(self) -> None:
        if self._is_shown:
            self._progress.stop()
            self._is_shown = False
