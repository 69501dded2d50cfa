"""Slabs with known bytes, here and in another process."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from shared.ids import DeviceId, SlabId
from shared.layout import SlabEntry
from shared.memory.cuda import CudaBackend, CudaSlab

ROOT = Path(__file__).parents[2]
STEP_BYTES = 2 << 20
PEER_TIMEOUT_S = 90.0


def make_data(nbytes: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(nbytes)


def sealed(backend: CudaBackend, data: bytes) -> CudaSlab:
    """A sealed slab that starts with `data`."""
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.flush()
        with backend.create_slab(backend.devices()[0], len(data)) as writable:
            writable.read_file(file.fileno(), 0, 0, len(data))
            return writable.seal()


def encode(entry: SlabEntry) -> bytes:
    return json.dumps(asdict(entry)).encode()


def decode(text: bytes) -> SlabEntry:
    fields = json.loads(text)
    return SlabEntry(SlabId(fields["slab_id"]), DeviceId(fields["device"]), fields["nbytes"])


@dataclass(slots=True)
class Peer:
    """Another process that runs one function of tests/gpu/peer.py, and a socket to it."""

    process: subprocess.Popen[bytes]
    socket: socket.socket

    def send(self, message: bytes, fds: tuple[int, ...] = ()) -> None:
        socket.send_fds(self.socket, [message], fds)

    def receive(self) -> tuple[bytes, list[int]]:
        """One message; empty where the peer has ended."""
        message, fds, _, _ = socket.recv_fds(self.socket, 65536, 8)
        return message, fds

    def wait(self) -> int:
        return self.process.wait(PEER_TIMEOUT_S)


@contextmanager
def peer(verb: str) -> Iterator[Peer]:
    """Start a peer; it is killed at the end of the block if it still runs."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        ours.settimeout(PEER_TIMEOUT_S)
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.gpu.peer", verb, str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            )
        try:
            yield Peer(process, ours)
        finally:
            process.kill()
            process.wait()
