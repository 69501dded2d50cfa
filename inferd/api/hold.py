"""A request's tickets and everyone who still needs them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from inferd.api.admission import Ticket
from shared.errors import InvariantError

REQUEST: Final = 0
"""The share of the request itself, until it has submitted its last sequence."""


class Hold:
    """Gives tickets back when the request and each of its sequences have let go: once, whoever is last.

    There is one ticket, or one per version that the request's sequences were moved to.

    A version must outlive the engine's work on it, not the client's reading: a client that is slow to
    read an answer which is complete does not keep the version in its slot, and one that went away does
    until the engine says that the sequence ended.  Thread-safe.
    """

    def __init__(self, ticket: Ticket, give_back: Callable[[Ticket], None]) -> None:
        self._tickets = [ticket]
        self._give_back = give_back
        self._lock = threading.Lock()
        self._holders = {REQUEST}

    def join(self, sequence_id: int) -> None:
        """Hold the tickets for a sequence too; the request must still hold them."""
        with self._lock:
            if REQUEST not in self._holders:
                raise InvariantError(f"sequence {sequence_id} joins a ticket that its request gave back")
            self._holders.add(sequence_id)

    def extend(self, ticket: Ticket) -> None:
        """Hold `ticket` too; it goes back at once if nobody holds the others any more."""
        with self._lock:
            is_held = bool(self._holders)
            if is_held:
                self._tickets.append(ticket)
        if not is_held:
            self._give_back(ticket)

    def leave(self, holder: int) -> None:
        """Let go for `holder`; does nothing if it did so before."""
        with self._lock:
            if holder not in self._holders:
                return
            self._holders.discard(holder)
            is_last = not self._holders
        if is_last:
            for ticket in self._tickets:
                self._give_back(ticket)
