"""Slabs by id, counted by the versions that use them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NewType

from shared.errors import InvariantError
from shared.ids import DeviceId, SlabId
from shared.memory.backend import Slab

UserId = NewType("UserId", int)
"""One load of one version; the same folder pushed twice is two users."""


@dataclass(slots=True)
class _Entry:
    slab: Slab
    users: set[UserId] = field(default_factory=set)


class SlabTable:
    """Owns every slab of this loaderd.  A slab is given up when its last user lets go.

    Used from the event loop's thread only.
    """

    def __init__(self, give_up: Callable[[Sequence[Slab]], None]) -> None:
        """`give_up` takes slabs that have no user any more, to close them."""
        self._give_up = give_up
        self._entries: dict[SlabId, _Entry] = {}
        self._used_bytes: Counter[DeviceId] = Counter()
        self._peak_bytes: Counter[DeviceId] = Counter()

    def used_bytes(self, device: DeviceId) -> int:
        """Bytes of all slabs on a device, each counted once."""
        return self._used_bytes[device]

    def peak_bytes(self, device: DeviceId) -> int:
        """The most that `used_bytes` ever was."""
        return self._peak_bytes[device]

    def add(self, take_slab: Slab, user: UserId) -> None:
        """Take ownership of a slab for its first user; raises InvariantError for a known id."""
        slab_id = take_slab.entry.slab_id
        if slab_id in self._entries:
            raise InvariantError(f"slab {slab_id} was added twice")
        self._entries[slab_id] = _Entry(take_slab, {user})
        device = take_slab.entry.device
        self._used_bytes[device] += take_slab.entry.nbytes
        self._peak_bytes[device] = max(self._peak_bytes[device], self._used_bytes[device])

    def __contains__(self, slab_id: object) -> bool:
        return slab_id in self._entries

    def share(self, slab_id: SlabId, user: UserId) -> Slab:
        """Count one more user of a resident slab and borrow it; raises InvariantError if it is gone."""
        entry = self._entries.get(slab_id)
        if entry is None:
            raise InvariantError(f"slab {slab_id} is not resident")
        entry.users.add(user)
        return entry.slab

    def release(self, user: UserId) -> int:
        """Let go of all slabs of a user; returns the bytes that are given up with it."""
        unused: list[Slab] = []
        for slab_id in [slab_id for slab_id, entry in self._entries.items() if user in entry.users]:
            entry = self._entries[slab_id]
            entry.users.remove(user)
            if not entry.users:
                del self._entries[slab_id]
                self._used_bytes[entry.slab.entry.device] -= entry.slab.entry.nbytes
                unused.append(entry.slab)
        if unused:
            self._give_up(unused)
        return sum(slab.entry.nbytes for slab in unused)

    def shared_bytes(self, slab_ids: Iterable[SlabId]) -> int:
        """Bytes of those slabs that more than one user holds."""
        entries = (self._entries[slab_id] for slab_id in slab_ids if slab_id in self._entries)
        return sum(entry.slab.entry.nbytes for entry in entries if len(entry.users) > 1)

    def close(self) -> None:
        """Let go of everything."""
        self._give_up([entry.slab for entry in self._entries.values()])
        self._entries.clear()
        self._used_bytes.clear()
