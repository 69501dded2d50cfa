"""Which versions share a tokenizer, and that sharing shows in no answer."""

from __future__ import annotations

import gc
import json
import shutil
from pathlib import Path

import pytest

from inferd.engine.tokenizer import VersionTokenizer
from shared.errors import InvalidRequest


@pytest.fixture
def copied(tiny_folder: Path, tmp_path: Path) -> Path:
    """Another folder with the same files."""
    return Path(shutil.copytree(tiny_folder, tmp_path / "copy"))


def test_the_same_files_are_loaded_once(
    tiny_folder: Path, copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = VersionTokenizer.of(tiny_folder)
    (copied / "model.safetensors").write_bytes(b"other weights")

    def load(self: VersionTokenizer, assets: Path) -> None:
        raise AssertionError(f"{assets} was loaded, which keeps the GIL")

    monkeypatch.setattr(VersionTokenizer, "__init__", load)
    assert VersionTokenizer.of(copied) is first


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_another_file_is_another_tokenizer(tiny_folder: Path, copied: Path, name: str) -> None:
    first = VersionTokenizer.of(tiny_folder)
    document = json.loads((copied / name).read_text())
    if name == "tokenizer.json":
        document["model"]["vocab"] |= {
            "a": document["model"]["vocab"]["b"],
            "b": document["model"]["vocab"]["a"],
        }
    (copied / name).write_text(json.dumps(document, indent=1))
    second = VersionTokenizer.of(copied)
    assert second is not first
    is_same = first.encode("ab", add_special_tokens=False) == second.encode("ab", add_special_tokens=False)
    assert is_same == (name != "tokenizer.json")


def test_it_goes_with_the_last_version_that_uses_it(copied: Path) -> None:
    first = VersionTokenizer.of(copied)
    marked = id(first._backend)
    assert VersionTokenizer.of(copied) is first
    kept = first._backend  # keeps its id from being given again
    del first
    gc.collect()
    assert id(VersionTokenizer.of(copied)._backend) != marked
    assert kept is not None


def test_a_tokenizer_that_cannot_be_loaded_is_not_kept(copied: Path) -> None:
    (copied / "tokenizer.json").unlink()
    for _ in range(2):
        with pytest.raises(InvalidRequest, match=r"no tokenizer\.json"):
            VersionTokenizer.of(copied)
