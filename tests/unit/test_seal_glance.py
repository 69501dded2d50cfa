"""Seals in a listing: a broken one is told as such, and each is parsed once."""

from __future__ import annotations

from pathlib import Path

import pytest

from loaderd.checkpoint.folder import Folder
from loaderd.seal import glance
from loaderd.seal.create import seal_directory
from loaderd.seal.document import Seal, read_seal
from loaderd.seal.glance import SealGlance
from tests.unit.checkpoint_files import write_single


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = write_single(tmp_path / "m-v1", {"w": ("U8", [4], b"1234")})
    seal_directory(folder)
    return folder


def fault(seals: SealGlance, folder: Path) -> str:
    with Folder.open(folder.parent, folder.name) as opened:
        return seals.fault(opened)


def test_a_seal_that_can_be_read_has_no_fault(folder: Path) -> None:
    assert fault(SealGlance(), folder) == ""


def test_a_broken_seal_says_why(folder: Path) -> None:
    seals = SealGlance()
    text = (folder / "seal.json").read_text()
    (folder / "seal.json").write_text(text[:-3])
    assert fault(seals, folder).startswith("seal.json: byte ")
    (folder / "seal.json").write_text(text.replace('"crc32":"', '"crc32":"0'))
    assert fault(seals, folder).startswith("seal.json: tensor 'w'")
    (folder / "seal.json").write_text(text)
    assert fault(seals, folder) == ""
    (folder / "seal.json").unlink()
    (folder / "seal.json").mkdir()
    assert fault(seals, folder) == "seal.json: is a folder, expected a file"


def test_each_seal_is_parsed_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[int] = []

    def spy(raw: bytes) -> Seal:
        parsed.append(len(raw))
        return read_seal(raw)

    monkeypatch.setattr(glance, "read_seal", spy)
    monkeypatch.setattr(glance, "KEPT", 1)
    seals = SealGlance()
    for _ in range(3):
        fault(seals, folder)
    assert len(parsed) == 1
    seal_directory(folder)
    fault(seals, folder)
    fault(seals, folder)
    assert len(parsed) == 2, "another file"
    assert len(seals._faults) == 1, "and the first is forgotten"
