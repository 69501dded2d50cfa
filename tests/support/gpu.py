"""Which GPUs a test can use, asked of the driver."""

from __future__ import annotations

import tempfile
from functools import cache

from shared import _native
from shared.errors import DriverError, DriverMissing
from shared.ids import DeviceId
from shared.memory.cuda import CudaBackend


@cache
def visible_gpus() -> tuple[DeviceId, ...]:
    """Devices by UUID; none where there is no driver or it finds none."""
    try:
        return tuple(DeviceId(uuid) for uuid in _native.cuda_devices())
    except (DriverMissing, DriverError):
        return ()


@cache
def warm_up_gpu() -> None:
    """Let the driver open now what it opens once, so that no test is blamed for it."""
    if not visible_gpus():
        return
    backend = CudaBackend()
    with tempfile.TemporaryFile() as file, backend.create_slab(backend.devices()[0], 1) as writable:
        file.write(b"1")
        file.flush()
        writable.read_file(file.fileno(), 0, 0, 1)
        with writable.seal() as slab:
            slab.crc32(0, 1)
            slab.sha256_leaves(0, 1, 1)
            slab.tensor(0, "U8", (1,)).cpu()
