"""A version whose bytes are in memory: what loaderd keeps and offers, and what inferd maps."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from shared.digest import LEAF_BYTES, file_digest, tensor_digest, version_digest
from shared.errors import DigestMismatch
from shared.gate import PIECE_BYTES, Gate, Pacer
from shared.ids import Digest, VersionTag
from shared.layout import Layout
from shared.memory.backend import Slab

HASHING_THREADS = os.cpu_count() or 1
"""Leaves of different tensors are hashed side by side; hashing holds no GIL."""


@dataclass(frozen=True, slots=True)
class ResidentVersion:
    """Tensors in slabs, and the config and tokenizer files they belong to.

    The slabs belong to whoever made this object; several versions may share one.
    """

    tag: VersionTag
    layout: Layout
    slabs: tuple[Slab, ...]  # in the order of layout.slabs
    assets: Mapping[str, bytes]

    def is_copy_of(self, other: ResidentVersion) -> bool:
        """Whether it is the same version, laid out alike, so that slabs at one index have the same bytes."""
        sizes = [slab.nbytes for slab in self.layout.slabs]
        return (
            self.tag == other.tag
            and self.layout.tensors == other.layout.tensors
            and sizes == [slab.nbytes for slab in other.layout.slabs]
        )

    def close(self) -> None:
        """Close every slab, for an owner that shares none of them; waits for the GPU work that uses them."""
        for slab in self.slabs:
            slab.close()


def content_digest(layout: Layout, assets: Mapping[str, bytes]) -> Digest:
    """The version digest that the layout's tensor digests and the asset files amount to; where the tensors
    lie, on which device and in which slabs, is no part of it."""
    return version_digest(
        ((t.name, t.dtype, t.shape, t.digest) for t in layout.tensors),
        {name: file_digest(data) for name, data in assets.items()},
    )


Place = tuple[int, int, int]
"""Slab (index), offset and bytes: where one tensor, or several with the same content, lie."""


def hash_batches(places: Iterable[Place], most_bytes: int) -> list[list[Place]]:
    """Places of one slab each, as many together as have `most_bytes`; a larger one is alone."""
    batches: list[list[Place]] = []
    filled = 0
    for place in sorted(places):
        slab, _, nbytes = place
        is_next = bool(batches) and batches[-1][0][0] == slab and filled + nbytes <= most_bytes
        if is_next:
            batches[-1].append(place)
            filled += nbytes
        else:
            batches.append([place])
            filled = nbytes
    return batches


def resident_leaves(batch: Sequence[Place], slabs: Mapping[int, Slab], spread_s: float = 0.0) -> list[bytes]:
    """Leaves of the bytes that lie at the places of one batch now, spread over a time where that spares
    others (`Slab.sha256_leaves_of`).  Blocking, without the GIL."""
    ranges = [(offset, nbytes) for _, offset, nbytes in batch]
    return slabs[batch[0][0]].sha256_leaves_of(ranges, LEAF_BYTES, spread_s)


class _Pieces:
    """What is still to be hashed, in order; threads take from it as much as they may hash at once."""

    def __init__(self, places: Iterable[Place], slabs: Sequence[Slab]) -> None:
        self._slabs = slabs
        self._lock = threading.Lock()
        self._left = deque(
            (place, at, min(PIECE_BYTES, place[2] - at))
            for place in sorted(places)
            for at in range(0, place[2], PIECE_BYTES)
        )
        self.leaves: dict[Place, dict[int, bytes]] = {}

    def take(self, pacer: Pacer) -> list[tuple[Place, int, int]]:
        """Pieces of one slab: place, offset in it and bytes; none once all are taken."""
        with self._lock:
            if not self._left:
                return []
            taken = [self._left.popleft()]
            slab, filled = taken[0][0][0], taken[0][2]
            most = pacer.grain_bytes(max(PIECE_BYTES, self._slabs[slab].batch_bytes))
            while self._left and self._left[0][0][0] == slab and filled + self._left[0][2] <= most:
                taken.append(self._left.popleft())
                filled += taken[-1][2]
            return taken

    def hash(self, pieces: Sequence[tuple[Place, int, int]], spread_s: float) -> None:
        """Keep the leaves of what lies at the pieces now.  Blocking, without the GIL."""
        slab = self._slabs[pieces[0][0][0]]
        ranges = [(place[1] + at, nbytes) for place, at, nbytes in pieces]
        found = slab.sha256_leaves_of(ranges, LEAF_BYTES, spread_s)
        with self._lock:
            for (place, at, _), leaves in zip(pieces, found, strict=True):
                self.leaves.setdefault(place, {})[at] = leaves

    def digest(self, place: Place) -> Digest:
        """The digest of a place, all of whose pieces were hashed."""
        return tensor_digest(b"".join(leaves for _, leaves in sorted(self.leaves.get(place, {}).items())))


def damaged_tensors(
    version: ResidentVersion,
    pacer: Pacer | None = None,
    on_verified: Callable[[int], None] = lambda nbytes: None,
) -> tuple[str, ...]:
    """Names of tensors whose resident bytes are not those of the layout table.

    Hashes every distinct place once, as fast as `pacer` lets it; `on_verified` gets the bytes of each
    piece, on a worker's thread.  Blocking: about 1 s per 2.5 GB and thread on the host.
    """
    gate: Pacer = pacer if pacer is not None else Gate()
    places = {(tensor.slab, tensor.offset_bytes, tensor.nbytes) for tensor in version.layout.tensors}
    pieces = _Pieces(places, version.slabs)
    failed = threading.Event()

    def work() -> None:
        try:
            while not failed.is_set() and (taken := pieces.take(gate)):
                nbytes = sum(each[2] for each in taken)
                gate.admit(nbytes)
                pieces.hash(taken, gate.spread_s(nbytes))
                on_verified(nbytes)
        except BaseException:
            failed.set()
            raise

    with ThreadPoolExecutor(HASHING_THREADS, thread_name_prefix="hash") as workers:
        for done in [workers.submit(work) for _ in range(HASHING_THREADS)]:
            done.result()
    found = {place: pieces.digest(place) for place in places}
    return tuple(
        sorted(
            tensor.name
            for tensor in version.layout.tensors
            if found[tensor.slab, tensor.offset_bytes, tensor.nbytes] != tensor.digest
        )
    )


def name_tensors(names: Sequence[str]) -> str:
    """`tensor a`, or `tensor a and 3 more`."""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"tensor {names[0]}{more}"


def check_identity(version: ResidentVersion, *, hash_bytes: bool, pacer: Pacer | None = None) -> None:
    """Raise DigestMismatch unless the version is what its tag says.

    The tables are always checked against the tag; with `hash_bytes` every resident byte is hashed
    against the tables too, as fast as `pacer` lets it, so that the tag then speaks for the bytes themselves.
    """
    found = content_digest(version.layout, version.assets)
    if found != version.tag.digest:
        raise DigestMismatch(
            f"tables amount to {found}, expected {version.tag.digest}", file=str(version.tag.ref)
        )
    if hash_bytes:
        damaged = damaged_tensors(version, pacer)
        if damaged:
            raise DigestMismatch(
                f"resident bytes of {len(damaged)} tensors are not those that were verified",
                file=str(version.tag.ref),
                tensor=damaged[0],
            )
