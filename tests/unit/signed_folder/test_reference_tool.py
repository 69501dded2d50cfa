"""The reference tool reads what is signed here, and what it signs is read here."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from loaderd.seal.check import verify_directory
from loaderd.seal.create import seal_directory
from shared.errors import SignatureRefused
from tests.support.signing import KeyPair, make_keys, payload_of, sign_by_reference, verify_by_reference
from tests.unit.signed_folder.checks import opened, proven


@pytest.mark.parametrize("curve", [ec.SECP256R1(), ec.SECP384R1(), ec.SECP521R1()], ids=lambda c: c.name)
def test_the_reference_accepts_what_seal_signs(tmp_path: Path, folder: Path, curve: ec.EllipticCurve) -> None:
    keys = make_keys(tmp_path / "keys", curve=curve)
    seal_directory(folder, key=keys.signing, jobs=2)
    done = verify_by_reference(folder, keys)
    assert (done.returncode, done.stdout) == (0, "Verification succeeded\n"), done
    (folder / "docs/a/c").write_text("altered")
    assert "Hash mismatch" in verify_by_reference(folder, keys).stderr


@pytest.mark.parametrize("curve", [ec.SECP256R1(), ec.SECP384R1(), ec.SECP521R1()], ids=lambda c: c.name)
@pytest.mark.parametrize("is_sealed", [True, False])
def test_what_the_reference_signs_is_accepted(
    tmp_path: Path, folder: Path, curve: ec.EllipticCurve, is_sealed: bool
) -> None:
    keys = make_keys(tmp_path / "keys", curve=curve)
    expected = seal_directory(folder)
    if not is_sealed:
        (folder / "seal.json").unlink()
    sign_by_reference(folder, keys)
    assert opened(folder, keys).key.path == keys.public
    assert proven(folder, keys) == expected
    verified = verify_directory(folder, trusted=(keys.trusted,), jobs=2)
    assert verified.seal == expected
    assert verified.key is not None
    assert verified.key.path == keys.public


def test_both_say_the_same_of_one_folder(folder: Path, keys: KeyPair) -> None:
    seal_directory(folder, key=keys.signing)
    ours = payload_of(folder)
    sign_by_reference(folder, keys)
    theirs = payload_of(folder)
    for statement in (ours, theirs):
        statement["predicate"]["serialization"]["ignore_paths"].sort()
    assert ours == theirs


def test_what_the_signer_left_out_may_be_there(folder: Path, keys: KeyPair) -> None:
    sign_by_reference(folder, keys, "--ignore-paths", folder / "README.md", "--ignore-paths", folder / "docs")
    (folder / "README.md").write_text("altered")
    (folder / "docs" / "more").write_text("added")
    proven(folder, keys)


def test_a_signer_cannot_leave_out_what_is_loaded(folder: Path, keys: KeyPair) -> None:
    sign_by_reference(folder, keys, "--ignore-paths", folder / "config.json")
    with pytest.raises(SignatureRefused, match=r"^model\.sig: leaves out 'config\.json', which would be"):
        opened(folder, keys)


def test_files_may_be_symlinks(folder: Path, keys: KeyPair) -> None:
    """A hub's snapshot: its files point to blobs beside it."""
    blobs = folder.parent / "blobs"
    blobs.mkdir()
    for name in ("a.safetensors", "README.md"):
        shutil.move(folder / name, blobs / name)
        (folder / name).symlink_to(blobs / name)
    seal_directory(folder, key=keys.signing)
    assert payload_of(folder)["predicate"]["serialization"]["allow_symlinks"] is True
    proven(folder, keys)
    assert verify_by_reference(folder, keys, "--allow_symlinks").returncode == 0
