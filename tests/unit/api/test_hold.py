"""A ticket is given back once, by whoever lets go last."""

from __future__ import annotations

import threading

import pytest

from inferd.api.admission import Ticket
from inferd.api.hold import REQUEST, Hold
from shared.errors import InvariantError

from .serving import V1, V2

TICKET = Ticket(0, V1)


def held() -> tuple[Hold, list[Ticket]]:
    given_back: list[Ticket] = []
    return Hold(TICKET, given_back.append), given_back


def test_the_last_holder_gives_it_back() -> None:
    hold, given_back = held()
    hold.join(1)
    hold.join(2)
    hold.leave(1)
    hold.leave(REQUEST)
    assert given_back == []
    hold.leave(2)
    assert given_back == [TICKET]


def test_leaving_twice_changes_nothing() -> None:
    hold, given_back = held()
    hold.join(1)
    hold.leave(1)
    hold.leave(1)
    assert given_back == []
    hold.leave(REQUEST)
    hold.leave(REQUEST)
    hold.leave(1)
    assert given_back == [TICKET]


def test_nobody_joins_after_the_request_left() -> None:
    hold, _ = held()
    hold.leave(REQUEST)
    with pytest.raises(InvariantError):
        hold.join(1)


def test_threads_that_leave_together_give_it_back_once() -> None:
    for _ in range(50):
        hold, given_back = held()
        hold.join(1)
        start = threading.Barrier(4)

        def leave(who: int, hold: Hold = hold, start: threading.Barrier = start) -> None:
            start.wait()
            hold.leave(who)

        threads = [threading.Thread(target=leave, args=(who,)) for who in (REQUEST, REQUEST, 1, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert given_back == [TICKET]


def test_a_ticket_of_another_version_goes_back_with_the_first() -> None:
    hold, given_back = held()
    hold.join(1)
    hold.leave(REQUEST)
    hold.extend(Ticket(1, V2))
    assert given_back == []
    hold.leave(1)
    assert given_back == [TICKET, Ticket(1, V2)]


def test_a_ticket_that_comes_too_late_goes_back_at_once() -> None:
    hold, given_back = held()
    hold.leave(REQUEST)
    hold.extend(Ticket(1, V2))
    assert given_back == [TICKET, Ticket(1, V2)]
