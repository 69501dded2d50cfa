"""Where each tensor of a version will lie: shared with what is resident, or read into new slabs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from loaderd.checkpoint.header import TensorSource
from loaderd.residents import Residents
from shared.ids import Digest, SlabId
from shared.layout import ALIGNMENT_BYTES

_FULL_FRACTION = 64
"""A slab with less than one part in this many left takes no more tensors."""


@dataclass(frozen=True, slots=True)
class PlacementRules:
    """Sizes that placement keeps to."""

    slab_bytes: int = 1 << 30  # a slab grows up to this; a larger tensor gets a slab of its own
    granularity_bytes: int = 2 << 20  # slab sizes are multiples of this
    max_dead_ratio: float = 1.0  # bytes kept alive only by their neighbours, per byte of the version


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor will lie.  `slab` counts the new slabs first, then the shared ones; an empty
    tensor lies at offset 0 of slab 0."""

    slab: int
    offset_bytes: int


@dataclass(frozen=True, slots=True)
class ReadExtent:
    """Bytes of one tensor, all or a part, from a file into a new slab."""

    file: str
    file_offset: int
    slab: int
    slab_offset: int
    nbytes: int
    tensor: str


@dataclass(frozen=True, slots=True)
class SharedTensor:
    """A tensor whose content is resident already; aliases of one place are listed each."""

    tensor: str
    slab_id: SlabId
    offset_bytes: int
    nbytes: int
    crc32: int  # of the resident bytes, as they were verified when they were loaded


@dataclass(frozen=True, slots=True)
class Placement:
    """A place for every tensor, and the reads that fill the new slabs."""

    slabs: tuple[int, ...]  # sizes of the new slabs in bytes
    shared_slabs: tuple[SlabId, ...]
    places: Mapping[str, Place]
    reads: tuple[ReadExtent, ...]  # whole tensors, by file and offset
    shared: tuple[SharedTensor, ...]  # by name
    bytes_to_read: int
    bytes_to_share: int  # distinct resident bytes
    dead_bytes: int  # bytes of the shared slabs that this version does not use

    @property
    def bytes_to_allocate(self) -> int:
        """Bytes of the new slabs."""
        return sum(self.slabs)


def place(
    tensors: Sequence[TensorSource],
    digests: Mapping[str, Digest],
    residents: Residents,
    rules: PlacementRules,
    avoid: frozenset[str] = frozenset(),
) -> Placement:
    """Place every tensor once; the same arguments give the same placement, in whatever order they come.

    Content that is resident is shared, unless only versions in `avoid` hold its slab or too much of
    that slab would stay allocated for nothing.  Tensors with equal digests lie in one place.  The
    others are packed in file order, first fit, so that neighbours in a file are neighbours in a slab.
    """
    ordered = sorted(tensors, key=lambda tensor: (tensor.file, tensor.file_offset, tensor.name))
    usable = _usable_slabs(ordered, digests, residents, rules, avoid)
    packing = _Packing(rules)
    shared: list[SharedTensor] = []
    own: dict[str, tuple[int, int]] = {}
    by_content: dict[tuple[Digest | None, int], tuple[int, int]] = {}
    reads: list[ReadExtent] = []
    for tensor in ordered:
        if tensor.nbytes == 0:
            own[tensor.name] = (0, 0)
            continue
        digest = digests.get(tensor.name)
        resident = residents.places.get(digest) if digest is not None else None
        if resident is not None and resident.nbytes == tensor.nbytes and resident.slab_id in usable:
            shared.append(
                SharedTensor(
                    tensor.name,
                    resident.slab_id,
                    resident.offset_bytes,
                    tensor.nbytes,
                    resident.crc32,
                )
            )
            continue
        content = (digest, tensor.nbytes)
        spot = by_content.get(content)
        if spot is None:
            spot = packing.add(tensor.nbytes)
            reads.append(ReadExtent(tensor.file, tensor.file_offset, *spot, tensor.nbytes, tensor.name))
            if digest is not None:
                by_content[content] = spot
        own[tensor.name] = spot
    shared.sort(key=lambda entry: entry.tensor)
    slabs = packing.sizes()
    shared_slabs = tuple(sorted({entry.slab_id for entry in shared}))
    position = {slab_id: len(slabs) + index for index, slab_id in enumerate(shared_slabs)}
    places = {name: Place(slab, offset) for name, (slab, offset) in own.items()}
    places.update({entry.tensor: Place(position[entry.slab_id], entry.offset_bytes) for entry in shared})
    distinct = {(entry.slab_id, entry.offset_bytes): entry.nbytes for entry in shared}
    bytes_to_share = sum(distinct.values())
    return Placement(
        slabs=slabs,
        shared_slabs=shared_slabs,
        places=MappingProxyType({name: places[name] for name in sorted(places)}),
        reads=tuple(reads),
        shared=tuple(shared),
        bytes_to_read=sum(read.nbytes for read in reads),
        bytes_to_share=bytes_to_share,
        dead_bytes=sum(residents.slabs[slab_id].nbytes for slab_id in shared_slabs) - bytes_to_share,
    )


def _usable_slabs(
    tensors: Sequence[TensorSource],
    digests: Mapping[str, Digest],
    residents: Residents,
    rules: PlacementRules,
    avoid: frozenset[str],
) -> frozenset[SlabId]:
    """Slabs to share from.

    A slab lives as long as one tensor in it does.  Without a bound, a chain of small changes would
    keep every old slab for its last few tensors, so the fullest slabs are taken first, until what
    they keep alive for nothing exceeds its share of the version.
    """
    staying = {slab_id for slab_id, slab in residents.slabs.items() if not slab.held_by <= avoid}
    used: dict[SlabId, dict[int, int]] = {}
    total = 0
    seen: set[tuple[Digest, int]] = set()
    for tensor in tensors:
        digest = digests.get(tensor.name)
        if digest is not None:
            if (digest, tensor.nbytes) in seen:
                continue
            seen.add((digest, tensor.nbytes))
        total += tensor.nbytes
        resident = residents.places.get(digest) if digest is not None else None
        # A seal can claim a digest for a tensor of another size: that is found when it is read.
        if resident is None or resident.nbytes != tensor.nbytes:
            continue
        if resident.slab_id in staying:
            used.setdefault(resident.slab_id, {})[resident.offset_bytes] = resident.nbytes
    dead = {
        slab_id: max(0, residents.slabs[slab_id].nbytes - sum(ranges.values()) - rules.granularity_bytes)
        for slab_id, ranges in used.items()
    }
    budget = int(total * rules.max_dead_ratio)
    taken: set[SlabId] = set()
    for slab_id in sorted(dead, key=lambda key: (dead[key] / residents.slabs[key].nbytes, key)):
        if dead[slab_id] <= budget:
            budget -= dead[slab_id]
            taken.add(slab_id)
    return frozenset(taken)


class _Packing:
    """First fit into slabs that grow up to the target size."""

    def __init__(self, rules: PlacementRules) -> None:
        self._rules = rules
        self._ends: list[int] = []
        self._open: list[int] = []

    def add(self, nbytes: int) -> tuple[int, int]:
        """Slab and aligned offset for `nbytes`."""
        target = self._rules.slab_bytes
        if nbytes <= target:
            for slab in self._open:
                offset = _round_up(self._ends[slab], ALIGNMENT_BYTES)
                if offset + nbytes <= target:
                    self._ends[slab] = offset + nbytes
                    if target - self._ends[slab] < target // _FULL_FRACTION:
                        self._open.remove(slab)
                    return slab, offset
        self._ends.append(nbytes)
        slab = len(self._ends) - 1
        if target - nbytes >= max(target // _FULL_FRACTION, 1):
            self._open.append(slab)
        return slab, 0

    def sizes(self) -> tuple[int, ...]:
        """Bytes of each slab."""
        return tuple(_round_up(end, self._rules.granularity_bytes) for end in self._ends)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
