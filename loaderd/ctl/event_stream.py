"""Events from loaderd over `events.sock`, and what a break in their numbering means."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import zmq

from shared.closing import Closing
from shared.codec import CONTROL_FRAME_BYTES, PROTOCOL_VERSION, decode
from shared.control import EVENT, Event
from shared.errors import ProtocolError

_BURST = 1000


class EventStream(Closing):
    """A subscription to everything that loaderd publishes.  Events may be lost; nothing that matters
    may depend on one."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], path: Path) -> None:
        self._socket: zmq.Socket[bytes] = context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, CONTROL_FRAME_BYTES)
        self._socket.subscribe(b"")
        self._socket.connect(f"ipc://{path}")
        self.unreadable = 0
        """Frames that were dropped because they are not events of this protocol."""

    def close(self) -> None:
        """End the subscription."""
        self._socket.close(linger=0)

    def wait(self, timeout_s: float | None) -> list[Event]:
        """Events that have arrived, oldest first; blocks until there is a frame or the time is up."""
        events: list[Event] = []
        timeout_ms = None if timeout_s is None else max(0, round(timeout_s * 1e3))
        for _ in range(_BURST):
            if not self._socket.poll(timeout_ms, zmq.POLLIN):
                break
            timeout_ms = 0
            event = _read(self._socket.recv_multipart(zmq.NOBLOCK))
            if event is None:
                self.unreadable += 1
            else:
                events.append(event)
        return events


def _read(frames: list[bytes]) -> Event | None:
    if len(frames) != 2:
        return None
    try:
        event = decode(frames[1], EVENT, CONTROL_FRAME_BYTES)
    except ProtocolError:
        return None
    return event if event.protocol == PROTOCOL_VERSION else None


@dataclass(slots=True)
class Numbering:
    """Follows event numbers and tells what is missing."""

    generation: str = ""
    sequence: int = 0

    def observe(self, event: Event) -> str:
        """What a reader must know before this event: lost events, a restart, or nothing (empty)."""
        before = (self.generation, self.sequence)
        self.generation, self.sequence = event.generation, event.sequence
        if not before[0]:
            return ""
        if before[0] != event.generation:
            return f"loaderd was restarted: generation {event.generation}"
        missing = event.sequence - before[1] - 1
        if missing > 0:
            return f"{missing} events were lost before #{event.sequence}"
        return ""
