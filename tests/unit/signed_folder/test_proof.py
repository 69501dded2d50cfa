"""What is read to prove a folder, and what changes meanwhile."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from loaderd.checkpoint.checkpoint import Checkpoint, open_directory
from loaderd.seal.create import seal_directory
from loaderd.seal.document import read_seal
from loaderd.signature.check import check_signature, prove
from shared.errors import CheckpointError
from tests.support.signing import KeyPair, sign_by_reference
from tests.unit.signed_folder.checks import SHARDS, proven


def test_the_seal_that_is_made_is_of_the_bytes_that_were_held_against_the_signature(
    folder: Path, keys: KeyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One read: no other can come between the flat digest and the leaves."""
    sign_by_reference(folder, keys)
    reads: list[int] = []
    preadv = os.preadv

    def counted(fd: int, buffers: list[memoryview], offset: int) -> int:
        reads.append(preadv(fd, buffers, offset))
        return reads[-1]

    monkeypatch.setattr(os, "preadv", counted)
    proven(folder, keys)
    weights = sum((folder / name).stat().st_size for name in SHARDS)
    beside = sum(
        (folder / name).stat().st_size for name in ("README.md", "docs/é.txt", "docs/a.b/c", "docs/a/c")
    )
    assert sum(reads) == weights + beside + (folder / ".cache/x").stat().st_size


def test_a_sealed_folder_without_other_files_is_not_read_twice(
    folder: Path, keys: KeyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("README.md", "docs", ".cache"):
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    seal_directory(folder, key=keys.signing)
    monkeypatch.setattr(os, "preadv", None)
    proven(folder, keys)


def swapped_offsets(raw: bytes) -> bytes:
    """A file of the same tensors that says of each that it is where the other is."""
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    first, second = header
    header[first], header[second] = header[second], header[first]
    return raw[:8] + json.dumps(header).encode() + raw[8 + length :]


def test_a_file_that_is_rewritten_while_it_is_hashed(folder: Path, keys: KeyPair) -> None:
    sign_by_reference(folder, keys)

    def write(done: int, total: int) -> None:
        (folder / "README.md").write_text("README.md")

    with open_directory(folder) as checkpoint:
        signed = check_signature(checkpoint, (keys.trusted,))
        with pytest.raises(CheckpointError, match=r"^README\.md: changed while it was read"):
            prove(checkpoint, signed, None, progress=write)


def test_a_header_that_is_swapped_back_before_it_is_hashed(
    folder: Path, keys: KeyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two tensors whose places were exchanged while the header was parsed, within one tick of the clock."""
    good = (folder / "a.safetensors").read_bytes()
    bad = swapped_offsets(good)
    sign_by_reference(folder, keys)
    with (folder / "a.safetensors").open("r+b") as file:
        file.write(bad)
    with open_directory(folder) as checkpoint:
        signed = check_signature(checkpoint, (keys.trusted,))
        with (folder / "a.safetensors").open("r+b") as file:
            file.write(good)
        monkeypatch.setattr(Checkpoint, "verify_unchanged", lambda checkpoint: None)
        with pytest.raises(CheckpointError, match=r"^a\.safetensors: byte 0: its header changed"):
            prove(checkpoint, signed, None)


def test_a_signature_that_is_replaced_while_a_folder_is_read(signed: Path, keys: KeyPair) -> None:
    with open_directory(signed) as checkpoint:
        found = check_signature(checkpoint, (keys.trusted,))
        assert checkpoint.seal_bytes is not None
        (signed / "model.sig").write_text("{}")
        with pytest.raises(CheckpointError, match=r"^model\.sig: was replaced while the folder was read"):
            prove(checkpoint, found, read_seal(checkpoint.seal_bytes))
