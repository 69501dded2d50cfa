"""A checkpoint folder held against its signature.

The chain of trust: a trusted key signed the statement; the statement has the flat SHA-256 of every
file.  Config, tokenizer, index and seal are hashed as they are read.  A weight file is not hashed flat
where the signed seal says the same of it: its tensors are held against the seal's leaves where they
will be served from.  Without a seal one is made from the files, and its flat digests must be the signed
ones: leaves and flat digest are of the same read.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from loaderd.checkpoint.checkpoint import Checkpoint
from loaderd.checkpoint.folder import Folder
from loaderd.checkpoint.names import SEAL_FILE, SIGNATURE_FILE, shown
from loaderd.checkpoint.replacement import is_temporary
from loaderd.checkpoint.source_file import SourceFile
from loaderd.seal.create import assemble_seal
from loaderd.seal.document import Seal, encode_seal
from loaderd.seal.scan import FileScan, Progress, scan_checkpoint
from loaderd.signature.bundle import (
    SIGNATURE_LIMIT_BYTES,
    pre_authentication_encoding,
    read_bundle,
    refusal,
)
from loaderd.signature.keys import TrustedKey
from loaderd.signature.statement import Statement, read_statement
from shared.digest import file_digest
from shared.errors import CheckpointError, SignatureRefused
from shared.ids import Digest


@dataclass(frozen=True, slots=True)
class SignedFolder:
    """What a trusted key says about a folder whose listing and documents agree with it."""

    statement: Statement
    key: TrustedKey


def authenticate(raw: bytes, trusted: Sequence[TrustedKey]) -> tuple[Statement, TrustedKey]:
    """The statement in a bundle, and which of the keys signed it.

    Raises SignatureRefused if the bundle is malformed, or its signature is not one of these keys'.
    Nothing inside is parsed before that is known.
    """
    envelope = read_bundle(raw)
    candidates = [key for key in trusted if envelope.hint in (None, key.hint)]
    if not candidates:
        names = ", ".join(f"{key.path} is {key.hint[:12]}" for key in trusted) or "there is none"
        raise refusal(f"was made with key {(envelope.hint or '')[:12]}, which is not trusted ({names})")
    message = pre_authentication_encoding(envelope.payload)
    for key in candidates:
        if key.has_signed(envelope.signature, message):
            return read_statement(envelope.payload), key
    names = ", ".join(str(key.path) for key in candidates)
    raise refusal(f"is not a valid signature of {names}: what was signed has been altered")


def is_outdated(directory: Path, seal: Seal) -> bool:
    """Whether the folder has a `model.sig` and it does not cover this seal.  Blocking.

    Who made the signature is not looked at: this tells what is of no use any more, not what is to be trusted.
    """
    if not os.path.lexists(directory / SIGNATURE_FILE):
        return False
    try:
        with (
            Folder.anywhere(directory) as folder,
            SourceFile.open(folder, SIGNATURE_FILE) as source,
        ):
            statement = read_statement(read_bundle(source.read_all(SIGNATURE_LIMIT_BYTES)).payload)
    except CheckpointError:
        return True
    return statement.files.get(SEAL_FILE) != file_digest(encode_seal(seal))


def check_signature(checkpoint: Checkpoint, trusted: Sequence[TrustedKey]) -> SignedFolder:
    """Hold the folder's listing and the files that were read on opening against its signature.  Blocking.

    Raises SignatureRefused, with a message of its own for: no signature, a malformed one, an untrusted
    key, a signature that does not verify, a file that is not signed, one that is missing, one that is
    altered, and an altered seal.
    """
    raw = checkpoint.read_signature(SIGNATURE_LIMIT_BYTES)
    if raw is None:
        raise SignatureRefused("does not exist: the folder is not signed", file=SIGNATURE_FILE)
    statement, key = authenticate(raw, trusted)
    found = checkpoint.tree(statement.is_ignored)
    for path in sorted(found.keys() - statement.files.keys()):
        if path == SEAL_FILE:
            raise SignatureRefused(
                "is not covered by the signature: the folder was sealed after it was signed", file=path
            )
        by_seal = ": a seal writes it, or was killed; when none runs, seal and sign again, or remove it"
        raise SignatureRefused(
            f"is in the folder and not in the signature{by_seal * is_temporary(path)}", file=shown(path)
        )
    for path in sorted(statement.files.keys() - found.keys()):
        raise SignatureRefused("is in the signature and not in the folder", file=shown(path))
    if checkpoint.seal_bytes is not None:
        _check(statement, SEAL_FILE, file_digest(checkpoint.seal_bytes), "the seal was altered after signing")
    for name, data in checkpoint.documents.items():
        _check(statement, name, file_digest(data), "altered after signing")
    return SignedFolder(statement, key)


def check_seal(signed: SignedFolder, seal: Seal) -> None:
    """Raise SignatureRefused unless the seal has for every file the digest that was signed."""
    for name, file in seal.files.items():
        if file.sha256 != signed.statement.files.get(name):
            raise SignatureRefused(
                f"the seal says {file.sha256}, the signature {signed.statement.files.get(name)}: they are of "
                "different contents",
                file=name,
            )


def unread_files(checkpoint: Checkpoint, signed: SignedFolder) -> tuple[str, ...]:
    """Signed files that are no part of the version: only hashing them shows whether they are altered."""
    known = {*checkpoint.files, *checkpoint.documents, SEAL_FILE}
    return tuple(sorted(signed.statement.files.keys() - known))


def prove(
    checkpoint: Checkpoint,
    signed: SignedFolder,
    seal: Seal | None,
    *,
    jobs: int = 1,
    progress: Progress | None = None,
) -> Seal:
    """Hash every file that nothing else will be held against; return the seal to load the version by.

    That is `seal`, or one made of what was read where there is none.  Blocking.  Raises SignatureRefused
    if a file is altered, CheckpointError if one changes meanwhile.
    """
    others = unread_files(checkpoint, signed)
    scans = scan_checkpoint(checkpoint, others, has_weights=seal is None, jobs=jobs, progress=progress)
    check_scans(signed, scans)
    checkpoint.verify_unchanged()
    return assemble_seal(checkpoint, scans) if seal is None else seal


def check_scans(signed: SignedFolder, scans: Mapping[str, FileScan]) -> None:
    """Raise SignatureRefused unless each file that was read has the digest that was signed."""
    for path in sorted(scans):
        _check(signed.statement, path, scans[path].sha256, "altered after signing")


def _check(statement: Statement, path: str, found: Digest, meaning: str) -> None:
    signed = statement.files.get(path)
    if found != signed:
        raise SignatureRefused(f"is {found}, the signature says {signed}: {meaning}", file=shown(path))
