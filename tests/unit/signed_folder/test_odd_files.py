"""What is no file, leads out of the folder, or is too much."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from loaderd.checkpoint.checkpoint import Checkpoint
from loaderd.checkpoint.folder import Folder
from loaderd.seal.create import seal_directory
from loaderd.signature.check import check_signature
from shared.errors import CheckpointError
from tests.support.signing import KeyPair
from tests.unit.signed_folder.checks import opened


def pipe(path: Path) -> None:
    os.mkfifo(path)


def dangling(path: Path) -> None:
    path.symlink_to("nowhere")


def to_a_folder(path: Path) -> None:
    path.symlink_to("docs")


def not_unicode(path: Path) -> None:
    (path.parent / os.fsdecode(b"odd\xff")).write_text("x")


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (pipe, "odd: is not a regular file"),
        (dangling, "odd: cannot be opened"),
        (to_a_folder, "odd: is a folder, expected a file"),
        (not_unicode, r"odd\\udcff: has a name that is not UTF-8"),
    ],
)
@pytest.mark.parametrize("does_sign", [True, False])
def test_what_no_signature_can_cover(
    signed: Path, keys: KeyPair, make: Callable[[Path], None], reason: str, does_sign: bool
) -> None:
    make(signed / "odd")
    with pytest.raises(CheckpointError, match=reason):
        seal_directory(signed, key=keys.signing) if does_sign else opened(signed, keys)


def test_a_symlink_that_leads_out_of_the_root(signed: Path, keys: KeyPair) -> None:
    (signed / "docs/link").symlink_to("../../../outside")
    with (
        Checkpoint(Folder.open(signed.parent, signed.name)) as checkpoint,
        pytest.raises(CheckpointError, match=r"^docs/link: leads out of the model root"),
    ):
        check_signature(checkpoint, (keys.trusted,))


def test_a_tree_has_bounds(signed: Path, keys: KeyPair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loaderd.checkpoint.folder._MAX_DEPTH", 1)
    with pytest.raises(CheckpointError, match=r"^docs/a: lies more than 1 folders deep"):
        opened(signed, keys)
    monkeypatch.setattr("loaderd.checkpoint.folder.TREE_LIMIT", 5)
    with pytest.raises(CheckpointError, match=r"^m-v1: holds more than 5 files"):
        opened(signed, keys)
