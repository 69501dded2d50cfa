"""A folder that is not sealed yet."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.checkpoint_files import write_sharded
from tests.unit.sealed_folder.shards import PLACED, SHARDS


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = write_sharded(tmp_path / "m-v1", SHARDS, weight_map=PLACED)
    (folder / "tokenizer.json").write_text("{}")
    return folder
