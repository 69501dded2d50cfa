"""Elliptic-curve keys in PEM files: the private one that signs, and the public ones that are trusted.

The curves and the hash that goes with each are those of Sigstore: P-256, P-384 and P-521 with SHA-256,
SHA-384 and SHA-512.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Self

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
)

from shared.errors import InvalidRequest

KEY_LIMIT_BYTES = 64 << 10

_HASHES: dict[str, type[hashes.HashAlgorithm]] = {
    "secp256r1": hashes.SHA256,
    "secp384r1": hashes.SHA384,
    "secp521r1": hashes.SHA512,
}
_CURVES = "P-256, P-384 or P-521"


class KeyRefused(InvalidRequest):
    """A key file is missing, unreadable, or holds no key that can be used; the message names the file."""

    code = "key"


@dataclass(frozen=True, slots=True)
class TrustedKey:
    """A public key whose signatures count."""

    path: Path
    hint: str  # hex SHA-256 of its PEM, as bundles name it
    key: ec.EllipticCurvePublicKey

    @classmethod
    def read(cls, path: Path) -> Self:
        """The one public key in a PEM file; raises KeyRefused.  Blocking."""
        raw, _ = _read(path)
        if b"PRIVATE KEY-----" in raw:
            raise KeyRefused(f"{path}: holds a private key; the public one is wanted", file=str(path))
        if raw.count(b"-----BEGIN ") != 1:
            raise KeyRefused(f"{path}: is not a PEM file with one public key", file=str(path))
        try:
            key = load_pem_public_key(raw)
        except (ValueError, UnsupportedAlgorithm) as error:
            raise KeyRefused(f"{path}: holds no public key that can be read", file=str(path)) from error
        if not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name not in _HASHES:
            raise KeyRefused(f"{path}: is {_kind(key)}; keys must be {_CURVES}", file=str(path))
        return cls(path, _hint(key), key)

    def has_signed(self, signature: bytes, message: bytes) -> bool:
        """Whether `signature` over `message` was made with the private part of this key."""
        try:
            self.key.verify(signature, message, ec.ECDSA(_HASHES[self.key.curve.name]()))
        except InvalidSignature:
            return False
        return True


@dataclass(frozen=True, slots=True)
class SigningKey:
    """A private key to sign with."""

    hint: str
    is_exposed: bool  # others than its owner may read the file
    key: ec.EllipticCurvePrivateKey

    @classmethod
    def read(cls, path: Path, ask_passphrase: Callable[[], str]) -> Self:
        """The private key in a PEM file; `ask_passphrase` is called if it is encrypted.

        Raises KeyRefused.  Blocking.
        """
        raw, mode = _read(path)
        try:
            # Asked only for a key that needs it; a file that is no key at all is refused before.
            key: object = load_pem_private_key(raw, password=None)
        except TypeError:
            key = _decrypted(path, raw, ask_passphrase())
        except (ValueError, UnsupportedAlgorithm) as error:
            what = (
                "a public key; the private one is wanted" if b"PUBLIC KEY-----" in raw else "no private key"
            )
            raise KeyRefused(f"{path}: holds {what}", file=str(path)) from error
        if not isinstance(key, ec.EllipticCurvePrivateKey) or key.curve.name not in _HASHES:
            raise KeyRefused(f"{path}: is {_kind(key)}; keys must be {_CURVES}", file=str(path))
        return cls(_hint(key.public_key()), bool(mode & 0o077), key)

    def sign(self, message: bytes) -> bytes:
        """An ECDSA signature (DER) over `message`."""
        return self.key.sign(message, ec.ECDSA(_HASHES[self.key.curve.name]()))


def _read(path: Path) -> tuple[bytes, int]:
    """The file and its mode; never waits for a pipe."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode):
                raise KeyRefused(f"{path}: is not a regular file", file=str(path))
            with os.fdopen(fd, "rb", closefd=False) as file:
                raw = file.read(KEY_LIMIT_BYTES + 1)
        finally:
            os.close(fd)
    except OSError as error:
        raise KeyRefused(f"{path}: {error.strerror}", file=str(path)) from error
    if len(raw) > KEY_LIMIT_BYTES:
        raise KeyRefused(f"{path}: is larger than {KEY_LIMIT_BYTES} bytes, no key is", file=str(path))
    return raw, stat.S_IMODE(info.st_mode)


def _decrypted(path: Path, raw: bytes, passphrase: str) -> object:
    try:
        return load_pem_private_key(raw, password=passphrase.encode())
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise KeyRefused(f"{path}: cannot be decrypted with this passphrase", file=str(path)) from error


def _hint(key: ec.EllipticCurvePublicKey) -> str:
    return sha256(key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)).hexdigest()


def _kind(key: object) -> str:
    if isinstance(key, ec.EllipticCurvePublicKey | ec.EllipticCurvePrivateKey):
        return f"a key of the curve {key.curve.name}"
    return f"of the kind {type(key).__name__}"
