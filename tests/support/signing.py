"""Keys, and the reference tool for signatures, for tests of signed checkpoints."""

from __future__ import annotations

import base64
import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from loaderd.signature.bundle import Envelope, encode_bundle, pre_authentication_encoding
from loaderd.signature.keys import SigningKey, TrustedKey

SIGNATURE = "model.sig"


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A key pair in two PEM files."""

    private: Path
    public: Path

    @property
    def signing(self) -> SigningKey:
        return SigningKey.read(self.private, lambda: "")

    @property
    def trusted(self) -> TrustedKey:
        return TrustedKey.read(self.public)


def make_keys(
    folder: Path, name: str = "key", curve: ec.EllipticCurve | None = None, passphrase: str | None = None
) -> KeyPair:
    """A fresh key pair as openssl would write it."""
    folder.mkdir(parents=True, exist_ok=True)
    key = ec.generate_private_key(curve or ec.SECP256R1())
    encryption = NoEncryption() if passphrase is None else BestAvailableEncryption(passphrase.encode())
    pair = KeyPair(folder / f"{name}.pem", folder / f"{name}.pub.pem")
    pair.private.touch(0o600)
    pair.private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption))
    pair.public.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return pair


def reference(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the reference tool, `model_signing`."""
    return subprocess.run(
        [sys.executable, "-m", "model_signing", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def sign_by_reference(folder: Path, keys: KeyPair, *options: str | Path) -> None:
    """Sign a folder with the reference tool."""
    signature = folder / SIGNATURE
    done = reference("sign", "key", "--private_key", keys.private, "--signature", signature, *options, folder)
    assert done.returncode == 0, done


def verify_by_reference(folder: Path, keys: KeyPair, *options: str) -> subprocess.CompletedProcess[str]:
    """Verify a folder with the reference tool."""
    signature = folder / SIGNATURE
    return reference("verify", "key", "--public_key", keys.public, "--signature", signature, *options, folder)


def payload_of(folder: Path) -> dict[str, Any]:
    """The statement in a folder's signature."""
    bundle = json.loads((folder / SIGNATURE).read_bytes())
    statement: dict[str, Any] = json.loads(base64.b64decode(bundle["dsseEnvelope"]["payload"]))
    return statement


def resign(folder: Path, keys: KeyPair, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a signed statement and sign what comes of it, as a signer with other habits would."""
    statement = payload_of(folder)
    change(statement)
    digests = b"".join(bytes.fromhex(entry["digest"]) for entry in statement["predicate"]["resources"])
    statement["subject"][0]["digest"]["sha256"] = hashlib.sha256(digests).hexdigest()
    payload = json.dumps(statement).encode()
    signature = keys.signing.sign(pre_authentication_encoding(payload))
    (folder / SIGNATURE).write_bytes(encode_bundle(Envelope(payload, signature, keys.trusted.hint)))
