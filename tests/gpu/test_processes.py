"""Slabs between processes: handing over, outliving, refusing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import zlib

import pytest

from shared.ids import DeviceId
from shared.memory.cuda import CudaBackend
from tests.gpu.peer import EXPORTED, EXPORTED_BYTES
from tests.gpu.slabs import ROOT, decode, encode, make_data, peer, sealed


def test_another_process_reads_the_bytes_and_cannot_write_them(backend: CudaBackend) -> None:
    data = make_data(4 << 20)
    with sealed(backend, data) as slab, peer("read") as reader:
        reader.send(encode(slab.entry), (slab.borrow_fd(),))
        answer, _ = reader.receive()
        crc, refused = map(int, answer.split())
        assert crc == zlib.crc32(data)
        assert refused != 0
        assert reader.wait() == 0


def test_a_stray_write_ends_only_the_process_that_made_it(backend: CudaBackend) -> None:
    data = make_data(4 << 20)
    with sealed(backend, data) as slab, peer("write") as writer:
        writer.send(encode(slab.entry), (slab.borrow_fd(),))
        assert writer.receive()[0] == b"ready"
        assert writer.receive()[0] == b"context lost"
        assert writer.wait() != 0
        assert slab.crc32(0, len(data)) == zlib.crc32(data)
        assert slab.tensor(0, "U8", (1,)).item() == data[0]


def test_bytes_outlive_a_killed_exporter(backend: CudaBackend, gpu: DeviceId) -> None:
    free = backend.free_bytes(gpu)
    with peer("export") as exporter:
        message, (fd,) = exporter.receive()
        exporter.process.send_signal(signal.SIGKILL)
        assert exporter.wait() == -signal.SIGKILL
    with backend.import_slab(decode(message), fd) as slab:
        assert slab.crc32(0, EXPORTED_BYTES) == zlib.crc32(EXPORTED)
    assert backend.free_bytes(gpu) == free


def test_memory_is_free_when_the_last_holder_goes(backend: CudaBackend, gpu: DeviceId) -> None:
    with peer("hold") as holder:
        slab = sealed(backend, make_data(1 << 20))
        holder.send(encode(slab.entry), (slab.borrow_fd(),))
        assert holder.receive()[0] == b"mapped"
        before = backend.free_bytes(gpu)
        slab.close()
        assert backend.free_bytes(gpu) == before  # the holder pins it
        holder.send(b".")
        assert holder.wait() == 0
        assert backend.free_bytes(gpu) >= before + slab.entry.nbytes


def test_an_fd_alone_keeps_the_memory(backend: CudaBackend, gpu: DeviceId) -> None:
    slab = sealed(backend, make_data(1 << 20))
    fd = os.dup(slab.borrow_fd())
    before = backend.free_bytes(gpu)
    slab.close()
    assert backend.free_bytes(gpu) == before
    os.close(fd)
    assert backend.free_bytes(gpu) == before + slab.entry.nbytes


def test_legacy_ipc_between_processes(backend: CudaBackend) -> None:
    with peer("export-legacy") as exporter:
        message, (fd,) = exporter.receive()
        with backend.import_slab(decode(message), fd) as slab:
            assert slab.crc32(0, EXPORTED_BYTES) == zlib.crc32(EXPORTED)
            assert bytes(slab.tensor(0, "U8", (4096,)).cpu().numpy()) == EXPORTED[:4096]
        exporter.send(b".")
        assert exporter.wait() == 0


@pytest.mark.parametrize("is_visible", [True, False])
def test_only_visible_devices_are_seen(gpu: DeviceId, is_visible: bool) -> None:
    code = (
        "from shared.errors import DriverError\n"
        "from shared.memory.cuda import CudaBackend\n"
        "try: print(*CudaBackend().devices())\n"
        "except DriverError as error: print(error.call, error.number)"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={
            **os.environ,
            "CUDA_VISIBLE_DEVICES": gpu if is_visible else "",
            "PYTHONPATH": os.pathsep.join(sys.path),
        },
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert answer.stdout.strip() == (gpu if is_visible else "cuInit 100")  # CUDA_ERROR_NO_DEVICE


@pytest.mark.parametrize("verb", ["export", "export-legacy"])
def test_a_dead_exporter_leaves_nothing_behind(backend: CudaBackend, gpu: DeviceId, verb: str) -> None:
    free = backend.free_bytes(gpu)
    with peer(verb) as exporter:
        _, (fd,) = exporter.receive()
        os.close(fd)
        exporter.process.kill()
        exporter.wait()
    assert backend.free_bytes(gpu) == free
