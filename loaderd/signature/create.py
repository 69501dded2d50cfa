"""Signing: from the digests of a folder's files to the text of `model.sig`."""

from __future__ import annotations

from collections.abc import Mapping

from loaderd.signature.bundle import Envelope, encode_bundle, pre_authentication_encoding, read_bundle
from loaderd.signature.keys import SigningKey
from loaderd.signature.statement import Statement, encode_statement, read_statement
from shared.ids import Digest


def sign_files(subject: str, files: Mapping[str, Digest], key: SigningKey, *, has_symlinks: bool) -> bytes:
    """A bundle over every file of a folder; `files` maps relative paths to flat SHA-256.

    Raises SignatureRefused if there are more files, or longer paths, than a reader accepts.
    """
    payload = encode_statement(Statement(subject, files, follows_symlinks=has_symlinks))
    read_statement(payload)
    bundle = encode_bundle(Envelope(payload, key.sign(pre_authentication_encoding(payload)), key.hint))
    read_bundle(bundle)
    return bundle
