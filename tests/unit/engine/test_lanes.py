"""How graphs are captured, on a stand-in for torch's CUDA side that notes what is done to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from inferd.engine import lanes
from inferd.engine.lanes import Captures, Lanes
from shared.ids import DeviceId

UUID = DeviceId("GPU-1")


class Cuda:
    """One device; captures must not overlap, and must end."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.is_capturing = False
        self.is_held = False
        self.current = "default"
        self.pools = 0
        self.ends_badly = False

    def graph(self) -> SimpleNamespace:
        def begin(*, pool: int, capture_error_mode: str) -> None:
            assert self.is_held, "memory may be unmapped during the capture"
            assert not self.is_capturing
            assert self.current == "capture stream"
            assert capture_error_mode == "thread_local"
            assert pool == self.pools, "a pool that is lost"
            self.is_capturing = True

        def end() -> None:
            assert self.is_capturing
            self.is_capturing = False
            if self.ends_badly:
                self.ends_badly = False
                raise RuntimeError("operation failed due to a previous error during capture")

        return SimpleNamespace(capture_begin=begin, capture_end=end)

    def pool(self) -> int:
        self.pools += 1
        return self.pools

    @contextmanager
    def stream(self, name: str) -> Iterator[None]:
        before, self.current = self.current, "capture stream"
        yield
        self.current = before

    @contextmanager
    def held(self, device: DeviceId) -> Iterator[None]:
        assert device == UUID
        outer, self.is_held = self.is_held, True
        try:
            yield
        finally:
            self.is_held = outer


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    fake = Cuda()
    stream = SimpleNamespace(synchronize=lambda: fake.done.append("waited"), device_index=0)

    def on_cpu(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda *arguments, device=None, **options: make(*arguments, **options)

    stand_in = SimpleNamespace(
        cuda=SimpleNamespace(
            CUDAGraph=fake.graph,
            Stream=lambda device: stream,
            stream=fake.stream,
            current_stream=lambda device: stream,
            current_device=lambda: 0,
            graph_pool_handle=fake.pool,
        ),
        zeros=on_cpu(torch.zeros),
        empty=on_cpu(torch.empty),
        _C=SimpleNamespace(_cuda_endAllocateToPool=lambda index, pool: fake.done.append(f"closed {pool}")),
    )
    monkeypatch.setattr(lanes, "torch", stand_in)
    monkeypatch.setattr(lanes, "releases_held", fake.held)
    monkeypatch.setattr(lanes._native, "cuda_devices", lambda: [UUID])
    return fake


def test_work_is_captured_after_it_has_run_and_while_nothing_is_unmapped(cuda: Cuda) -> None:
    captures = Captures(torch.device("cuda", 0))
    cuda.done.clear()

    def work() -> None:
        assert cuda.is_capturing
        cuda.done.append("work")

    captures.record(work)
    captures.record(work)
    assert cuda.done == ["waited", "work", "waited", "work"]
    assert not cuda.is_capturing
    assert not cuda.is_held
    assert cuda.pools == 1, "graphs share one pool"


@pytest.mark.parametrize("error", [RuntimeError("not permitted when stream is capturing"), KeyError("layer")])
def test_a_capture_that_fails_leaves_the_next_one_a_pool(cuda: Cuda, error: Exception) -> None:
    captures = Captures(torch.device("cuda", 0))

    def work() -> None:
        raise error

    with pytest.raises(type(error)):
        captures.record(work)
    assert cuda.pools == 2
    assert "closed 1" in cuda.done
    assert not cuda.is_capturing
    assert not cuda.is_held
    captures.record(lambda: None)  # in the new pool


def test_a_capture_that_was_spoilt_shows_at_its_end(cuda: Cuda) -> None:
    captures = Captures(torch.device("cuda", 0))

    def work() -> None:
        cuda.ends_badly = True

    with pytest.raises(RuntimeError, match="a previous error"):
        captures.record(work)
    assert cuda.pools == 2
    captures.record(lambda: None)


def test_logits_are_one_buffer_for_versions_that_agree(cuda: Cuda) -> None:
    captures = Captures(torch.device("cuda", 0))
    first = captures.logits(4, 100, torch.bfloat16)
    assert (first.shape, first.dtype) == ((4, 100), torch.bfloat16)
    assert captures.logits(4, 100, torch.bfloat16) is first
    assert captures.logits(4, 101, torch.bfloat16) is not first
    assert captures.logits(4, 101, torch.float32).dtype == torch.float32


def test_on_the_cpu_there_is_nothing_to_queue_on() -> None:
    nothing = Lanes(torch.device("cpu"))
    with nothing.stepping(), nothing.preparing() as captures:
        assert captures is None
    nothing.finish_steps()
    nothing.trim()
