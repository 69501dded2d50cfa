"""From the engine's thread to the event loop."""

from __future__ import annotations

import asyncio
import threading
import time

from inferd.engine.protocol import SequenceOutput

Stamped = tuple[float, SequenceOutput]
"""An output and the monotonic clock's reading when the engine delivered it."""


class Mailbox:
    """The outputs of one request's sequences that nobody has taken yet.

    The engine's thread never waits for a reader: what comes while one is busy is taken with the next
    `take`.  It holds at most what the sequences may generate, and the loop is woken once per `take`, not
    once per output.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._outputs: list[Stamped] = []
        self._is_ringing = False
        self._bell = asyncio.Event()

    def post(self, output: SequenceOutput) -> None:
        """Put an output in.  Any thread; does not block."""
        stamped = (time.monotonic(), output)
        with self._lock:
            self._outputs.append(stamped)
            if self._is_ringing:
                return
            self._is_ringing = True
        self.ring()

    def ring(self) -> None:
        """Wake the reader, also when there is nothing to take.  Any thread."""
        try:
            self._loop.call_soon_threadsafe(self._bell.set)
        except RuntimeError:
            # The loop is closed: the daemon is on its way out and nobody reads any more.
            return

    async def take(self) -> list[Stamped]:
        """Wait for the bell, then everything that came, oldest first."""
        await self._bell.wait()
        with self._lock:
            self._bell.clear()
            self._is_ringing = False
            outputs, self._outputs = self._outputs, []
        return outputs
