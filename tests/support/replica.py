"""A slab's copy on another device, made as loaderd makes one."""

from __future__ import annotations

from shared.ids import DeviceId
from shared.memory.backend import MemoryBackend, Slab


def replica_of(slab: Slab, backend: MemoryBackend, device: DeviceId) -> Slab:
    """A sealed copy on `device`, which may be the slab's own; where it raises, nothing stays allocated."""
    with backend.create_slab(device, slab.entry.nbytes) as target:
        target.copy_from(slab)
        return target.seal()
