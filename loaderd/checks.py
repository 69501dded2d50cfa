"""`Checks`: the hashing of resident versions that is under way, and its end where their memory is needed."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass
from typing import Any

from loaderd.slab_table import UserId


@dataclass(frozen=True, slots=True)
class _Check:
    version: UserId
    ended: threading.Event  # ends the hashing soon after it is set


class Checks:
    """Used from the event loop's thread only."""

    def __init__(self) -> None:
        self._under_way: dict[asyncio.Future[Any], _Check] = {}

    def add(self, hashing: asyncio.Future[Any], version: UserId, ended: threading.Event) -> None:
        """Count a check until it is done; what it ends with is its asker's to read, if there still is one."""
        self._under_way[hashing] = _Check(version, ended)
        hashing.add_done_callback(self._forget)

    async def end(self, version: UserId) -> None:
        """End the checks of a version, and return when they hold its memory no more: at once on the host, on
        a GPU when what was begun is hashed."""
        ending = [hashing for hashing, check in self._under_way.items() if check.version == version]
        for hashing in ending:
            self._under_way[hashing].ended.set()
        if ending:
            await asyncio.wait(ending)

    async def drain(self) -> None:
        """Return when no check is under way; who wants that soon has ended them all (`Pace.close`)."""
        if self._under_way:
            await asyncio.wait(self._under_way)

    def _forget(self, hashing: asyncio.Future[Any]) -> None:
        del self._under_way[hashing]
        if not hashing.cancelled():
            hashing.exception()  # marks it as seen
