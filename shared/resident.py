"""A version whose bytes are in memory: what loaderd keeps and offers, and what inferd maps."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from shared._native import crc32_combine
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


@dataclass(frozen=True, slots=True)
class Part:
    """Leaves of a place that are hashed together: all of them, or some of a large one."""

    place: Place
    start: int  # in the place, a multiple of the leaf size
    nbytes: int


def hash_batches(
    places: Iterable[Place], slabs: Mapping[int, Slab], grain: Callable[[int], int] = int
) -> list[list[Part]]:
    """Parts of one slab each, as many together as the slab's backend likes to hash in one call, or as
    `grain` makes of that number; `slabs` has those that the places name.  Large places are cut, so that
    threads share their bytes."""
    batches: list[list[Part]] = []
    filled = 0
    for place in sorted(places):
        slab, _, nbytes = place
        most = max(grain(slabs[slab].batch_bytes) // LEAF_BYTES, 1) * LEAF_BYTES
        for start in range(0, nbytes, most):
            part = Part(place, start, min(most, nbytes - start))
            is_next = bool(batches) and batches[-1][0].place[0] == slab and filled + part.nbytes <= most
            if is_next:
                batches[-1].append(part)
                filled += part.nbytes
            else:
                batches.append([part])
                filled = part.nbytes
    return batches


class PlaceDigests:
    """Puts the digests of places together from those of their parts, in whatever order they come.
    Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._parts: dict[Place, dict[int, tuple[int, int, bytes]]] = {}

    def add(self, part: Part, crc: int, leaves: bytes) -> tuple[int, bytes] | None:
        """CRC32 and leaves of the whole place, if this was the last of its parts."""
        if part.nbytes == part.place[2]:
            return crc, leaves
        with self._lock:
            parts = self._parts.setdefault(part.place, {})
            parts[part.start] = (part.nbytes, crc, leaves)
            if sum(nbytes for nbytes, _, _ in parts.values()) < part.place[2]:
                return None
            del self._parts[part.place]
        combined = 0
        for start in sorted(parts):
            nbytes, crc, _ = parts[start]
            combined = crc32_combine(combined, crc, nbytes)
        return combined, b"".join(parts[start][2] for start in sorted(parts))


def resident_digests(
    batch: Sequence[Part], slabs: Mapping[int, Slab], spread_s: float
) -> list[tuple[int, bytes]]:
    """CRC32 and leaves of the bytes that lie at the parts of one batch now, spread over a time where that
    spares others (`Slab.sha256_leaves_of`).  Blocking, without the GIL."""
    return slabs[batch[0].place[0]].digests_of(_ranges(batch), LEAF_BYTES, spread_s)


def _ranges(batch: Sequence[Part]) -> list[tuple[int, int]]:
    return [(part.place[1] + part.start, part.nbytes) for part in batch]


class _Queue:
    """What is still to be hashed, in order; threads take from it as much as they may hash at once."""

    def __init__(self, places: Iterable[Place], slabs: Sequence[Slab]) -> None:
        self._slabs = slabs
        self._lock = threading.Lock()
        self._left = deque(
            Part(place, start, min(PIECE_BYTES, place[2] - start))
            for place in sorted(places)
            for start in range(0, place[2], PIECE_BYTES)
        )

    def take(self, pacer: Pacer) -> list[Part]:
        """Parts of one slab; none once all are taken."""
        with self._lock:
            if not self._left:
                return []
            batch = [self._left.popleft()]
            slab, filled = batch[0].place[0], batch[0].nbytes
            most = pacer.grain_bytes(self._slabs[slab].batch_bytes)
            while self._left and self._left[0].place[0] == slab and filled + self._left[0].nbytes <= most:
                batch.append(self._left.popleft())
                filled += batch[-1].nbytes
            return batch


def damaged_tensors(
    version: ResidentVersion,
    pacer: Pacer | None = None,
    on_verified: Callable[[int], None] = lambda nbytes: None,
) -> tuple[str, ...]:
    """Names of tensors whose resident bytes are not those of the layout table.

    Hashes every distinct place once, as fast as `pacer` lets it; `on_verified` gets the bytes that were
    hashed, on a worker's thread.  Blocking: about 1 s per 2.5 GB and thread on the host.
    """
    gate: Pacer = pacer if pacer is not None else Gate()
    places = {(tensor.slab, tensor.offset_bytes, tensor.nbytes) for tensor in version.layout.tensors}
    found: dict[Place, Digest] = {place: tensor_digest(b"") for place in places if place[2] == 0}
    queue, digests = _Queue(places, version.slabs), PlaceDigests()
    failed = threading.Event()

    def work() -> None:
        try:
            while not failed.is_set() and (batch := queue.take(gate)):
                nbytes = sum(part.nbytes for part in batch)
                gate.admit(nbytes)
                slab = version.slabs[batch[0].place[0]]
                hashed = slab.sha256_leaves_of(_ranges(batch), LEAF_BYTES, gate.spread_s(nbytes))
                for part, leaves in zip(batch, hashed, strict=True):
                    whole = digests.add(part, 0, leaves)
                    if whole is not None:
                        found[part.place] = tensor_digest(whole[1])
                on_verified(nbytes)
        except BaseException:
            failed.set()
            raise

    with ThreadPoolExecutor(HASHING_THREADS, thread_name_prefix="hash") as workers:
        for done in [workers.submit(work) for _ in range(HASHING_THREADS)]:
            done.result()
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
