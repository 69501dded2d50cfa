"""Keys, and a folder that is signed with one of them or not yet."""

from __future__ import annotations

from pathlib import Path

import pytest

from loaderd.seal.create import seal_directory
from tests.support.signing import KeyPair, make_keys
from tests.unit.checkpoint_files import write_sharded
from tests.unit.signed_folder.checks import SHARDS

PLACED = {"big": "a.safetensors", "s": "a.safetensors", "w": "b.safetensors"}
BESIDE = ("README.md", "docs/é.txt", "docs/a.b/c", "docs/a/c", ".cache/x")


@pytest.fixture(scope="module")
def other_keys(tmp_path_factory: pytest.TempPathFactory) -> KeyPair:
    return make_keys(tmp_path_factory.mktemp("other"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Not signed: a checkpoint, files beside it, and what a signature leaves out."""
    folder = write_sharded(tmp_path / "m-v1", SHARDS, weight_map=PLACED)
    for path in (*BESIDE, ".git/HEAD", ".gitignore"):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(path)
    return folder


@pytest.fixture
def signed(folder: Path, keys: KeyPair) -> Path:
    seal_directory(folder, key=keys.signing)
    return folder
