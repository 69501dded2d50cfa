"""What happened, told once: to the journal, to subscribers and to the log."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Protocol

import structlog
import zmq

from loaderd.journal import Journal
from shared.codec import CONTROL_FRAME_BYTES, PROTOCOL_VERSION, encode
from shared.control import Event
from shared.errors import Fact, ResourceError
from shared.ids import Generation
from shared.messages import cut_text

log = structlog.get_logger(__name__)


class Publisher(Protocol):
    """Where events go, as a ZeroMQ socket takes them."""

    def send_multipart(self, msg_parts: Sequence[bytes], flags: int = 0) -> object:
        """Send the frames of one message."""
        ...


TROUBLE = frozenset(
    {
        "inferd.not_reconciled",
        "inferd.not_retained",
        "inferd.release_failed",
        "lease.closed",
        "lease.refused",
        "memory.not_freed",
        "push.refused",
        "restore.refused",
        "rollout.straggler",
        "version.damaged",
    }
)
"""Kinds that an operator who reads warnings only must see."""


class Chronicle:
    """Publishes events on the PUB socket, and journals those that must outlive this process.

    Used from the event loop's thread only.
    """

    def __init__(self, journal: Journal, generation: Generation, borrow_publisher: Publisher) -> None:
        self.journal = journal
        self.generation = generation
        self._publisher = borrow_publisher
        self._sequence = 0

    def record(
        self,
        kind: str,
        text: str = "",
        *,
        model: str = "",
        version: str = "",
        operation: str = "",
        **data: Fact,
    ) -> None:
        """Journal a fact, publish it and log it.

        A full disk leaves a gap in the history and a line in the log; it does not stop what happened
        from having happened.  Only the decision to commit must be on disk: see `Journal.commit`.
        """
        text = cut_text(text)
        try:
            self.journal.append(
                kind, model=model, version=version, operation=operation, cause=text, data=data
            )
        except ResourceError as error:
            log.error("history.gap", kind=kind, error=error.message)
        about = {"model": model, "version": version, "operation": operation}
        is_trouble = kind in TROUBLE or data.get("state") in ("failed", "refused")
        log.log(
            logging.WARNING if is_trouble else logging.INFO,
            kind,
            text=text,
            **{key: value for key, value in about.items() if value},
            **data,
        )
        self.publish(kind, text, model=model, version=version, operation=operation, **data)

    def publish(
        self,
        kind: str,
        text: str = "",
        *,
        model: str = "",
        version: str = "",
        operation: str = "",
        **data: Fact,
    ) -> None:
        """Publish something that only matters while it is new.  Never waits: subscribers that are too
        slow lose events, and see it by the sequence number."""
        self._sequence += 1
        event = Event(
            protocol=PROTOCOL_VERSION,
            generation=self.generation,
            sequence=self._sequence,
            time_ns=time.time_ns(),
            kind=kind,
            model=model,
            version=version,
            operation=operation,
            text=cut_text(text),
            data=data,
        )
        self._publisher.send_multipart([kind.encode(), encode(event, CONTROL_FRAME_BYTES)], zmq.DONTWAIT)
