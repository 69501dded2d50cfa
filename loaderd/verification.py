"""Holding resident bytes against what was read and what the seal says, slab by slab."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from loaderd.checkpoint.header import TensorSource
from loaderd.load_request import LoadProgress, LoadRequest
from loaderd.read_schedule import FilledSlab
from loaderd.seal.check import check_tensor
from shared.digest import tensor_digest
from shared.errors import DigestMismatch
from shared.ids import Digest
from shared.layout import Layout, SlabEntry, TensorEntry
from shared.memory.backend import Slab
from shared.resident import Part, Place, PlaceDigests, hash_batches, resident_digests


class Verification:
    """What is known of every place of a version.  `check` may run on several threads, for one batch each."""

    def __init__(self, request: LoadRequest, progress: LoadProgress) -> None:
        """Places that are shared count as verified: they were when they were loaded, and they are what the
        seal promises, by digest."""
        self._request = request
        self._progress = progress
        self._digests = PlaceDigests()
        self._known: dict[Place, tuple[int, Digest]] = {}
        self._unknown: dict[int, list[Place]] = defaultdict(list)  # by new slab
        self._tensors: dict[Place, list[TensorSource]] = defaultdict(list)
        for source in request.checkpoint.tensors:
            spot = request.placement.places[source.name]
            self._tensors[spot.slab, spot.offset_bytes, source.nbytes].append(source)
        shared = {tensor.tensor: tensor.crc32 for tensor in request.placement.shared}
        for place, sources in self._tensors.items():
            name = sources[0].name
            if place[2] == 0:
                self._known[place] = (0, tensor_digest(b""))
            elif request.seal is not None and name in shared:
                self._known[place] = (shared[name], request.seal.tensors[name].digest)
            else:
                self._unknown[place[0]].append(place)
        progress.add_verified(sum(place[2] for place in self._known))

    def batches(self, index: int, slab: Slab) -> list[list[Part]]:
        """What is to be checked of a new slab, in pieces for one call of `check` each."""
        return hash_batches(self._unknown[index], {index: slab})

    def check(self, filled: FilledSlab, slab: Slab, batch: Sequence[Part]) -> None:
        """Hash the parts of a batch where they lie.  Raises DigestMismatch unless they are what was read and
        what the seal says.  Blocking, without the GIL."""
        found = resident_digests(batch, {filled.index: slab})
        for part, (crc, leaves) in zip(batch, found, strict=True):
            whole = self._digests.add(part, crc, leaves)
            if whole is not None:
                self._known[part.place] = self._check_place(part.place, *whole, filled.crcs)
            self._progress.add_verified(part.nbytes)

    def layout(self, slabs: Sequence[Slab]) -> Layout:
        """The layout table, once every batch was checked; slabs in the placement's order."""
        tensors = [
            TensorEntry(
                source.name, source.dtype, source.shape, source.nbytes, *place[:2], *self._known[place]
            )
            for place, sources in self._tensors.items()
            for source in sources
        ]
        entries = tuple(SlabEntry(slab.entry.slab_id, slab.entry.device, slab.entry.nbytes) for slab in slabs)
        return Layout(entries, tuple(sorted(tensors, key=lambda entry: entry.name)))

    def _check_place(
        self, place: Place, crc: int, leaves: bytes, crcs: Mapping[str, int]
    ) -> tuple[int, Digest]:
        sources = self._tensors[place]
        first = sources[0]
        # Of several tensors with one content, the plan had one read.
        read = next(crcs[source.name] for source in sources if source.name in crcs)
        if crc != read:
            raise DigestMismatch(
                f"CRC32 is {crc:08x} where it is resident, {read:08x} when it was read: damaged on the way",
                file=first.file,
                tensor=first.name,
                byte=first.file_offset,
            )
        seal = self._request.seal
        if seal is not None:
            for source in sources:
                check_tensor(source, seal.tensors[source.name], leaves=leaves, crc32=crc)
        return crc, tensor_digest(leaves)
