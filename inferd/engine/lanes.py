"""`Lanes`: where an engine's GPU work is queued, and where its graphs are captured.

Steps run on one stream.  A slot is built and warmed on another while they go on; nothing made there is used
by a step before that stream has been waited for, so the two need no order between them.

Graphs of both slots are captured on a third stream, on which nothing ever runs.  They are replayed on the
step stream, one after another, and so may all use the same memory: the pool that holds what a graph computes
in passing, and the scratch of cuBLAS that belongs to the capture stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress

import torch

from shared import _native
from shared.ids import DeviceId
from shared.memory.cuda import releases_held


class Captures:
    """Captures graphs of one engine on a CUDA device, and owns the memory that they share."""

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self._device = device
        self._id = DeviceId(_native.cuda_devices()[index])
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._logits = torch.empty(0, device=device)
        with torch.cuda.stream(self._stream):
            self._mark = torch.zeros(1, device=device)
        self._stream.synchronize()  # nothing is to run on it from here on
        self._open()

    def record(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """A graph of what `work` queues, all of which must have been queued before: kernels are loaded when
        they first run.  Waits for the current stream.  What the device does for others goes on, except that
        this process unmaps nothing.  Raises RuntimeError where `work` cannot be captured; what its graph
        would have held is lost then."""
        torch.cuda.current_stream(self._device).synchronize()
        graph = torch.cuda.CUDAGraph()
        # Not `torch.cuda.graph`, which first collects garbage, waits for the whole device and empties the
        # allocator: steps of the other slot would stop.  "thread_local", since they go on meanwhile.
        with releases_held(self._id), torch.cuda.stream(self._stream):
            try:
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    work()
                finally:
                    graph.capture_end()
            except BaseException:
                self._renew()
                raise
        return graph

    def logits(self, rows: int, vocabulary: int, dtype: torch.dtype) -> torch.Tensor:
        """[rows, vocabulary] for graphs to leave their logits in; the same for both slots if they agree."""
        if self._logits.shape != (rows, vocabulary) or self._logits.dtype != dtype:
            self._logits = torch.empty((rows, vocabulary), dtype=dtype, device=self._device)
        return self._logits

    def _renew(self) -> None:
        """Take another pool after a capture failed."""
        # torch leaves the pool open, and its random generators in the belief that they are captured: the
        # first is closed here (later versions may do it themselves), the second ends with a sound capture.
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(self._stream.device_index, self._pool)
        self._open()

    def _open(self) -> None:
        """Make a pool and capture a graph of nothing much: as long as that lives, the pool keeps the
        memory of graphs that are gone for those of the next version, and preparing it need not ask the
        driver."""
        self._pool = torch.cuda.graph_pool_handle()
        self._anchor = torch.cuda.CUDAGraph()
        with releases_held(self._id), torch.cuda.stream(self._stream):
            self._anchor.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            self._mark.add_(1)
            self._anchor.capture_end()


class Lanes:
    """The streams of one engine; on the CPU there are none, and every method does nothing."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._steps: torch.cuda.Stream | None = None
        self._preparing: torch.cuda.Stream | None = None
        self._captures: Captures | None = None
        if device.type == "cuda":
            # Steps go first: what the other slot's preparation queues gets what they leave.
            self._steps = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
            self._preparing = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._captures = Captures(device)

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Queue what follows on the step stream."""
        with nullcontext() if self._steps is None else torch.cuda.stream(self._steps):
            yield

    @contextmanager
    def preparing(self) -> Iterator[Captures | None]:
        """Queue what follows on the stream of preparations; waits for it at the end, also where that raises.
        One preparation at a time."""
        stream = self._preparing
        if stream is None:
            yield None
            return
        # What the caller did to the tensors is queued on the stream it came with.
        stream.wait_stream(torch.cuda.current_stream(self.device))
        try:
            with torch.cuda.stream(stream):
                yield self._captures
        finally:
            stream.synchronize()

    def finish_steps(self) -> None:
        """Wait until the GPU has done everything that steps have queued so far."""
        if self._steps is not None:
            self._steps.synchronize()

    def trim(self) -> None:
        """Give memory that torch keeps for later back to the driver: a preparation takes more in passing than
        the steps after it.  Those that go on may wait for it once, and ask the driver anew."""
        if self._steps is not None:
            torch.cuda.empty_cache()
