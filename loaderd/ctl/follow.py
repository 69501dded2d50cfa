"""Waiting for a push or rollback to end: one way to learn its state, however it changed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, assert_never

from loaderd.ctl.exit_codes import ExitCode
from shared.control import Event, Operation, OperationReport
from shared.errors import ChangeoverError, InvalidRequest, NotPermitted, ProtocolError, UnknownVersion

ASK_EVERY_S = 0.5
ANSWER_WITHIN_S = 2.0

RETURN_WITHIN_S = 120.0
"""How long a daemon may stay away where the caller gave no timeout: a restart that adopts memory is
done well before."""


@dataclass(frozen=True, slots=True)
class Conclusion:
    """Why waiting ended; `message` says what the report does not."""

    code: ExitCode
    operation: str
    report: OperationReport | None
    message: str = ""


class Reporter(Protocol):
    """What the wait needs of a client."""

    def ask(
        self, body: Operation, expected: type[OperationReport], deadline_s: float = ..., /
    ) -> OperationReport: ...


class Wakeups(Protocol):
    """What the wait needs of an event stream."""

    def wait(self, timeout_s: float | None) -> list[Event]: ...


class Watcher(Protocol):
    """Who is told what was learnt."""

    def report(self, report: OperationReport) -> None: ...

    def lost(self, reason: str) -> None: ...

    def found(self) -> None: ...


def outcome(report: OperationReport) -> ExitCode | None:
    """The exit code that an ended operation stands for; None while it runs."""
    match report.state:
        case "running":
            return None
        case "done":
            return ExitCode.DONE
        case "refused":
            return ExitCode.REFUSED
        case "failed":
            return ExitCode.FAILED
        case "superseded":
            return ExitCode.SUPERSEDED
        case _:
            assert_never(report.state)


@dataclass(slots=True)
class Follower:
    """Asks after one operation until it ends, time is up or the daemon stays away."""

    client: Reporter
    events: Wakeups
    watcher: Watcher
    operation: str
    is_known: bool  # loaderd has already spoken of this operation
    timeout_s: float | None = None
    clock: Callable[[], float] = time.monotonic
    latest: OperationReport | None = None

    def run(self) -> Conclusion:
        """Block until there is a conclusion.

        Raises NotPermitted and ProtocolError, and any error where loaderd never spoke of the operation.
        """
        start = self.clock()
        lost_at: float | None = None
        while True:
            try:
                report = self.client.ask(
                    Operation(operation=self.operation), OperationReport, self._answer_within(start)
                )
            except (NotPermitted, ProtocolError):
                raise
            except (InvalidRequest, UnknownVersion) as error:
                if not self.is_known:
                    raise
                return self._conclude(
                    ExitCode.FAILED,
                    f"loaderd does not know {self.operation} any more: {error.message}. What serves is in "
                    "loaderctl status, how far it came in loaderctl history; if need be, ask for it again",
                )
            except ChangeoverError as error:
                # Away, overloaded or out of order: that says nothing about the operation.
                if not self.is_known:
                    raise
                if lost_at is None:
                    lost_at = self.clock()
                    self.watcher.lost(error.message)
            else:
                self.is_known = True
                if lost_at is not None:
                    lost_at = None
                    self.watcher.found()
                self.latest = report
                self.watcher.report(report)
                code = outcome(report)
                if code is not None:
                    return self._conclude(code)
            now = self.clock()
            if lost_at is not None and self._is_given_up(start, lost_at, now):
                return self._conclude(
                    ExitCode.UNREACHABLE,
                    f"loaderd stayed away for {now - lost_at:.0f} s; what became of {self.operation} "
                    f"is not known. When it is back: loaderctl wait {self.operation}",
                )
            if self.timeout_s is not None and now - start >= self.timeout_s:
                return self._conclude(
                    ExitCode.TIMED_OUT,
                    f"{self.operation} goes on after {self.timeout_s:g} s. "
                    f"To wait for it again: loaderctl wait {self.operation}",
                )
            self._sleep(start)

    def _conclude(self, code: ExitCode, message: str = "") -> Conclusion:
        return Conclusion(code, self.operation, self.latest, message)

    def _is_given_up(self, start: float, lost_at: float, now: float) -> bool:
        if self.timeout_s is not None:
            return now - start >= self.timeout_s
        return now - lost_at >= RETURN_WITHIN_S

    def _left(self, start: float, most: float) -> float:
        if self.timeout_s is None:
            return most
        return min(most, max(0.0, start + self.timeout_s - self.clock()))

    def _answer_within(self, start: float) -> float:
        # The last question before the timeout still gets a fair chance of an answer.
        return max(0.1, self._left(start, ANSWER_WITHIN_S))

    def _sleep(self, start: float) -> None:
        """Wait for an event that may concern the operation, at most ASK_EVERY_S."""
        end = self.clock() + self._left(start, ASK_EVERY_S)
        while (left := end - self.clock()) > 0:
            for event in self.events.wait(left):
                if event.operation == self.operation or event.kind == "daemon.started":
                    return
