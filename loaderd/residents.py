"""What is resident on a host: content by digest, the slabs it lies in, and their replicas on its devices."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Self

from shared.errors import InvariantError
from shared.ids import DeviceId, Digest, SlabId
from shared.layout import Layout


@dataclass(frozen=True, slots=True)
class ResidentPlace:
    """Where content lies now, in every replica of the slab."""

    slab_id: SlabId
    offset_bytes: int
    nbytes: int
    crc32: int


@dataclass(frozen=True, slots=True)
class Replica:
    """The slab that stands for a resident slab on one device, and the versions that keep it."""

    slab_id: SlabId
    held_by: frozenset[str]


@dataclass(frozen=True, slots=True)
class ResidentSlab:
    """Bytes that are allocated now, on one device or, alike, on several."""

    slab_id: SlabId  # of one of the replicas; stands for all of them in a placement
    nbytes: int
    replicas: Mapping[DeviceId, Replica]

    @property
    def held_by(self) -> frozenset[str]:
        """The versions that keep any of the replicas."""
        return frozenset().union(*(replica.held_by for replica in self.replicas.values()))


@dataclass(frozen=True, slots=True)
class Residents:
    """All content that is resident on the host, by digest, and the slabs it lies in."""

    places: Mapping[Digest, ResidentPlace] = field(default_factory=lambda: MappingProxyType({}))
    slabs: Mapping[SlabId, ResidentSlab] = field(default_factory=lambda: MappingProxyType({}))

    @classmethod
    def of(cls, versions: Mapping[str, Sequence[Layout]], devices: Collection[DeviceId] = ()) -> Self:
        """What the layouts of the resident versions' copies say, one layout for each device that has a copy.

        The slabs at one index of a version's layouts are replicas.  Of content in two places, that of the
        version counts which has copies on most of `devices`, and of those the first.
        """
        slabs = _replicas_of(versions)
        named = {
            replica.slab_id: slab_id for slab_id, slab in slabs.items() for replica in slab.replicas.values()
        }
        places: dict[Digest, ResidentPlace] = {}
        for layouts in sorted(versions.values(), key=lambda layouts: -_covered(layouts, devices)):
            layout = layouts[0]
            for tensor in layout.tensors:
                if tensor.nbytes:
                    places.setdefault(
                        tensor.digest,
                        ResidentPlace(
                            named[layout.slabs[tensor.slab].slab_id],
                            tensor.offset_bytes,
                            tensor.nbytes,
                            tensor.crc32,
                        ),
                    )
        return cls(MappingProxyType(places), MappingProxyType(slabs))

    def replica_on(self, device: DeviceId, slab_id: SlabId) -> SlabId | None:
        """The slab of a device that has the same bytes as `slab_id`, on whichever device that is."""
        for slab in self.slabs.values():
            if any(replica.slab_id == slab_id for replica in slab.replicas.values()):
                there = slab.replicas.get(device)
                return there.slab_id if there is not None else None
        return None

    def bytes_on(self, device: DeviceId) -> int:
        """Bytes of all slabs on a device."""
        return sum(slab.nbytes for slab in self.slabs.values() if device in slab.replicas)

    def freed_bytes(self, device: DeviceId, versions: frozenset[str], kept: frozenset[SlabId]) -> int:
        """Bytes that come free on a device when `versions` go, while slabs in `kept` stay."""
        freed = 0
        for slab in self.slabs.values():
            replica = slab.replicas.get(device)
            if replica is not None and replica.held_by <= versions and slab.slab_id not in kept:
                freed += slab.nbytes
        return freed

    def bytes_lacking(self, device: DeviceId, slab_ids: Collection[SlabId]) -> int:
        """Bytes of those slabs that a device has no replica of."""
        slabs = (self.slabs[slab_id] for slab_id in slab_ids)
        return sum(slab.nbytes for slab in slabs if device not in slab.replicas)


def _covered(layouts: Sequence[Layout], devices: Collection[DeviceId]) -> int:
    return sum(bool(layout.slabs) and layout.slabs[0].device in devices for layout in layouts)


def _replicas_of(versions: Mapping[str, Sequence[Layout]]) -> dict[SlabId, ResidentSlab]:
    """The slabs of all layouts, those together that are replicas of each other.

    A device can have two slabs with the same bytes: one was made again while nobody knew of the other.
    The second then stands alone, so that each slab is counted once and freed with those who hold it.
    """
    sizes: dict[SlabId, int] = {}
    holders: dict[SlabId, set[str]] = {}
    named: dict[SlabId, SlabId] = {}
    replicas: dict[SlabId, dict[DeviceId, SlabId]] = {}
    for version, layouts in versions.items():
        for row in zip(*(layout.slabs for layout in layouts), strict=True):
            name = next((named[slab.slab_id] for slab in row if slab.slab_id in named), row[0].slab_id)
            for slab in row:
                if sizes.setdefault(slab.slab_id, slab.nbytes) != slab.nbytes or slab.nbytes != row[0].nbytes:
                    raise InvariantError(f"two versions disagree on the size of slab {slab.slab_id}")
                holders.setdefault(slab.slab_id, set()).add(version)
                if slab.slab_id not in named:
                    is_taken = slab.device in replicas.get(name, {})
                    named[slab.slab_id] = slab.slab_id if is_taken else name
                    replicas.setdefault(named[slab.slab_id], {})[slab.device] = slab.slab_id
    return {
        name: ResidentSlab(
            name,
            sizes[name],
            MappingProxyType(
                {device: Replica(slab_id, frozenset(holders[slab_id])) for device, slab_id in row.items()}
            ),
        )
        for name, row in replicas.items()
    }
