"""The layout table: where each tensor of a version lies and what its bytes must hash to."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from shared.ids import DeviceId, Digest, SlabId

ALIGNMENT_BYTES = 256
"""Every tensor starts at a multiple of this in its slab, whatever its offset in the file."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor: its identity (name, dtype, shape, digest) and its place (slab, offset)."""

    name: str
    dtype: str  # as safetensors spells it: F32, BF16, I64, BOOL, …
    shape: tuple[int, ...]
    nbytes: int
    slab: int  # index into Layout.slabs; an empty tensor lies at offset 0 of slab 0
    offset_bytes: int
    crc32: int
    digest: Digest

    @property
    def elements(self) -> int:
        """Number of elements; 1 for a scalar (shape `()`), 0 if a dimension is 0."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class SlabEntry:
    """One physical allocation as the layout table names it."""

    slab_id: SlabId
    device: DeviceId
    nbytes: int


@dataclass(frozen=True, slots=True)
class Layout:
    """All tensors of a version and the slabs they lie in."""

    slabs: tuple[SlabEntry, ...]
    tensors: tuple[TensorEntry, ...]  # sorted by name

    @property
    def total_bytes(self) -> int:
        """Bytes of all distinct places; tensors that are aliases of one place count once."""
        places = {(t.slab, t.offset_bytes): t.nbytes for t in self.tensors if t.nbytes}
        return sum(places.values())
