"""The events socket: whoever reaches it may subscribe, and nobody can make it grow or wait.

A subscription is a path in libzmq's tree of topics, kept by this process: a subscriber with a million
topics would cost gigabytes, and the loop's time.  libzmq has no limit for it, so they are counted here.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import structlog
import zmq

from shared.closing import Closing
from shared.run_dir import remove_left_over

log = structlog.get_logger(__name__)

QUEUED_EVENTS = 4_000
"""Events that wait for a slow subscriber before its further ones are dropped; a few hundred bytes each."""

TOPICS = 200
"""Different topics at a time, over all subscribers; there are about thirty kinds of events."""

FRAME_BYTES = 64
"""Longest frame of a subscriber, which loses its connection with a longer one: a handshake takes 30."""

QUEUED_FRAMES = 16
"""Frames that are taken from a subscriber ahead of their turn."""


class EventSocket(Closing):
    """Owns the socket and its file.  Used from the event loop's thread only."""

    def __init__(self, borrow_context: zmq.Context[zmq.Socket[bytes]], path: Path, mode: int) -> None:
        """Bind at `path`, replacing a left-over file; raises ConfigError if that is another
        user's, ZMQError as `bind` does."""
        self._context = borrow_context
        self._path = path
        self._mode = mode
        self._topics = 0
        self._socket = self._bound()

    def send_multipart(self, msg_parts: Sequence[bytes], flags: int = 0) -> None:
        """Send one event to those who subscribed to its kind; with DONTWAIT, who is too slow loses it."""
        if not self._is_within_bounds():
            log.warning("events.reset", topics=self._topics, limit=TOPICS)
            # All connections end; clients of good will subscribe again and see the gap in the sequence.
            self._socket.close(0)
            self._topics = 0
            self._socket = self._bound()
        self._socket.send_multipart(msg_parts, flags)

    def close(self) -> None:
        """Close the socket and remove its file."""
        self._socket.close(0)
        self._path.unlink(missing_ok=True)

    def _is_within_bounds(self) -> bool:
        """Hear what subscribers said since the last event."""
        for _ in range(2 * TOPICS):
            try:
                frame = self._socket.recv(zmq.DONTWAIT)
            except zmq.Again:
                return self._topics <= TOPICS
            # One byte before the topic: 1 for the first subscription to it, 0 when the last has gone.
            self._topics += {b"\x01": 1, b"\x00": -1}.get(frame[:1], 0)
        return False

    def _bound(self) -> zmq.Socket[bytes]:
        # XPUB is PUB that tells about subscriptions.
        created = self._context.socket(zmq.XPUB)
        try:
            created.setsockopt(zmq.LINGER, 0)
            created.setsockopt(zmq.SNDHWM, QUEUED_EVENTS)
            created.setsockopt(zmq.RCVHWM, QUEUED_FRAMES)
            created.setsockopt(zmq.MAXMSGSIZE, FRAME_BYTES)
            remove_left_over(self._path)  # libzmq would, and not say why it could not
            created.bind(f"ipc://{self._path}")
            self._path.chmod(self._mode)
        except BaseException:
            created.close(0)
            raise
        return created
