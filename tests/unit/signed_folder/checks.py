"""A signed folder's weight files, and how the folder is checked."""

from __future__ import annotations

from pathlib import Path

import pytest

from loaderd.checkpoint.checkpoint import open_directory
from loaderd.seal.document import Seal, read_seal
from loaderd.signature.check import SignedFolder, check_signature, prove
from shared.errors import SignatureRefused
from tests.support.signing import KeyPair

SHARDS = {
    "a.safetensors": {"big": ("U8", [9], b"123456789"), "s": ("F32", [], b"abcd")},
    "b.safetensors": {"w": ("U8", [3], b"www"), "stray": ("U8", [2], b"??")},
}


def opened(folder: Path, keys: KeyPair) -> SignedFolder:
    """What is checked before anything is loaded."""
    with open_directory(folder) as checkpoint:
        return check_signature(checkpoint, (keys.trusted,))


def proven(folder: Path, keys: KeyPair) -> Seal:
    """The seal that a version of the folder is loaded by."""
    with open_directory(folder) as checkpoint:
        signed = check_signature(checkpoint, (keys.trusted,))
        seal = read_seal(checkpoint.seal_bytes) if checkpoint.seal_bytes is not None else None
        return prove(checkpoint, signed, seal, jobs=2)


def refusal(folder: Path, keys: KeyPair) -> str:
    with pytest.raises(SignatureRefused) as caught:
        opened(folder, keys)
    return caught.value.message
