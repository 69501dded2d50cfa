"""Keys in PEM files: which are taken, which are refused, and that each says why."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from loaderd.config import LoaderdConfig
from loaderd.signature.keys import KEY_LIMIT_BYTES, KeyRefused, SigningKey, TrustedKey
from shared.config_file import load_config
from shared.errors import ConfigError
from tests.support.signing import KeyPair, make_keys


@pytest.fixture
def keys(tmp_path: Path) -> KeyPair:
    return make_keys(tmp_path)


def never() -> str:
    raise AssertionError("asked for a passphrase")


PrivateKey = ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey | rsa.RSAPrivateKey


def write_pair(folder: Path, key: PrivateKey) -> KeyPair:
    pair = KeyPair(folder / "odd.pem", folder / "odd.pub.pem")
    pair.private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    pair.public.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return pair


@pytest.mark.parametrize("curve", [ec.SECP256R1(), ec.SECP384R1(), ec.SECP521R1()], ids=lambda c: c.name)
def test_what_a_key_signs_its_public_part_accepts(tmp_path: Path, curve: ec.EllipticCurve) -> None:
    keys = make_keys(tmp_path, curve=curve)
    signing, trusted = SigningKey.read(keys.private, never), TrustedKey.read(keys.public)
    signature = signing.sign(b"message")
    assert signing.hint == trusted.hint
    assert trusted.has_signed(signature, b"message")
    assert not trusted.has_signed(signature, b"Message")
    assert not trusted.has_signed(b"", b"message")
    assert not trusted.has_signed(signature[:-1], b"message")
    assert not make_keys(tmp_path, "other", curve).trusted.has_signed(signature, b"message")


def test_the_hint_does_not_depend_on_how_the_file_is_written(keys: KeyPair) -> None:
    hint = keys.trusted.hint
    text = keys.public.read_text()
    keys.public.write_text("a remark\n" + text.replace("\n", "\r\n"))
    assert keys.trusted.hint == hint


def test_a_passphrase_is_asked_for_only_where_one_is_needed(tmp_path: Path) -> None:
    plain, locked = make_keys(tmp_path, "plain"), make_keys(tmp_path, "locked", passphrase="open sesame")
    SigningKey.read(plain.private, never)
    assert SigningKey.read(locked.private, lambda: "open sesame").hint == locked.trusted.hint
    for wrong in ("", "close sesame"):
        with pytest.raises(KeyRefused, match=r"locked\.pem: cannot be decrypted with this passphrase"):
            SigningKey.read(locked.private, lambda wrong=wrong: wrong)


@pytest.mark.parametrize(
    ("mode", "is_exposed"), [(0o600, False), (0o400, False), (0o640, True), (0o604, True)]
)
def test_a_private_key_that_others_may_read(keys: KeyPair, mode: int, is_exposed: bool) -> None:
    keys.private.chmod(mode)
    assert SigningKey.read(keys.private, never).is_exposed == is_exposed


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        (ec.generate_private_key(ec.SECP256K1()), "is a key of the curve secp256k1"),
        (ed25519.Ed25519PrivateKey.generate(), "is of the kind Ed25519"),
        (rsa.generate_private_key(65537, 2048), "is of the kind RSA"),
    ],
    ids=["secp256k1", "ed25519", "rsa"],
)
def test_keys_of_other_kinds(
    tmp_path: Path,
    key: PrivateKey,
    kind: str,
) -> None:
    pair = write_pair(tmp_path, key)
    with pytest.raises(KeyRefused, match=rf"odd\.pem: {kind}.*; keys must be P-256, P-384 or P-521"):
        SigningKey.read(pair.private, never)
    with pytest.raises(KeyRefused, match=rf"odd\.pub\.pem: {kind}.*; keys must be P-256, P-384 or P-521"):
        TrustedKey.read(pair.public)


def test_one_half_in_the_place_of_the_other(keys: KeyPair) -> None:
    with pytest.raises(KeyRefused, match="holds a private key; the public one is wanted"):
        TrustedKey.read(keys.private)
    with pytest.raises(KeyRefused, match="holds a public key; the private one is wanted"):
        SigningKey.read(keys.public, never)


def test_files_that_hold_no_key(tmp_path: Path, keys: KeyPair) -> None:
    path = tmp_path / "file"
    os.mkfifo(tmp_path / "pipe")
    for wrong, public, private in (
        ("file", "No such file", "No such file"),
        ("pipe", "is not a regular file", "is not a regular file"),
        (".", "is not a regular file", "is not a regular file"),
    ):
        with pytest.raises(KeyRefused, match=public):
            TrustedKey.read(tmp_path / wrong)
        with pytest.raises(KeyRefused, match=private):
            SigningKey.read(tmp_path / wrong, never)
    for content, public, private in (
        (b"", "is not a PEM file with one public key", "holds no private key"),
        (keys.public.read_bytes() * 2, "is not a PEM file with one public key", "holds a public key"),
        (
            b"-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n",
            "holds no public key",
            "public key",
        ),
        (b"x" * (KEY_LIMIT_BYTES + 1), "is larger than 65536 bytes", "is larger than 65536 bytes"),
    ):
        path.write_bytes(content)
        with pytest.raises(KeyRefused, match=public):
            TrustedKey.read(path)
        with pytest.raises(KeyRefused, match=private):
            SigningKey.read(path, never)


# --- in loaderd's configuration ------------------------------------------------------------------


def configured(folder: Path, text: str) -> LoaderdConfig:
    path = folder / "loaderd.toml"
    path.write_text(f'model_roots = ["/srv/models"]\n[models.m]\n{text}\n')
    return load_config(path, LoaderdConfig)


def test_trusted_keys_are_read_with_the_file(tmp_path: Path, keys: KeyPair) -> None:
    second = make_keys(tmp_path, "second", ec.SECP384R1())
    config = configured(
        tmp_path, f'verify = "signed"\ntrusted_keys = ["{keys.public}", "{second.public}"]'
    ).model("m")
    keys.public.unlink()
    assert [key.hint for key in config.trusted_keys] == [
        SigningKey.read(keys.private, never).hint,
        second.trusted.hint,
    ]


@pytest.mark.parametrize(
    ("verify", "trusted", "key", "reason"),
    [
        ("signed", None, "", "trusted_keys and verify = 'signed' are of no use without each other"),
        ("sealed", '["{public}"]', "", "other, found verify = 'sealed' and 1 trusted_keys"),
        ("signed", '["/no/key.pem"]', ".trusted_keys.0", "/no/key.pem: No such file or directory"),
        ("signed", '["{public}", "{private}"]', ".trusted_keys.1", "holds a private key"),
        ("signed", '["{public}", 7]', ".trusted_keys.1", "expected the path of a PEM file"),
        ("signed", '["{public}", "{public}"]', ".trusted_keys", "key.pub.pem hold the same key"),
        ("signed", '["-----BEGIN PRIVATE KEY-----"]', ".trusted_keys.0", "found what is in one"),
        ("signed", '"{public}"', ".trusted_keys", "expected a list, found text"),
        ("trust", None, ".verify", "expected 'digest', 'sealed' or 'signed', found 'trust'"),
    ],
)
def test_a_fault_of_a_key_is_named(
    tmp_path: Path, keys: KeyPair, verify: str, trusted: str | None, key: str, reason: str
) -> None:
    text = f'verify = "{verify}"'
    if trusted is not None:
        text += "\ntrusted_keys = " + trusted.format(public=keys.public, private=keys.private)
    with pytest.raises(ConfigError) as caught:
        configured(tmp_path, text)
    assert caught.value.facts["key"] == f"models.m{key}"
    assert f": models.m{key}: " in caught.value.message
    assert reason in caught.value.message
    assert "Value error" not in caught.value.message
