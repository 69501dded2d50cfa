"""A version whose bytes are in memory: what loaderd keeps and offers, and what inferd maps."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from shared.digest import LEAF_BYTES, file_digest, tensor_digest, version_digest
from shared.errors import DigestMismatch
from shared.ids import Digest, VersionTag
from shared.layout import Layout, TensorEntry
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

    def close(self) -> None:
        """Close every slab, for an owner that shares none of them; waits for the GPU work that uses them."""
        for slab in self.slabs:
            slab.close()


def content_digest(layout: Layout, assets: Mapping[str, bytes]) -> Digest:
    """The version digest that the layout's tensor digests and the asset files amount to."""
    return version_digest(
        ((t.name, t.dtype, t.shape, t.digest) for t in layout.tensors),
        {name: file_digest(data) for name, data in assets.items()},
    )


Place = tuple[int, int, int]
"""Slab (index), offset and bytes: where one tensor, or several with the same content, lie."""


def hash_batches(places: Iterable[Place], slabs: Mapping[int, Slab]) -> list[list[Place]]:
    """Places of one slab each, as many together as the slab's backend likes to hash in one call; `slabs`
    has those that the places name."""
    batches: list[list[Place]] = []
    filled = 0
    for place in sorted(places):
        slab, _, nbytes = place
        is_next = bool(batches) and batches[-1][0][0] == slab and filled + nbytes <= slabs[slab].batch_bytes
        if is_next:
            batches[-1].append(place)
            filled += nbytes
        else:
            batches.append([place])
            filled = nbytes
    return batches


def resident_leaves(batch: Sequence[Place], slabs: Mapping[int, Slab]) -> list[bytes]:
    """Leaves of the bytes that lie at the places of one batch now.  Blocking, without the GIL."""
    return slabs[batch[0][0]].sha256_leaves_of(_ranges(batch), LEAF_BYTES)


def resident_digests(batch: Sequence[Place], slabs: Mapping[int, Slab]) -> list[tuple[int, bytes]]:
    """CRC32 and leaves of the bytes that lie at the places of one batch now.  Blocking, without the GIL."""
    return slabs[batch[0][0]].digests_of(_ranges(batch), LEAF_BYTES)


def _ranges(batch: Sequence[Place]) -> list[tuple[int, int]]:
    return [(offset, nbytes) for _, offset, nbytes in batch]


def damaged_tensors(
    version: ResidentVersion, on_verified: Callable[[int], None] = lambda nbytes: None
) -> tuple[str, ...]:
    """Names of tensors whose resident bytes are not those of the layout table.

    Hashes every distinct place once; `on_verified` gets the bytes of each, on a worker's thread.
    Blocking: about 1 s per 2.5 GB and thread on the host.
    """
    slabs = dict(enumerate(version.slabs))
    places: dict[Place, list[TensorEntry]] = {}
    for tensor in version.layout.tensors:
        places.setdefault((tensor.slab, tensor.offset_bytes, tensor.nbytes), []).append(tensor)

    def check(batch: list[Place]) -> list[str]:
        damaged: list[str] = []
        for place, leaves in zip(batch, resident_leaves(batch, slabs), strict=True):
            found = tensor_digest(leaves)
            damaged += [tensor.name for tensor in places[place] if tensor.digest != found]
            on_verified(place[2])
        return damaged

    batches = hash_batches((place for place in places if place[2]), slabs)
    with ThreadPoolExecutor(HASHING_THREADS, thread_name_prefix="hash") as workers:
        damaged = [name for names in workers.map(check, batches) for name in names]
    nothing = tensor_digest(b"")
    empty = (tensor for tensor in version.layout.tensors if tensor.nbytes == 0)
    return tuple(sorted([*damaged, *(tensor.name for tensor in empty if tensor.digest != nothing)]))


def check_identity(version: ResidentVersion, *, hash_bytes: bool) -> None:
    """Raise DigestMismatch unless the version is what its tag says.

    The tables are always checked against the tag; with `hash_bytes` every resident byte is hashed
    against the tables too, so that the tag then speaks for the bytes themselves.
    """
    found = content_digest(version.layout, version.assets)
    if found != version.tag.digest:
        raise DigestMismatch(
            f"tables amount to {found}, expected {version.tag.digest}", file=str(version.tag.ref)
        )
    if hash_bytes:
        damaged = damaged_tensors(version)
        if damaged:
            raise DigestMismatch(
                f"resident bytes of {len(damaged)} tensors are not those that were verified",
                file=str(version.tag.ref),
                tensor=damaged[0],
            )
