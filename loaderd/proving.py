"""Hashing what a signature covers and loading would hold against nothing, as a stage of a push."""

from __future__ import annotations

import asyncio
import threading

from loaderd.operations import PROGRESS_EVERY_S, Operation, Operations
from loaderd.planning import OpenedCheckpoint
from shared.errors import Superseded
from shared.gate import Pacer


async def hash_signed(
    operation: Operation,
    opened: OpenedCheckpoint,
    operations: Operations,
    cancelled: threading.Event,
    pacer: Pacer,
) -> OpenedCheckpoint:
    """The checkpoint with nothing in it left that only the signature vouches for, as fast as `pacer` lets
    it; `opened` stays the caller's, and what is returned shares its files.

    Raises SignatureRefused, CheckpointError, and Superseded once `cancelled` is set.
    """
    operation.check_not_superseded()

    hashed_bytes = 0

    def note(done_bytes: int, total_bytes: int) -> None:
        nonlocal hashed_bytes
        if cancelled.is_set():
            raise Superseded("the hashing was ended")
        # Told after it was done, and so what is held back is the next.
        nbytes, hashed_bytes = done_bytes - hashed_bytes, max(done_bytes, hashed_bytes)
        pacer.admit(max(0, nbytes))
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
