"""Exchanging slabs under addresses that captured graphs hold."""

from __future__ import annotations

import struct

import pytest
import torch

from shared.errors import InvariantError
from shared.ids import DeviceId
from shared.memory.cuda import CudaBackend, CudaSlab
from shared.memory.remapped_region import RemappedRegion
from tests.gpu.slabs import STEP_BYTES, sealed


def numbers(backend: CudaBackend, value: float, steps: int = 1) -> CudaSlab:
    """A slab full of one float32."""
    return sealed(backend, struct.pack("<f", value) * (steps * STEP_BYTES // 4))


def test_a_captured_graph_reads_the_new_bytes(backend: CudaBackend, gpu: DeviceId) -> None:
    count = 2 * STEP_BYTES // 4
    with (
        numbers(backend, 1.0) as a,
        numbers(backend, 2.0) as b,
        numbers(backend, 3.0, steps=2) as c,
        RemappedRegion(gpu, 2 * STEP_BYTES) as region,
    ):
        region.exchange([a, b])
        weights = region.tensor(0, "F32", (count,))
        out = torch.empty(2, device="cuda")

        def work() -> None:
            out[0] = weights[0] * 10
            out[1] = weights[-1] * 10

        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        for slabs, expected in (([a, b], [10, 20]), ([c], [30, 30]), ([b, a], [20, 10]), ([a, b], [10, 20])):
            region.exchange(slabs)
            graph.replay()
            torch.cuda.synchronize()
            assert out.tolist() == expected
        del graph


def test_a_refused_exchange_leaves_the_old_slabs(backend: CudaBackend, gpu: DeviceId) -> None:
    with (
        numbers(backend, 1.0) as a,
        numbers(backend, 2.0, steps=2) as b,
        RemappedRegion(gpu, STEP_BYTES) as region,
    ):
        region.exchange([a])
        for slabs in ([b], [a, a], []):
            with pytest.raises(InvariantError):
                region.exchange(slabs)
        assert region.tensor(0, "F32", (1,)).item() == 1.0
        with pytest.raises(InvariantError):
            region.tensor(STEP_BYTES, "U8", (1,))


def test_a_region_keeps_the_memory_of_closed_slabs(backend: CudaBackend, gpu: DeviceId) -> None:
    free = backend.free_bytes(gpu)
    with RemappedRegion(gpu, STEP_BYTES) as region:
        slab = numbers(backend, 5.0)
        region.exchange([slab])
        slab.close()
        assert region.tensor(0, "F32", (1,)).item() == 5.0
        assert backend.free_bytes(gpu) == free - STEP_BYTES
    assert backend.free_bytes(gpu) == free


def test_a_region_is_whole_steps(gpu: DeviceId) -> None:
    for nbytes in (0, -1, 1, STEP_BYTES + 1):
        with pytest.raises(InvariantError):
            RemappedRegion(gpu, nbytes)
