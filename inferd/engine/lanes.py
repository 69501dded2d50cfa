"""`Lanes`: where an engine's GPU work is queued: a stream for the steps, and one for each slot.

A slot is built, warmed and captured on its own stream while the steps of the other go on.  Nothing that
the slot's stream made is used by a step before that stream has been waited for, so streams need no order
between them.  A slot's graphs keep the scratch memory of cuBLAS that belongs to the slot's stream, which
therefore only ever works for that slot.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress

import torch

from inferd.engine.protocol import SLOTS


class Lane:
    """A slot's stream on a CUDA device, and the memory that its graphs share."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._device = device
        with torch.cuda.stream(self.stream):
            self._mark = torch.zeros(1, device=device)
            self._open()

    def renew(self) -> None:
        """Take another pool after a capture failed, with the stream current."""
        # torch leaves the pool open, and its random generators in the belief that they are captured: the
        # first is closed here (later versions may do it themselves), the second ends with a sound capture.
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(self.stream.device_index, self.pool)
        self._open()

    def _open(self) -> None:
        """Make a pool and capture a graph of nothing much: as long as that lives, the pool keeps the
        memory of graphs that are gone for those of the next version, and preparing it need not ask the
        driver."""
        self.pool = torch.cuda.graph_pool_handle()
        self._anchor = torch.cuda.CUDAGraph()
        self._anchor.capture_begin(pool=self.pool, capture_error_mode="thread_local")
        self._mark.add_(1)
        self._anchor.capture_end()


class Lanes:
    """The streams of one engine; on the CPU there are none, and every method does nothing."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._steps: torch.cuda.Stream | None = None
        self._slots: tuple[Lane, ...] = ()
        if device.type == "cuda":
            # Steps go first: what the other slot's preparation queues gets what they leave.
            self._steps = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
            self._slots = tuple(Lane(device) for _ in range(SLOTS))

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Queue what follows on the step stream."""
        with nullcontext() if self._steps is None else torch.cuda.stream(self._steps):
            yield

    @contextmanager
    def preparing(self, slot: int) -> Iterator[Lane | None]:
        """Queue what follows on the slot's stream; waits for it at the end, also where that raises."""
        if not self._slots:
            yield None
            return
        lane = self._slots[slot]
        # What the caller did to the tensors is queued on the stream it came with.
        lane.stream.wait_stream(torch.cuda.current_stream(self.device))
        try:
            with torch.cuda.stream(lane.stream):
                yield lane
        finally:
            lane.stream.synchronize()

    def finish_steps(self) -> None:
        """Wait until the GPU has done everything that steps have queued so far."""
        if self._steps is not None:
            self._steps.synchronize()
