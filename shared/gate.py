"""`Gate`: lets bytes through no faster than it is told, for threads that copy or hash."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Protocol

from shared.errors import Superseded

PIECE_BYTES = 16 << 20
"""What one thread should copy or hash between two questions, when it has a choice: some 10 ms on a CPU."""

GRAIN_S = 2.0
"""At a limited rate, the time whose bytes may go through in one piece, where the piece is spread over that
time.  A GPU spends as long on a small piece as on a large one, and takes turns with who decodes for each of
its launches: what is hashed in small pieces slows decoding at any rate (docs/adr/0009)."""

LOOK_AGAIN_S = 0.1
"""Longest sleep of a thread at the gate before it looks whether its work was ended."""


class Pacer(Protocol):
    """Whom a thread asks before it copies or hashes; thread-safe."""

    def admit(self, nbytes: int) -> None:
        """Return when `nbytes` may be moved.  Blocking; raises Superseded once the work was ended."""
        ...

    def grain_bytes(self, most_bytes: int) -> int:
        """How many bytes to ask for at once: `most_bytes`, or fewer while the rate is limited."""
        ...

    def spread_s(self, nbytes: int) -> float:
        """Over which time to spread work on so many bytes: 0 without a limit."""
        ...


class Gate:
    """A rate over all threads that ask.  Nothing is saved up: after a pause there is no burst."""

    def __init__(self, bytes_per_s: float = math.inf, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`bytes_per_s`: infinite lets everything through, 0 nothing."""
        self._clock = clock
        self._changed = threading.Condition()
        self._bytes_per_s = bytes_per_s
        self._free_s = 0.0  # from when on the next bytes may go
        self._admitted_bytes = 0

    @property
    def admitted_bytes(self) -> int:
        """All bytes let through so far."""
        with self._changed:
            return self._admitted_bytes

    def set_rate(self, bytes_per_s: float) -> None:
        """Change the rate; who waits at the gate goes by the new one."""
        with self._changed:
            if bytes_per_s == self._bytes_per_s:
                return
            # What the last bytes still have to wait for shrinks or grows with the rate.
            now = self._clock()
            wait_s = max(0.0, self._free_s - now) if math.isfinite(self._bytes_per_s) else 0.0
            self._free_s = now + wait_s * self._bytes_per_s / bytes_per_s if wait_s and bytes_per_s else now
            self._bytes_per_s = bytes_per_s
            self._changed.notify_all()

    def admit(self, nbytes: int, ended: threading.Event | None = None) -> None:
        """As `Pacer.admit`; the work was ended once `ended` is set, which is looked at every LOOK_AGAIN_S."""
        with self._changed:
            while True:
                if ended is not None and ended.is_set():
                    raise Superseded("the work was ended")
                now = self._clock()
                if self._bytes_per_s > 0 and now >= self._free_s:
                    self._free_s = now + nbytes / self._bytes_per_s
                    self._admitted_bytes += nbytes
                    return
                wait_s = self._free_s - now if self._bytes_per_s > 0 else LOOK_AGAIN_S
                self._changed.wait(min(wait_s, LOOK_AGAIN_S))

    def grain_bytes(self, most_bytes: int) -> int:
        """As `Pacer.grain_bytes`; never less than PIECE_BYTES, unless `most_bytes` is."""
        with self._changed:
            if math.isinf(self._bytes_per_s):
                return most_bytes
            return min(most_bytes, max(PIECE_BYTES, round(self._bytes_per_s * GRAIN_S)))

    def spread_s(self, nbytes: int) -> float:
        """As `Pacer.spread_s`; never more than GRAIN_S, since nothing ends it."""
        with self._changed:
            if math.isinf(self._bytes_per_s) or self._bytes_per_s == 0:
                return 0.0
            return min(GRAIN_S, nbytes / self._bytes_per_s)
