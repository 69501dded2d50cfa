"""What a load is asked for, and how far it is."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass

from loaderd.checkpoint.checkpoint import Checkpoint
from loaderd.placement import Placement
from loaderd.seal.document import Seal
from shared.ids import DeviceId, VersionRef
from shared.memory.backend import Slab


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """What to load and where; the checkpoint and the shared slabs stay the caller's.

    A shared slab that a device lacks is copied to it from another, which need not be one of `devices`."""

    ref: VersionRef
    checkpoint: Checkpoint
    seal: Seal | None
    placement: Placement
    shared: tuple[Mapping[DeviceId, Slab], ...]  # of each of placement.shared_slabs, the replicas there are
    devices: tuple[DeviceId, ...]  # each gets a copy; files are read into the first


class LoadProgress:
    """Byte counters that workers raise and the event loop reads.  Slabs are hashed while others are read,
    so both rise together."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.read = 0
        self.verified = 0
        self.is_verifying = False  # everything is read, the rest is hashing

    def add_read(self, nbytes: int) -> None:
        """Count bytes that are in memory."""
        with self._lock:
            self.read += nbytes

    def add_verified(self, nbytes: int) -> None:
        """Count bytes that were hashed where they lie."""
        with self._lock:
            self.verified += nbytes
