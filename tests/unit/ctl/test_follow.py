"""The wait for an operation, with a clock that only the script moves."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import get_args

import pytest

from loaderd.ctl.exit_codes import ExitCode
from loaderd.ctl.follow import RETURN_WITHIN_S, Follower, outcome
from shared.control import Event, Operation, OperationReport, OperationState
from shared.errors import (
    ChangeoverError,
    DaemonUnreachable,
    DeadlineExceeded,
    InvalidRequest,
    NotPermitted,
    ProtocolError,
    ResourceError,
)
from tests.unit.ctl import reports
from tests.unit.ctl.reports import OPERATION

AWAY = DaemonUnreachable("loaderd is not there")


@dataclass
class Stage:
    """Client, event stream, watcher and clock in one."""

    answers: list[OperationReport | ChangeoverError]
    incoming: list[list[Event]] = field(default_factory=list)
    now: float = 0.0
    seen: list[str] = field(default_factory=list)
    asked_at: list[float] = field(default_factory=list)

    def ask(
        self, body: Operation, expected: type[OperationReport], deadline_s: float = 5.0
    ) -> OperationReport:
        assert body.operation == OPERATION
        assert expected is OperationReport
        assert 0 < deadline_s <= 2.0
        self.asked_at.append(self.now)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, ChangeoverError):
            raise answer
        return answer

    def wait(self, timeout_s: float | None) -> list[Event]:
        assert timeout_s is not None
        if self.incoming:
            return self.incoming.pop(0)
        self.now += timeout_s
        return []

    def report(self, report: OperationReport) -> None:
        self.seen.append(report.stage)

    def lost(self, reason: str) -> None:
        self.seen.append("lost")

    def found(self) -> None:
        self.seen.append("found")

    def follower(self, *, is_known: bool = True, timeout_s: float | None = None) -> Follower:
        return Follower(
            self, self, self, OPERATION, is_known=is_known, timeout_s=timeout_s, clock=lambda: self.now
        )


def event(kind: str = "operation.progress", operation: str = OPERATION) -> Event:
    return Event(protocol=1, generation="g", sequence=1, time_ns=0, kind=kind, operation=operation)


def test_every_state_has_an_outcome() -> None:
    codes = {state: outcome(reports.operation(state=state)) for state in get_args(OperationState)}
    assert codes == {
        "running": None,
        "done": ExitCode.DONE,
        "refused": ExitCode.REFUSED,
        "failed": ExitCode.FAILED,
        "superseded": ExitCode.SUPERSEDED,
    }


def test_it_asks_every_half_second_without_events() -> None:
    stage = Stage([reports.operation(), reports.operation(), reports.ended()])
    assert stage.follower().run().code is ExitCode.DONE
    assert stage.asked_at == [0.0, 0.5, 1.0]


def test_an_event_of_the_operation_is_a_reason_to_ask_and_another_is_not() -> None:
    stage = Stage(
        [reports.operation(), reports.operation(), reports.operation(), reports.ended()],
        [[event()], [event("daemon.started", "")], [event(operation="another")]],
    )
    stage.follower().run()
    assert stage.asked_at == [0.0, 0.0, 0.0, 0.5]


def test_the_timeout_is_not_the_end_of_the_operation() -> None:
    stage = Stage([reports.operation()])
    conclusion = stage.follower(timeout_s=1.2).run()
    assert conclusion.code is ExitCode.TIMED_OUT
    assert conclusion.report == reports.operation()
    assert stage.asked_at == [0.0, 0.5, 1.0, 1.2]


def test_an_operation_that_ends_at_the_timeout_has_ended() -> None:
    stage = Stage([reports.ended()])
    assert stage.follower(timeout_s=0).run().code is ExitCode.DONE


def test_away_is_told_once_and_so_is_the_return() -> None:
    stage = Stage(
        [reports.operation(), AWAY, DeadlineExceeded("late"), ResourceError("busy"), reports.ended()]
    )
    assert stage.follower().run().code is ExitCode.DONE
    assert stage.seen == ["loading", "lost", "found", "finished"]


def test_away_for_good_is_given_up_with_and_without_a_timeout() -> None:
    stage = Stage([reports.operation(), AWAY])
    assert stage.follower().run().code is ExitCode.UNREACHABLE
    assert stage.now == pytest.approx(RETURN_WITHIN_S + 0.5)
    stage = Stage([reports.operation(), AWAY])
    assert stage.follower(timeout_s=500).run().code is ExitCode.UNREACHABLE
    assert stage.now == pytest.approx(500)


@pytest.mark.parametrize("error", [AWAY, InvalidRequest("no such operation")])
def test_an_operation_that_was_never_heard_of_is_an_error(error: ChangeoverError) -> None:
    with pytest.raises(type(error)):
        Stage([error]).follower(is_known=False).run()


def test_an_operation_that_was_known_once_and_is_not_any_more_has_failed() -> None:
    stage = Stage([reports.operation(), InvalidRequest("no such operation")])
    conclusion = stage.follower(is_known=False).run()
    assert conclusion.code is ExitCode.FAILED
    assert "does not know" in conclusion.message


@pytest.mark.parametrize("error", [NotPermitted("no"), ProtocolError("another protocol")])
def test_an_answer_that_asking_again_cannot_change_ends_the_wait(error: ChangeoverError) -> None:
    with pytest.raises(type(error)):
        Stage([reports.operation(), error]).follower().run()
