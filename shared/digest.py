"""Content identity: leaf, tensor and version digests, and the CRC32 that guards transport.

The formats are frozen in `docs/seal-format.md`; its test vectors are checked by the tests.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256 as _sha256

from shared.errors import InvariantError
from shared.ids import Digest

LEAF_BYTES = 262_144
"""Size of a leaf; the last leaf of a tensor may be shorter.  Part of the seal format."""

SHA256_BYTES = 32

_VERSION_DOMAIN = b"changeover version digest\x00"
_VERSION_FORMAT = 1


def leaf_count(nbytes: int) -> int:
    """Leaves of a tensor of `nbytes`; none for an empty one."""
    return -(-nbytes // LEAF_BYTES)


def digest_of(raw: bytes) -> Digest:
    """32 raw bytes as a Digest."""
    if len(raw) != SHA256_BYTES:
        raise InvariantError(f"a SHA-256 has {SHA256_BYTES} bytes, got {len(raw)}")
    return Digest("sha256:" + raw.hex())


def digest_bytes(digest: Digest) -> bytes:
    """A Digest as its 32 raw bytes."""
    return bytes.fromhex(digest.removeprefix("sha256:"))


def file_digest(data: bytes) -> Digest:
    """Flat SHA-256 of a whole file, equal to the hub's LFS oid."""
    return digest_of(_sha256(data).digest())


def tensor_digest(leaves: bytes) -> Digest:
    """SHA-256 over the concatenated leaf digests (32 bytes each); of nothing for an empty tensor."""
    if len(leaves) % SHA256_BYTES:
        raise InvariantError(f"leaf digests have {SHA256_BYTES} bytes each, got {len(leaves)} in all")
    return digest_of(_sha256(leaves).digest())


def version_digest(
    tensors: Iterable[tuple[str, str, Sequence[int], Digest]], assets: Mapping[str, Digest]
) -> Digest:
    """Identity of a version: names, dtypes, shapes and digests of its tensors, and its asset files.

    Placement and the order of the arguments do not matter; `assets` maps file names to the flat
    SHA-256 of the file.  Raises InvariantError if a name comes twice.
    """
    rows = sorted(tensors, key=lambda row: row[0])
    state = _sha256(_VERSION_DOMAIN)
    state.update(struct.pack("<IQQ", _VERSION_FORMAT, LEAF_BYTES, len(rows)))
    previous: str | None = None
    for name, dtype, shape, digest in rows:
        if name == previous:
            raise InvariantError(f"tensor {name!r} comes twice in one version")
        previous = name
        state.update(_text(name) + _text(dtype))
        state.update(struct.pack(f"<I{len(shape)}Q", len(shape), *shape))
        state.update(digest_bytes(digest))
    state.update(struct.pack("<Q", len(assets)))
    for name in sorted(assets):
        state.update(_text(name) + digest_bytes(assets[name]))
    return digest_of(state.digest())


def _text(value: str) -> bytes:
    encoded = value.encode("utf-8")
    return struct.pack("<I", len(encoded)) + encoded
