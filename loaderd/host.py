"""`Host`: what everything on one host works with."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

from loaderd.checks import Checks
from loaderd.chronicle import Chronicle
from loaderd.copies import Copies
from loaderd.gpu_watch import GpuWatch
from loaderd.leases import Lease
from loaderd.model_devices import ModelDevices
from loaderd.operations import Operations
from loaderd.pace import Pace
from loaderd.planning import Planner
from loaderd.slab_closer import SlabCloser
from loaderd.versions import VersionTable
from shared.ids import LeaseId
from shared.memory.backend import MemoryBackend


@dataclass(frozen=True, slots=True)
class Host:
    """What all deployments of a host share."""

    chronicle: Chronicle
    operations: Operations
    versions: VersionTable
    copies: Copies
    planner: Planner
    backend: MemoryBackend
    devices: ModelDevices
    gpus: GpuWatch
    leases: Mapping[LeaseId, Lease]
    pace: Pace
    closer: SlabCloser
    spawn: Callable[[Coroutine[Any, Any, None]], None]
    checks: Checks = field(default_factory=Checks)

    def collect(self) -> None:
        """Free what is on its way out and mapped by nobody any more."""
        self.versions.collect(tuple(self.leases.values()))
