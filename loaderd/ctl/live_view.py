"""Showing a push or rollback on a terminal: bars for bytes read, verified and inferds prepared."""

from __future__ import annotations

from types import TracebackType
from typing import get_args

from rich.progress import BarColumn, Progress, TaskID

from loaderd.ctl.follow import Conclusion
from loaderd.ctl.operation_view import TextView, show_conclusion
from loaderd.ctl.progress_columns import Amount, Title
from loaderd.ctl.summary import hashed_bytes, version_name
from loaderd.ctl.terminal import Terminal
from loaderd.ctl.text import rate, size
from shared.control import OperationReport, Stage

_STAGES = get_args(Stage)


class LiveView(TextView):
    """Bars that are redrawn in place at each report; everything else is printed above them."""

    def __init__(self, terminal: Terminal) -> None:
        super().__init__(terminal)
        # Redrawn by `report` alone: no thread that could write to the terminal after the end.
        self._progress = Progress(
            Title(), BarColumn(bar_width=32), Amount(), console=terminal.out, auto_refresh=False
        )
        self._is_shown = False
        self._hash_bytes = 0  # of a signed version, before it loads
        self._bars: dict[str, TaskID] = {}

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hide()

    def report(self, report: OperationReport) -> None:
        """Bring every bar up to date and redraw."""
        if report.stage == "hashing":
            # The counters are of another reading: they begin again when it loads.
            self._hash_bytes = report.bytes_total
            self._bytes("hashed", report.bytes_read, report.bytes_total, "", is_full=False)
        elif report.kind == "push":
            if self._hash_bytes:
                self._bytes("hashed", self._hash_bytes, 0, "", is_full=True)
            is_loaded, is_verified = _is_past(report, "loading"), _is_past(report, "verifying")
            speed = rate(report.bytes_read, report.load_s)
            self._bytes("read", report.bytes_read, report.bytes_total, speed, is_full=is_loaded)
            verified, verify_bytes = report.bytes_verified, self._verify_bytes
            speed = rate(hashed_bytes(report), report.verify_s)
            self._bytes("verified", verified, verify_bytes, speed, is_full=is_verified)
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
        show_conclusion(self._terminal, conclusion, self._warnings)

    def _bytes(self, title: str, done: int, total: int, speed: str, *, is_full: bool) -> None:
        amount = f"{size(done)} of {size(total)}" if total and not is_full else size(done)
        if is_full:
            # There may have been nothing to read.
            done, total = max(done, 1), max(done, 1)
        self._bar(title, done, total or None, amount + (f", {speed}" if speed else ""))

    def _bar(self, title: str, done: int, total: int | None, amount: str) -> None:
        if title not in self._bars:
            self._bars[title] = self._progress.add_task(title, total=total, amount=amount)
        self._progress.update(self._bars[title], completed=done, total=total, amount=amount)

    def _hide(self) -> None:
        if self._is_shown:
            self._progress.stop()
            self._is_shown = False


def _is_past(report: OperationReport, stage: Stage) -> bool:
    """Whether an operation has left `stage` behind; one that failed stays where it was."""
    return report.state == "done" or _STAGES.index(report.stage) > _STAGES.index(stage)
