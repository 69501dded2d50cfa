"""The other process of the tests: `python -m tests.gpu.peer VERB FD`."""

from __future__ import annotations

import socket
import sys
from contextlib import ExitStack

from shared import _native
from shared.memory.cuda import CudaBackend
from tests.gpu.driver_calls import memset
from tests.gpu.slabs import decode, encode, make_data, sealed

EXPORTED_BYTES = 3 << 20
EXPORTED = make_data(EXPORTED_BYTES, seed=42)


def export(connection: socket.socket, *, legacy_ipc: bool = False) -> None:
    """Send a sealed slab, then keep it until told to end."""
    with sealed(CudaBackend(legacy_ipc=legacy_ipc), EXPORTED) as slab:
        socket.send_fds(connection, [encode(slab.entry)], [slab.borrow_fd()])
        connection.recv(1)


def read(connection: socket.socket) -> None:
    """Answer the CRC32 of a received slab, and what a driver's write to it gives."""
    message, fds, _, _ = socket.recv_fds(connection, 65536, 1)
    entry = decode(message)
    with CudaBackend().import_slab(entry, fds[0]) as slab:
        address = slab.tensor(0, "U8", (1,)).data_ptr()
        refused = memset(_native.cuda_device_ordinal(entry.device), address, 16)
        connection.send(f"{slab.crc32(0, entry.nbytes)} {refused}".encode())


def write(connection: socket.socket) -> None:
    """Let a kernel write into a received slab."""
    import torch

    with ExitStack() as kept:
        message, fds, _, _ = socket.recv_fds(connection, 65536, 1)
        slab = kept.enter_context(CudaBackend().import_slab(decode(message), fds[0]))
        tensor = slab.tensor(0, "U8", (4096,))
        connection.send(b"ready")
        try:
            tensor.add_(1)
            torch.cuda.synchronize()
        except RuntimeError:
            connection.send(b"context lost")
            kept.pop_all()
            sys.exit(3)
        connection.send(b"written")


def hold(connection: socket.socket) -> None:
    """Map a received slab and keep it until told to end."""
    message, fds, _, _ = socket.recv_fds(connection, 65536, 1)
    with CudaBackend().import_slab(decode(message), fds[0]):
        connection.send(b"mapped")
        connection.recv(1)


def main() -> None:
    verb = sys.argv[1]
    with socket.socket(fileno=int(sys.argv[2])) as connection:
        match verb:
            case "export":
                export(connection)
            case "export-legacy":
                export(connection, legacy_ipc=True)
            case "read":
                read(connection)
            case "write":
                write(connection)
            case "hold":
                hold(connection)
            case _:
                sys.exit(f"there is no verb {verb!r}")


if __name__ == "__main__":
    main()
