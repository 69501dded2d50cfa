"""Signing a folder that changes meanwhile, cannot be signed, or was left by a seal that was killed."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from loaderd.checkpoint import replacement
from loaderd.checkpoint.checkpoint import Checkpoint
from loaderd.checkpoint.replacement import is_temporary
from loaderd.seal import create
from loaderd.seal.create import seal_directory
from shared.errors import CheckpointError, DriverError
from tests.support.signing import KeyPair, payload_of, verify_by_reference
from tests.unit.signed_folder.checks import proven, refusal

LEFT = (".seal.json.0123456789abcdef", ".model.sig.0123456789abcdef")


def test_a_file_that_appears_while_a_folder_is_signed(
    folder: Path, keys: KeyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    verify = Checkpoint.verify_unchanged

    def appear(checkpoint: Checkpoint) -> None:
        verify(checkpoint)
        (folder / "late.txt").write_text("x")

    monkeypatch.setattr(Checkpoint, "verify_unchanged", appear)
    with pytest.raises(CheckpointError, match=r"^late\.txt: appeared or went away while it was signed"):
        seal_directory(folder, key=keys.signing)
    assert not (folder / "model.sig").exists()
    assert not (folder / "seal.json").exists()


@pytest.mark.parametrize("name", ["seal.json", ".seal.json.0123456789abcdef"])
def test_another_seal_while_a_folder_is_signed_is_told(folder: Path, keys: KeyPair, name: str) -> None:
    def appear(done: int, total: int) -> None:
        if done == total:
            (folder / name).write_text("{}")

    with pytest.raises(CheckpointError, match=r"another seal of it ran; try again"):
        seal_directory(folder, key=keys.signing, progress=appear)
    assert not (folder / "model.sig").exists()


def test_the_signature_is_written_after_the_seal(
    folder: Path, keys: KeyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    replace = create.replace_file

    def spy(fd: int, name: str, data: bytes) -> None:
        written.append(name)
        replace(fd, name, data)

    monkeypatch.setattr(create, "replace_file", spy)
    seal_directory(folder, key=keys.signing)
    assert written == ["seal.json", "model.sig"]


def test_a_folder_that_cannot_be_signed_keeps_its_seal(folder: Path, keys: KeyPair) -> None:
    seal_directory(folder)
    before = (folder / "seal.json").read_bytes()
    (folder / "config.json").write_text("{ }")
    (folder / "model.sig").mkdir()
    with pytest.raises(CheckpointError):
        seal_directory(folder, key=keys.signing)
    assert (folder / "seal.json").read_bytes() == before


@pytest.mark.parametrize("left", LEFT)
def test_what_a_killed_seal_left_is_not_signed(folder: Path, keys: KeyPair, left: str) -> None:
    (folder / left).write_text("half of")
    (folder / ".seal.json.backup").write_text("someone's own")
    seal_directory(folder, key=keys.signing)
    assert not (folder / left).exists()
    names = {resource["name"] for resource in payload_of(folder)["predicate"]["resources"]}
    assert ".seal.json.backup" in names
    assert left not in names
    proven(folder, keys)
    assert verify_by_reference(folder, keys).returncode == 0


def test_a_seal_that_is_killed_leaves_a_file_that_the_next_one_removes(folder: Path, keys: KeyPair) -> None:
    program = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from loaderd.seal.create import seal_directory\n"
        "os.rename = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)\n"
        "seal_directory(Path(sys.argv[1]))\n"
    )
    killed = subprocess.run([sys.executable, "-c", program, str(folder)], check=False, timeout=60)
    assert killed.returncode == -signal.SIGKILL
    assert [path for path in folder.iterdir() if is_temporary(path.name)]
    seal_directory(folder)
    assert not [path for path in folder.iterdir() if is_temporary(path.name)]


@pytest.mark.parametrize("left", LEFT)
def test_what_a_living_seal_writes_is_let_alone(folder: Path, keys: KeyPair, left: str) -> None:
    with (folder / left).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(CheckpointError, match=r"is being written: another seal of this folder runs;"):
            seal_directory(folder, key=keys.signing)
    assert (folder / left).exists()
    assert not (folder / "model.sig").exists()


def test_a_file_is_locked_while_it_is_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every step that takes long, and until it has its name."""
    seen: list[str] = []

    def spy(call: str) -> None:
        real = getattr(os, call)

        def checked(*args: object, **kwargs: object) -> object:
            for path in filter(lambda path: is_temporary(path.name), folder.iterdir()):
                with path.open("r+") as file, pytest.raises(BlockingIOError):
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                seen.append(call)
            return real(*args, **kwargs)

        monkeypatch.setattr(replacement.os, call, checked)

    for call in ("write", "fsync", "rename"):
        spy(call)
    seal_directory(folder)
    assert seen == ["write", "fsync", "rename"]


def test_what_cannot_be_removed_is_told(folder: Path, keys: KeyPair) -> None:
    (folder / LEFT[0]).mkdir()
    with pytest.raises(DriverError, match=r"which a seal that was killed left: Is a directory$"):
        seal_directory(folder, key=keys.signing)


def test_what_a_later_seal_left_in_a_signed_folder_is_named(signed: Path, keys: KeyPair) -> None:
    (signed / LEFT[0]).write_text("half of")
    assert refusal(signed, keys) == (
        f"{LEFT[0]}: is in the folder and not in the signature: a seal writes it, or was killed; "
        "when none runs, seal and sign again, or remove it"
    )
