"""How a device's memory is used, as a backend sees it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeviceUsage:
    """Bytes of one device; `total_bytes` is None where the backend has no such number."""

    free_bytes: int  # what new slabs could take together, from the pool too
    largest_free_bytes: int  # what one slab could take
    total_bytes: int | None = None
    pool_bytes: int = 0  # kept for slabs: those in use, and what is reserved for more
    reserved_bytes: int = 0  # of the pool, not in a slab

    @property
    def fragmentation(self) -> float:
        """The share of free memory that one slab could not take; 0.0 where nothing is free."""
        if self.free_bytes <= 0:
            return 0.0
        return 1.0 - self.largest_free_bytes / self.free_bytes
