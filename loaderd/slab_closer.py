"""`SlabCloser`: gives memory back on a thread of its own."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from shared.closing import Closing
from shared.memory.backend import Slab


class SlabCloser(Closing):
    """Closes slabs that nobody uses any more.  To give 16 GB back takes a GPU's driver some 20 ms, and the
    kernel longer: neither a push nor the event loop is to wait for it, only whoever needs the memory.

    Used from the event loop's thread only.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="close-slabs")
        self._under_way: deque[Future[None]] = deque()

    def add(self, take_slabs: Sequence[Slab]) -> None:
        """Begin to close slabs, after those that came before."""
        self._under_way.append(self._thread.submit(_close, take_slabs))

    async def settle(self) -> None:
        """Return once all that was added is free.  Raises what closing a slab did, to one who waits."""
        while self._under_way:
            first = self._under_way[0]
            await asyncio.wait((asyncio.wrap_future(first),))
            if self._under_way and self._under_way[0] is first:  # else it was another's to take
                self._under_way.popleft().result()

    def close(self) -> None:
        """Wait for all that was added, and raise what closing it did.  Blocking."""
        self._thread.shutdown()
        while self._under_way:
            self._under_way.popleft().result()


def _close(slabs: Sequence[Slab]) -> None:
    for slab in slabs:
        slab.close()
