"""`SlotThread`: the one thread on which slots are filled and emptied."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class SlotThread:
    """Runs blocking work in the order it comes in, beside the event loop.

    One thread and not a pool: a slot's memory is then never unmapped while CUDA graphs of the other are
    captured, which would end the capture; and cuBLAS keeps scratch memory on the device for each thread
    that multiplies there.
    """

    def __init__(self) -> None:
        # The thread starts with the first piece of work.
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="slots")

    async def run(self, work: Callable[[], T]) -> T:
        """What `work` returns or raises.  If the caller is cancelled, work that has begun goes on, and what
        comes next waits for it."""
        context = contextvars.copy_context()
        return await asyncio.get_running_loop().run_in_executor(self._executor, context.run, work)

    def close(self) -> None:
        """End the thread once nothing is left to do."""
        self._executor.shutdown(wait=False)
