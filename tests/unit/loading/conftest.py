"""A checkpoint and a strict fake device."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from loaderd.read_schedule import ReadSchedule
from tests.unit.loading.loads import RUN_BYTES
from tests.unit.memory.fake_backend import FakeBackend, FakeMemory


@pytest.fixture(autouse=True)
def _runs_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loaderd.filling.ReadSchedule", partial(ReadSchedule, run_bytes=RUN_BYTES))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    random = np.random.default_rng(7)
    tensors = {f"layer.{i}.w": random.random((64, 300 + i), dtype=np.float32) for i in range(6)}
    tensors["large"] = random.random((150, 1001), dtype=np.float32)  # more than one leaf
    tensors["scalar"] = np.array(3.0, dtype=np.float32)
    tensors["empty"] = np.zeros((0, 4), dtype=np.float32)
    tensors["twin"] = tensors["layer.0.w"].copy()
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


@pytest.fixture
def backend() -> Iterator[FakeBackend]:
    backend = FakeBackend(FakeMemory(8 << 20))
    yield backend
    backend.check_no_leaks()
    assert backend.memory.used_bytes == 0
