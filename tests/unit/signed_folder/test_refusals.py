"""Signed folders that are refused, each with a message of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from loaderd.checkpoint.checkpoint import open_directory
from loaderd.config import ModelConfig
from loaderd.planning import open_checked
from loaderd.seal.check import verify_directory
from loaderd.seal.create import seal_directory
from loaderd.signature.bundle import SIGNATURE_LIMIT_BYTES
from loaderd.signature.check import check_signature
from loaderd.signature.statement import Statement
from shared.errors import CheckpointError, DigestMismatch, SignatureRefused
from shared.ids import VersionRef
from tests.support.signing import KeyPair, resign, sign_by_reference
from tests.unit.signed_folder.checks import opened, proven, refusal


def test_no_signature(folder: Path, keys: KeyPair) -> None:
    assert refusal(folder, keys) == "model.sig: does not exist: the folder is not signed"


def test_a_key_that_is_not_trusted(signed: Path, keys: KeyPair, other_keys: KeyPair) -> None:
    hint, other = keys.trusted.hint[:12], other_keys.trusted.hint[:12]
    assert refusal(signed, other_keys) == (
        f"model.sig: was made with key {hint}, which is not trusted ({other_keys.public} is {other})"
    )


def test_any_of_several_keys_will_do(signed: Path, keys: KeyPair, other_keys: KeyPair) -> None:
    with open_directory(signed) as checkpoint:
        trusted = (other_keys.trusted, keys.trusted)
        assert check_signature(checkpoint, trusted).key.path == keys.public


def test_a_bundle_that_names_no_key_is_tried_with_each(
    signed: Path, keys: KeyPair, other_keys: KeyPair
) -> None:
    text = (signed / "model.sig").read_text()
    (signed / "model.sig").write_text(text.replace(f'"hint":"{keys.trusted.hint}"', ""))
    with open_directory(signed) as checkpoint:
        assert check_signature(checkpoint, (other_keys.trusted, keys.trusted)).key.path == keys.public
    assert "is not a valid signature of" in refusal(signed, other_keys)


def test_a_bundle_that_claims_another_key(signed: Path, keys: KeyPair, other_keys: KeyPair) -> None:
    text = (signed / "model.sig").read_text()
    (signed / "model.sig").write_text(text.replace(keys.trusted.hint, other_keys.trusted.hint))
    assert refusal(signed, other_keys) == (
        f"model.sig: is not a valid signature of {other_keys.public}: what was signed has been altered"
    )


@pytest.mark.parametrize("at", [0, 100, -5])
def test_an_altered_statement(signed: Path, keys: KeyPair, at: int) -> None:
    text = (signed / "model.sig").read_text()
    start = text.index('"payload":"') + len('"payload":"')
    end = text.index('"', start)
    payload = list(text[start:end])
    payload[at] = "A" if payload[at] != "A" else "B"
    (signed / "model.sig").write_text(text[:start] + "".join(payload) + text[end:])
    assert "is not a valid signature of" in refusal(signed, keys)


def test_a_statement_is_not_parsed_before_its_signature_holds(
    signed: Path, keys: KeyPair, other_keys: KeyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(payload: bytes) -> Statement:
        raise AssertionError("parsed")

    monkeypatch.setattr("loaderd.signature.check.read_statement", never)
    text = (signed / "model.sig").read_text()
    (signed / "model.sig").write_text(text.replace(keys.trusted.hint, other_keys.trusted.hint))
    assert "is not a valid signature" in refusal(signed, other_keys)


def test_a_malformed_signature(signed: Path, keys: KeyPair) -> None:
    (signed / "model.sig").write_text("{}")
    assert refusal(signed, keys) == "model.sig: the bundle lacks 'mediaType'"
    (signed / "model.sig").unlink()
    with (signed / "model.sig").open("wb") as file:
        file.truncate(SIGNATURE_LIMIT_BYTES + 1)
    with pytest.raises(CheckpointError, match=r"^model\.sig: has 16777217 bytes, 16777216 are allowed"):
        opened(signed, keys)


@pytest.mark.parametrize("name", ["extra.txt", "x.safetensors", "vocab.json", "docs/extra", "new/deep/er"])
def test_an_extra_file(signed: Path, keys: KeyPair, name: str) -> None:
    (signed / name).parent.mkdir(parents=True, exist_ok=True)
    (signed / name).write_text("{}")
    assert refusal(signed, keys) == f"{name}: is in the folder and not in the signature"


@pytest.mark.parametrize("name", ["README.md", "docs/é.txt", ".cache/x", "seal.json"])
def test_a_missing_file(signed: Path, keys: KeyPair, name: str) -> None:
    (signed / name).unlink()
    assert refusal(signed, keys) == f"{name}: is in the signature and not in the folder"


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_an_altered_document(signed: Path, keys: KeyPair, name: str) -> None:
    before = (signed / name).read_text()
    (signed / name).write_text(before + " ")
    message = refusal(signed, keys)
    assert message.startswith(f"{name}: is sha256:")
    assert message.endswith(": altered after signing")


def test_an_altered_seal_is_told_before_it_is_parsed(signed: Path, keys: KeyPair) -> None:
    (signed / "seal.json").write_text("{")
    message = refusal(signed, keys)
    assert message.startswith("seal.json: is sha256:")
    assert message.endswith(": the seal was altered after signing")


def test_a_folder_that_was_sealed_after_it_was_signed(folder: Path, keys: KeyPair) -> None:
    sign_by_reference(folder, keys)
    seal_directory(folder)
    assert refusal(folder, keys) == (
        "seal.json: is not covered by the signature: the folder was sealed after it was signed"
    )


def test_a_seal_and_a_signature_of_different_contents(signed: Path, keys: KeyPair) -> None:
    """Signed by one who did not look: the seal is signed, and says of a file what the signature does not."""

    def other_digest(statement: dict[str, dict[str, list[dict[str, str]]]]) -> None:
        (entry,) = (e for e in statement["predicate"]["resources"] if e["name"] == "a.safetensors")
        entry["digest"] = "0" * 64

    resign(signed, keys, other_digest)
    config = ModelConfig(verify="signed", trusted_keys=(keys.trusted,))
    with pytest.raises(SignatureRefused) as caught:
        open_checked((signed.parent,), signed.name, VersionRef("m", "v1"), config)
    assert caught.value.message.startswith("m-v1/a.safetensors: the seal says sha256:")
    assert f"the signature sha256:{'0' * 64}: they are of different contents; if " in caught.value.message


@pytest.mark.parametrize("name", ["README.md", "docs/a/c"])
@pytest.mark.parametrize("is_sealed", [True, False])
def test_an_altered_file_beside_the_version(folder: Path, keys: KeyPair, name: str, is_sealed: bool) -> None:
    if is_sealed:
        seal_directory(folder, key=keys.signing)
    else:
        sign_by_reference(folder, keys)
    (folder / name).write_text("altered")
    opened(folder, keys)  # nothing but hashing shows it
    for check in (proven, lambda folder, keys: verify_directory(folder, trusted=(keys.trusted,))):
        with pytest.raises(SignatureRefused, match=rf"^{name}: is sha256:.*: altered after signing"):
            check(folder, keys)


@pytest.mark.parametrize("where", ["www", "stray", "??"])  # of the version, the header, outside the index
def test_an_altered_weight_file_without_a_seal(folder: Path, keys: KeyPair, where: str) -> None:
    sign_by_reference(folder, keys)
    raw = (folder / "b.safetensors").read_bytes()
    (folder / "b.safetensors").write_bytes(raw.replace(where.encode(), b"." * len(where)))
    with pytest.raises(SignatureRefused, match=r"^b\.safetensors: is sha256:.*: altered after signing"):
        proven(folder, keys)


@pytest.mark.parametrize("where", ["www", "stray"])
def test_an_altered_weight_file_with_a_seal(signed: Path, keys: KeyPair, where: str) -> None:
    raw = (signed / "b.safetensors").read_bytes()
    (signed / "b.safetensors").write_bytes(raw.replace(where.encode(), where.upper().encode()))
    with pytest.raises(DigestMismatch, match=r"^b\.safetensors: .*the seal says"):
        verify_directory(signed, trusted=(keys.trusted,))
