"""What a push takes of host memory beside the weights: the readers' buffers and little else, whatever the
model's size and however many tensors it has."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shared.memory.host import HostBackend
from tests.bench.load_model import Model, write_model
from tests.support import procfs
from tests.support.cold_files import make_cold
from tests.support.serving_host import ServingHost, serving_host

RING_BYTES = HostBackend().readers * 4 * ((1 << 20) + 8192)
"""Of the host backend: four slots for each reading thread."""

ALLOWED_BYTES = 200 << 20
LARGE_GB = 0.7
MANY_TENSORS = 20_000


class Peak:
    """The most anonymous memory of a process that was seen; shared memory, which holds the weights, is
    another."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self.nbytes = procfs.anonymous_bytes(pid)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._is_over.wait(0.002):
            self.nbytes = max(self.nbytes, procfs.anonymous_bytes(self._pid))


@contextmanager
def watched(pid: int) -> Iterator[Peak]:
    peak = Peak(pid)
    peak.start()
    try:
        yield peak
    finally:
        peak.stop()


def write_many(folder: Path, count: int) -> None:
    """A checkpoint of so many tensors of one page each."""
    folder.mkdir()
    header = {
        f"layers.{i}.w": {"dtype": "F32", "shape": [1024], "data_offsets": [4096 * i, 4096 * (i + 1)]}
        for i in range(count)
    }
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _ in range(count):
            file.write(os.urandom(4096))
    (folder / "config.json").write_text("{}")


@pytest.fixture
def host(tmp_path: Path) -> Iterator[ServingHost]:
    (tmp_path / "models").mkdir()
    with serving_host(tmp_path / "models", 'log_level = "warning"\nslab_bytes = 134217728') as host:
        host.start_loaderd()
        yield host


def push_watched(host: ServingHost, version: str) -> int:
    """Push a version from the disk; the peak."""
    for path in (host.model_root / f"tiny-{version}").iterdir():
        make_cold(path)
    with watched(host.loaderd.pid) as peak:
        assert host.push(version).state == "done"
    return peak.nbytes


def test_a_large_model_takes_no_more_than_the_ring_and_a_little(host: ServingHost) -> None:
    model = Model(LARGE_GB)
    write_model(host.model_root / "tiny-v1", model)
    assert model.nbytes > 1.2 * (RING_BYTES + ALLOWED_BYTES)
    peak = push_watched(host, "v1")
    assert host.status().memory[0].used_bytes >= model.nbytes
    assert peak < RING_BYTES + ALLOWED_BYTES


def test_many_tensors_take_no_more_than_the_ring_and_a_little(host: ServingHost) -> None:
    write_many(host.model_root / "tiny-v1", MANY_TENSORS)
    peak = push_watched(host, "v1")
    print("PEAK", peak >> 20)
    assert peak < RING_BYTES + ALLOWED_BYTES
