"""How the API gets hold of a version: a ticket per request, given back exactly once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from shared.errors import CallerError
from shared.ids import VersionTag


class NotReady(CallerError):
    """No version serves, or the daemon drains; the caller may ask again later."""

    code = "not_ready"


@dataclass(frozen=True, slots=True)
class Ticket:
    """A reference on a slot: while it is held, the version in the slot is not retired."""

    slot: int
    tag: VersionTag


class Admission(Protocol):
    """Which versions are there and which one a request runs on.  Every method returns at once and
    may be called from any thread."""

    model: str  # the name that requests ask for

    def acquire(self, session_id: str | None) -> Ticket:
        """A ticket for the version that a new request runs on.  A session stays on its version while
        that version is resident.  Raises NotReady when no version serves or the daemon drains."""
        ...

    def release(self, ticket: Ticket) -> None:
        """Give a ticket back, once.  Called on the event loop or on the engine's thread."""
        ...

    def serving(self) -> VersionTag | None:
        """The version that new requests without a session run on."""
        ...

    def resident(self) -> tuple[VersionTag, ...]:
        """Every version that can still answer requests, the serving one first."""
        ...
