"""Small resident versions for tests that need memory and no model."""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from hashlib import sha256

from shared.digest import LEAF_BYTES, digest_of, tensor_digest
from shared.ids import HOST_DEVICE, Digest, VersionRef, VersionTag
from shared.layout import ALIGNMENT_BYTES, Layout, TensorEntry
from shared.memory.backend import MemoryBackend
from shared.resident import ResidentVersion, content_digest

ASSETS = {"config.json": b"{}"}


def leaves_of(data: bytes) -> bytes:
    """Leaf digests by hashlib, to compare others with."""
    return b"".join(sha256(data[at : at + LEAF_BYTES]).digest() for at in range(0, len(data), LEAF_BYTES))


def make_resident(
    backend: MemoryBackend, version: str, tensors: Mapping[str, bytes], model: str = "toy"
) -> ResidentVersion:
    """A version with one U8 tensor per entry, all in one slab; the caller closes the slab."""
    entries: list[TensorEntry] = []
    file = os.memfd_create("checkpoint")
    end = 0
    for name, data in sorted(tensors.items()):
        os.pwrite(file, data, end)
        entries.append(
            TensorEntry(
                name, "U8", (len(data),), len(data), 0, end, zlib.crc32(data), tensor_digest(leaves_of(data))
            )
        )
        end += -(-len(data) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    os.ftruncate(file, end)
    writable = backend.create_slab(HOST_DEVICE, end)
    writable.read_file(file, 0, 0, end)
    os.close(file)
    slab = writable.seal()
    layout = Layout((slab.entry,), tuple(entries))
    digest = content_digest(layout, ASSETS)
    return ResidentVersion(VersionTag(VersionRef(model, version), digest), layout, (slab,), ASSETS)


def other_digest(digest: Digest) -> Digest:
    """A well-formed digest that is not `digest`."""
    return digest_of(sha256(digest.encode()).digest())
