"""`SlabCloser`: gives memory back on a thread of its own."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from shared.closing import Closing
from shared.errors import ChangeoverError, InvariantError
from shared.memory.backend import Slab


class SlabCloser(Closing):
    """Closes slabs that nobody uses any more.  To give 16 GB back takes a GPU's driver some 20 ms, and the
    kernel longer: neither a push nor the event loop is to wait for it, only whoever needs the memory.

    What cannot be closed is told once, and is no fault of those who wait: what is free tells them enough.
    Used from the event loop's thread only.
    """

    def __init__(self, tell: Callable[[ChangeoverError], None]) -> None:
        """`tell` gets each failure when the next slabs come, or somebody waits."""
        self._tell = tell
        self._broken: list[InvariantError] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="close-slabs")
        self._thread.submit(int)  # starts it: when there is memory to give back, the host may give no more
        self._under_way: deque[Future[list[ChangeoverError]]] = deque()

    def add(self, take_slabs: Sequence[Slab]) -> None:
        """Begin to close slabs, after those that came before."""
        self._under_way.append(self._thread.submit(_close, take_slabs))
        self._note()

    async def settle(self) -> None:
        """Return once all that was added is free, as far as it could be closed."""
        while self._under_way:
            await asyncio.wait((asyncio.wrap_future(self._under_way[0]),))
            self._note()

    def close(self) -> None:
        """Wait for all that was added.  Blocking.  Raises the first InvariantError that ever came of it."""
        self._thread.shutdown()
        self._note()
        if self._broken:
            raise self._broken[0]

    def _note(self) -> None:
        """Forget what is closed, and tell what could not be."""
        while self._under_way and self._under_way[0].done():
            for failure in self._under_way.popleft().result():
                if isinstance(failure, InvariantError):
                    self._broken.append(failure)
                self._tell(failure)


def _close(slabs: Sequence[Slab]) -> list[ChangeoverError]:
    failures = []
    for slab in slabs:
        try:
            slab.close()
        except ChangeoverError as error:
            failures.append(error)
    return failures
