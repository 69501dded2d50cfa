"""Hashing what a signature covers and loading would hold against nothing, as a stage of a push."""

from __future__ import annotations

import asyncio
import threading

from loaderd.operations import PROGRESS_EVERY_S, Operation, Operations
from loaderd.planning import OpenedCheckpoint
from shared.errors import Superseded


async def hash_signed(
    operation: Operation, opened: OpenedCheckpoint, operations: Operations, cancelled: threading.Event
) -> OpenedCheckpoint:
    """The checkpoint with nothing in it left that only the signature vouches for; `opened` stays the
    caller's, and what is returned shares its files.

    Raises SignatureRefused, CheckpointError, and Superseded once `cancelled` is set.
    """
    operation.check_not_superseded()

    def note(done_bytes: int, total_bytes: int) -> None:
        if cancelled.is_set():
            raise Superseded("the hashing was ended")
        operation.bytes_read, operation.bytes_total = done_bytes, total_bytes

    operations.enter(operation, "hashing")
    work = asyncio.ensure_future(asyncio.to_thread(opened.proven, note))
    try:
        while not work.done():
            await asyncio.wait((work,), timeout=PROGRESS_EVERY_S)
            operations.progress(operation)
        operation.check_not_superseded()
        return work.result()
    except BaseException:
        # The thread must be out of the files before anyone closes them.
        cancelled.set()
        await asyncio.wait((work,))
        if not work.cancelled():
            work.exception()  # has been seen: what is raised here is the cause
        raise
    finally:
        operation.bytes_read = operation.bytes_total = 0
