"""A ticket and everyone who still needs it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from inferd.api.admission import Ticket
from shared.errors import InvariantError

REQUEST: Final = 0
"""The share of the request itself, until it has submitted its last sequence."""


class Hold:
    """Gives `ticket` back when the request and each of its sequences have let go: once, whoever is last.

    A version must outlive the engine's work on it, not the client's reading: a client that is slow to
    read an answer which is complete does not keep the version in its slot, and one that went away does
    until the engine says that the sequence ended.  Thread-safe.
    """

    def __init__(self, ticket: Ticket, give_back: Callable[[Ticket], None]) -> None:
        self.ticket = ticket
        self._give_back = give_back
        self._lock = threading.Lock()
        self._holders = {REQUEST}

    def join(self, sequence_id: int) -> None:
        """Hold the ticket for a sequence too; the request must still hold it."""
        with self._lock:
            if REQUEST not in self._holders:
                raise InvariantError(f"sequence {sequence_id} joins a ticket that its request gave back")
            self._holders.add(sequence_id)

    def leave(self, holder: int) -> None:
        """Let go for `holder`; does nothing if it did so before."""
        with self._lock:
            if holder not in self._holders:
                return
            self._holders.discard(holder)
            is_last = not self._holders
        if is_last:
            self._give_back(self.ticket)
