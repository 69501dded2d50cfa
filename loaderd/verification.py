"""Holding resident bytes against what was read, what the seal says and what other devices have, slab by
slab."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence

from loaderd.checkpoint.header import TensorSource
from loaderd.load_request import LoadProgress, LoadRequest
from loaderd.read_schedule import FilledSlab
from loaderd.seal.check import check_tensor
from shared.digest import tensor_digest
from shared.errors import DigestMismatch, InvariantError
from shared.ids import DeviceId, Digest
from shared.layout import TensorEntry
from shared.memory.backend import Slab
from shared.resident import Part, Place, PlaceDigests, hash_batches, resident_digests


class Verification:
    """What is known of every place of a version, in whichever copy it was checked first.  `check` may run on
    several threads, for one batch each."""

    def __init__(self, request: LoadRequest, progress: LoadProgress) -> None:
        """Places that are shared count as verified: they were when they were loaded, and they are what the
        seal promises, by digest."""
        self._request = request
        self._progress = progress
        self._digests: dict[DeviceId, PlaceDigests] = defaultdict(PlaceDigests)
        self._known: dict[Place, tuple[int, Digest]] = {}
        self._entries: dict[Place, list[TensorEntry]] = {}  # of places that were found
        self._lock = threading.Lock()  # of what is known
        self._places: dict[int, list[Place]] = defaultdict(list)  # by slab
        self._tensors: dict[Place, list[TensorSource]] = defaultdict(list)
        for source in request.checkpoint.tensors:
            spot = request.placement.places[source.name]
            self._tensors[spot.slab, spot.offset_bytes, source.nbytes].append(source)
        shared = {tensor.tensor: tensor.crc32 for tensor in request.placement.shared}
        for place, sources in self._tensors.items():
            name = sources[0].name
            if place[2] == 0:
                self._known[place] = (0, tensor_digest(b""))
                continue
            self._places[place[0]].append(place)
            if request.seal is not None and name in shared:
                self._known[place] = (shared[name], request.seal.tensors[name].digest)
        progress.add_verified(sum(place[2] for place in self._known))
        self._unchecked = Counter[DeviceId]()  # places that are new on each device
        nowhere: tuple[Mapping[DeviceId, Slab], ...] = ({},) * len(request.placement.slabs)
        for index, replicas in enumerate((*nowhere, *request.shared)):
            lacking = [device for device in request.devices if device not in replicas]
            self._unchecked.update(dict.fromkeys(lacking, len(self._places[index])))

    def batches(self, index: int, slab: Slab, grain: Callable[[int], int] = int) -> list[list[Part]]:
        """What is to be checked of a slab or of a replica, in pieces for one call of `check` each; `grain`
        as in `hash_batches`."""
        return hash_batches(self._places[index], {index: slab}, grain)

    def check(self, filled: FilledSlab, slab: Slab, batch: Sequence[Part], spread_s: float = 0.0) -> None:
        """Hash the parts of a batch where they lie.  Raises DigestMismatch unless they are what was read,
        what the seal says and what the other copies have.  Blocking, without the GIL."""
        with self._lock:
            digests = self._digests[slab.entry.device]
        for part, one in zip(batch, resident_digests(batch, {filled.index: slab}, spread_s), strict=True):
            whole = digests.add(part, *one)
            if whole is not None:
                self._found(part.place, slab, self._check_place(slab, part.place, *whole, filled.crcs))

    def _found(self, place: Place, slab: Slab, found: tuple[int, Digest]) -> None:
        """Note what a place holds on one device."""
        with self._lock:
            is_first = place not in self._known
            known = self._known.setdefault(place, found)
            self._unchecked[slab.entry.device] -= 1
        if known != found:
            raise self._mismatch(place, f"is not on {slab.entry.device} what it is elsewhere")
        if is_first:
            self._entries[place] = self._describe(place, found)  # here, beside what is still read
            self._progress.add_verified(place[2])

    @property
    def is_promised(self) -> bool:
        """Whether it is known beforehand what every place must hold."""
        return self._request.seal is not None

    def table(self) -> tuple[TensorEntry, ...]:
        """Every tensor and its place, sorted by name, once all was checked; before, with what is promised."""
        tensors: list[TensorEntry] = []
        for place in self._tensors:
            tensors += self._entries.get(place) or self._describe(place, self._content(place))
        return tuple(sorted(tensors, key=lambda entry: entry.name))

    def check_all_found(self, table: Sequence[TensorEntry]) -> None:
        """Raise InvariantError unless every place was checked on every device that it is new on, and holds
        what `table` says."""
        for entry in table:
            found = self._known.get((entry.slab, entry.offset_bytes, entry.nbytes))
            if found != (entry.crc32, entry.digest):
                raise InvariantError(f"{entry.name!r} is {found}, in the table {entry.crc32}, {entry.digest}")
        for device, places in self._unchecked.items():
            if places:
                raise InvariantError(f"{places} places on {device} were not checked")

    def _describe(self, place: Place, content: tuple[int, Digest]) -> list[TensorEntry]:
        return [
            TensorEntry(source.name, source.dtype, source.shape, source.nbytes, *place[:2], *content)
            for source in self._tensors[place]
        ]

    def _content(self, place: Place) -> tuple[int, Digest]:
        with self._lock:
            found = self._known.get(place)
        if found is not None:
            return found
        name = self._tensors[place][0].name
        if self._request.seal is None:
            raise InvariantError(f"{name!r} was not checked")
        sealed = self._request.seal.tensors[name]
        return sealed.crc32, sealed.digest

    def _check_place(
        self, slab: Slab, place: Place, crc: int, leaves: bytes, crcs: Mapping[str, int]
    ) -> tuple[int, Digest]:
        sources = self._tensors[place]
        # Of several tensors with one content, the plan had one read; of a shared one, none.
        read = next((crcs[source.name] for source in sources if source.name in crcs), crc)
        if crc != read:
            reason = f"CRC32 is {crc:08x} on {slab.entry.device}, {read:08x} when it was read"
            raise self._mismatch(place, f"{reason}: damaged on the way")
        seal = self._request.seal
        if seal is not None:
            for source in sources:
                check_tensor(source, seal.tensors[source.name], leaves=leaves, crc32=crc)
        return crc, tensor_digest(leaves)

    def _mismatch(self, place: Place, reason: str) -> DigestMismatch:
        first = self._tensors[place][0]
        return DigestMismatch(reason, file=first.file, tensor=first.name, byte=first.file_offset)
