"""A writer and a reader of slabs, and the bytes that they exchange."""

from __future__ import annotations

import random
import tempfile

from shared.ids import DeviceId
from shared.memory.backend import MemoryBackend, Slab

SLAB_BYTES = 2 * (2 << 20)  # in whole steps of what a GPU allocates
LIMIT_BYTES = 8 * SLAB_BYTES
DATA = random.Random(7).randbytes(SLAB_BYTES)


class Pair:
    """A writer's backend and a reader's, as in two processes, with memory limited to LIMIT_BYTES."""

    def __init__(self, writer: MemoryBackend, reader: MemoryBackend) -> None:
        self.writer = writer
        self.reader = reader
        self.device: DeviceId = writer.devices()[0]

    def sealed(self, data: bytes = DATA) -> Slab:
        with tempfile.TemporaryFile() as file:
            file.write(data)
            file.flush()
            with self.writer.create_slab(self.device, len(data)) as slab:
                slab.read_file(file.fileno(), 0, 0, len(data))
                return slab.seal()
