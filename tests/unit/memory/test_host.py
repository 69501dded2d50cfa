"""What only the host backend promises: seals, protections, and what it refuses to import."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import resource
import signal
import subprocess
import sys
import threading
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from shared import _native
from shared.errors import DriverError, InvariantError, OutOfMemory, ProtocolError
from shared.ids import HOST_DEVICE, SlabId
from shared.layout import SlabEntry
from shared.memory.host import HostBackend, HostSlab, Promises, WritableHostSlab

from .resources import slab_fds, slab_mappings

PAGE = 4096
SLAB_BYTES = 2 * PAGE + 512
F_SEAL_FUTURE_WRITE = 0x10  # linux/fcntl.h; Python has no name for it
FINAL_SEALS = (
    fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_WRITE | F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL
)


def sealed(backend: HostBackend, data: bytes = b"reel" * (SLAB_BYTES // 4)) -> HostSlab:
    fd = os.memfd_create("source", os.MFD_CLOEXEC)
    try:
        os.write(fd, data)
        with backend.create_slab(HOST_DEVICE, len(data)) as writable:
            writable.read_file(fd, 0, 0, len(data))
            return writable.seal()
    finally:
        os.close(fd)


def foreign_memfd(nbytes: int, seals: int) -> int:
    fd = os.memfd_create("foreign", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def entry_of(nbytes: int) -> SlabEntry:
    return SlabEntry(SlabId("foreign"), HOST_DEVICE, nbytes)


# --- seals ---------------------------------------------------------------------------------------


def test_a_sealed_slab_carries_all_seals() -> None:
    with sealed(HostBackend()) as slab:
        assert fcntl.fcntl(slab.borrow_fd(), fcntl.F_GET_SEALS) & FINAL_SEALS == FINAL_SEALS
        with pytest.raises(PermissionError):
            fcntl.fcntl(slab.borrow_fd(), fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)


def test_fds_are_closed_on_exec() -> None:
    backend = HostBackend()
    with backend.create_slab(HOST_DEVICE, PAGE) as writable:
        (fd,) = slab_fds()
        assert not os.get_inheritable(fd)
        with writable.seal() as slab:
            assert not os.get_inheritable(slab.borrow_fd())
            assert slab_fds() == (slab.borrow_fd(),)


def test_nobody_else_can_write_while_a_slab_is_filled() -> None:
    with HostBackend().create_slab(HOST_DEVICE, PAGE):
        (fd,) = slab_fds()
        peer = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            with pytest.raises(PermissionError):
                mmap.mmap(peer, PAGE, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
            with pytest.raises(PermissionError):
                os.pwrite(peer, b"x", 0)
            with pytest.raises(PermissionError):
                os.ftruncate(peer, 2 * PAGE)
            with pytest.raises(PermissionError):
                os.ftruncate(peer, 0)
        finally:
            os.close(peer)


def test_nobody_at_all_can_write_once_a_slab_is_sealed() -> None:
    with sealed(HostBackend()) as slab:
        before = slab.crc32(0, SLAB_BYTES)
        with pytest.raises(PermissionError):
            mmap.mmap(slab.borrow_fd(), PAGE, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        peer = os.open(f"/proc/self/fd/{slab.borrow_fd()}", os.O_RDWR | os.O_CLOEXEC)
        try:
            with pytest.raises(PermissionError):
                mmap.mmap(peer, PAGE, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
            with pytest.raises(PermissionError):
                os.pwrite(peer, b"x", 0)
            with pytest.raises(PermissionError):
                os.ftruncate(peer, PAGE)
        finally:
            os.close(peer)
        assert slab.crc32(0, SLAB_BYTES) == before


def test_the_only_mapping_of_a_sealed_slab_is_read_only() -> None:
    with HostBackend().create_slab(HOST_DEVICE, PAGE) as writable:
        (line,) = slab_mappings()
        assert line.split()[1] == "rw-s"
        with writable.seal() as slab:
            (line,) = slab_mappings()
            assert line.split()[1] == "r--s"
            address = slab.tensor(0, "U8", (1,)).data_ptr()
            libc = ctypes.CDLL(None, use_errno=True)
            protection = mmap.PROT_READ | mmap.PROT_WRITE
            assert libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(PAGE), protection) == -1
            assert ctypes.get_errno() == errno.EACCES


WRITE_THROUGH_A_TENSOR = """
import resource, sys
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
from shared.ids import HOST_DEVICE
from shared.layout import SlabEntry
from shared.memory.host import HostBackend
slab = HostBackend().import_slab(SlabEntry("slab", HOST_DEVICE, int(sys.argv[2])), int(sys.argv[1]))
tensor = slab.tensor(0, "F32", (8,))
print(slab.crc32(0, slab.entry.nbytes), flush=True)
tensor.fill_(1.0)
print("written", flush=True)
"""


def test_a_stray_write_kills_the_writer_and_harms_nobody() -> None:
    with sealed(HostBackend()) as slab:
        before = slab.crc32(0, SLAB_BYTES)
        child = subprocess.run(
            [sys.executable, "-c", WRITE_THROUGH_A_TENSOR, str(slab.borrow_fd()), str(SLAB_BYTES)],
            pass_fds=[slab.borrow_fd()],
            capture_output=True,
            text=True,
            check=False,
        )
        assert child.stdout == f"{before}\n", child.stderr
        assert child.returncode == -signal.SIGSEGV
        assert slab.crc32(0, SLAB_BYTES) == before


# --- imports -------------------------------------------------------------------------------------


@pytest.mark.parametrize("write_seal", [fcntl.F_SEAL_WRITE, F_SEAL_FUTURE_WRITE])
def test_either_seal_against_writing_will_do(write_seal: int) -> None:
    fd = foreign_memfd(PAGE, FINAL_SEALS & ~(fcntl.F_SEAL_WRITE | F_SEAL_FUTURE_WRITE) | write_seal)
    with HostBackend().import_slab(entry_of(PAGE), fd) as slab:
        assert slab.crc32(0, PAGE) == zlib.crc32(bytes(PAGE))
        # Received for reading and writing, kept for reading alone.
        assert fcntl.fcntl(slab.borrow_fd(), fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
        assert not os.get_inheritable(slab.borrow_fd())


@pytest.mark.parametrize(
    "missing",
    [
        fcntl.F_SEAL_GROW,
        fcntl.F_SEAL_SHRINK,
        fcntl.F_SEAL_WRITE | F_SEAL_FUTURE_WRITE,
        fcntl.F_SEAL_SEAL,
        FINAL_SEALS,
    ],
)
def test_a_missing_seal_is_refused(missing: int) -> None:
    fd = foreign_memfd(PAGE, FINAL_SEALS & ~missing)
    with pytest.raises(ProtocolError, match="seal"):
        HostBackend().import_slab(entry_of(PAGE), fd)


@pytest.mark.parametrize("nbytes", [1, PAGE - 1, PAGE + 1, 2**62])
def test_another_size_is_refused(nbytes: int) -> None:
    with pytest.raises(ProtocolError, match=f"has {PAGE} bytes, expected {nbytes}"):
        HostBackend().import_slab(entry_of(nbytes), foreign_memfd(PAGE, FINAL_SEALS))


def test_what_is_no_memfd_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(PAGE))
    reader, writer = os.pipe()
    os.close(writer)
    for fd in (
        os.open(path, os.O_RDWR | os.O_CLOEXEC),
        os.open(tmp_path, os.O_RDONLY | os.O_CLOEXEC),
        reader,
    ):
        with pytest.raises(ProtocolError):
            HostBackend().import_slab(entry_of(PAGE), fd)


def test_an_fd_that_is_not_open_is_an_error_of_the_call() -> None:
    with pytest.raises(DriverError) as caught:
        HostBackend().import_slab(entry_of(PAGE), 2**20)
    assert (caught.value.call, caught.value.number) == ("fcntl(F_GET_SEALS)", errno.EBADF)


# --- tensors -------------------------------------------------------------------------------------


def test_tensors_lie_in_the_mapping() -> None:
    with sealed(HostBackend()) as slab:
        (line,) = slab_mappings()
        first, last = (int(part, 16) for part in line.split()[0].split("-"))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            tensor = slab.tensor(256, "BF16", (16, 16))
        assert tensor.data_ptr() == first + 256
        assert tensor.data_ptr() + tensor.nbytes <= last
        assert tensor.device.type == "cpu"


def test_a_mapping_lives_as_long_as_its_tensors() -> None:
    backend = HostBackend(limit_bytes=SLAB_BYTES)
    slab = sealed(backend)
    one, other = slab.tensor(0, "U8", (4,)), slab.tensor(256, "U8", (4,))
    slab.close()
    assert slab_fds() == ()
    assert len(slab_mappings()) == 1
    assert backend.used_bytes == SLAB_BYTES
    with pytest.raises(OutOfMemory):
        backend.create_slab(HOST_DEVICE, 1)
    del one
    assert len(slab_mappings()) == 1
    del other
    assert slab_mappings() == ()
    assert backend.used_bytes == 0


def test_a_view_that_nobody_takes_is_freed() -> None:
    native = _native.create_host_slab(_native.Budget(), "slab", PAGE).seal()
    view = native.view(0, PAGE)
    native.close()
    assert len(slab_mappings()) == 1
    del view
    assert slab_mappings() == ()


def test_loading_needs_no_torch() -> None:
    code = "import sys, shared.memory.host; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- memory --------------------------------------------------------------------------------------


def test_a_slab_counts_once_however_often_it_is_held() -> None:
    backend = HostBackend(limit_bytes=2 * SLAB_BYTES)
    with sealed(backend) as slab:
        copy = backend.import_slab(slab.entry, os.dup(slab.borrow_fd()))
        assert backend.used_bytes == SLAB_BYTES
    assert backend.used_bytes == SLAB_BYTES
    copy.close()
    assert backend.used_bytes == 0


def test_adopted_memory_counts_against_the_limit() -> None:
    backend = HostBackend(limit_bytes=SLAB_BYTES + PAGE)
    with sealed(HostBackend()) as slab:
        with backend.import_slab(slab.entry, os.dup(slab.borrow_fd())):
            assert backend.free_bytes(HOST_DEVICE) == PAGE
            with pytest.raises(OutOfMemory):
                backend.create_slab(HOST_DEVICE, PAGE + 1)
        assert backend.free_bytes(HOST_DEVICE) == SLAB_BYTES + PAGE


def test_the_budget_itself_keeps_its_limit() -> None:
    budget = _native.Budget(2 * PAGE)
    slab = _native.create_host_slab(budget, "slab", PAGE)
    with pytest.raises(OutOfMemory) as caught:
        _native.create_host_slab(budget, "other", PAGE + 1)
    assert (caught.value.facts["needed_bytes"], caught.value.facts["free_bytes"]) == (PAGE + 1, PAGE)
    with pytest.raises(InvariantError, match="exists already"):
        _native.create_host_slab(budget, "slab", PAGE)
    assert budget.used_bytes == PAGE
    slab.close()
    assert budget.used_bytes == 0


def test_the_limit_holds_between_threads() -> None:
    backend = HostBackend(limit_bytes=4 * PAGE)
    barrier = threading.Barrier(8)
    slabs = []
    refusals = []

    def create() -> None:
        barrier.wait()
        try:
            slabs.append(backend.create_slab(HOST_DEVICE, PAGE))
        except OutOfMemory as error:
            refusals.append(error)

    threads = [threading.Thread(target=create) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(slabs), len(refusals)) == (4, 4)
    for slab in slabs:
        slab.close()


def test_the_machines_memory_bounds_a_backend_without_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.memory.host.available_bytes", lambda: 10 * PAGE)
    backend = HostBackend()
    assert backend.free_bytes(HOST_DEVICE) == 10 * PAGE
    with pytest.raises(OutOfMemory) as caught:
        backend.create_slab(HOST_DEVICE, 10 * PAGE + 1)
    assert caught.value.facts["free_bytes"] == 10 * PAGE


def test_memory_is_promised_before_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.memory.host.available_bytes", lambda: 10 * PAGE)
    backend = HostBackend()
    with backend.create_slab(HOST_DEVICE, 7 * PAGE) as writable:
        assert backend.free_bytes(HOST_DEVICE) == 3 * PAGE, "none of its pages exists yet"
        with pytest.raises(OutOfMemory):
            backend.create_slab(HOST_DEVICE, 4 * PAGE)
        with writable.seal():
            assert backend.free_bytes(HOST_DEVICE) == 10 * PAGE, "now the machine counts them"
    with backend.create_slab(HOST_DEVICE, 7 * PAGE):
        pass
    assert backend.free_bytes(HOST_DEVICE) == 10 * PAGE


@pytest.mark.parametrize("number", [errno.ENOMEM, errno.ENOSPC])
@pytest.mark.parametrize("call", ["read_file", "read_pieces", "seal"])
def test_pages_that_the_kernel_has_not_are_out_of_memory(number: int, call: str) -> None:
    def fail(*_: object) -> None:
        raise DriverError("fallocate", number, "no memory")

    native = SimpleNamespace(
        read_file=fail, read_pieces=fail, seal=fail, missing_bytes=PAGE, is_open=True, close=lambda: None
    )
    entry = SlabEntry(SlabId("full"), HOST_DEVICE, PAGE)
    slab = WritableHostSlab(entry, cast(_native.WritableHostSlab, native), Promises())
    calls: dict[str, Callable[[], object]] = {
        "read_file": lambda: slab.read_file(0, 0, 0, PAGE),
        "read_pieces": lambda: slab.read_pieces(0, 0, [(0, PAGE)]),
        "seal": slab.seal,
    }
    with pytest.raises(OutOfMemory) as caught:
        calls[call]()
    assert caught.value.facts["needed_bytes"] == PAGE


def test_other_failures_of_the_kernel_keep_call_and_number() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    budget = _native.Budget()
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        with pytest.raises(DriverError) as caught:
            _native.create_host_slab(budget, "slab", PAGE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert (caught.value.call, caught.value.number) == ("memfd_create", errno.EMFILE)
    assert budget.used_bytes == 0


def test_every_page_of_a_sealed_slab_exists_also_where_nothing_was_read() -> None:
    nbytes = (40 << 20) + PAGE + 1  # more than one block, and not in whole huge pages
    with HostBackend().create_slab(HOST_DEVICE, nbytes) as writable, writable.seal() as slab:
        info = os.fstat(slab.borrow_fd())
        assert info.st_blocks * 512 >= nbytes
        assert info.st_size == nbytes
        assert slab.crc32(0, nbytes) == zlib.crc32(bytes(nbytes))


def test_pages_are_taken_as_a_slab_is_filled() -> None:
    with HostBackend().create_slab(HOST_DEVICE, 96 << 20) as writable:
        (fd,) = slab_fds()
        assert os.fstat(fd).st_blocks == 0
        with Path("/proc/self/exe").open("rb") as file:
            writable.read_file(file.fileno(), 0, 40 << 20, PAGE)
        assert PAGE <= os.fstat(fd).st_blocks * 512 <= 32 << 20


def test_slabs_are_mapped_where_huge_pages_fit() -> None:
    with sealed(HostBackend()) as slab:
        assert slab.tensor(0, "U8", (1,)).data_ptr() % (2 << 20) == 0
