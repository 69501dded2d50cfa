"""Sealing a folder: hash everything once, then write `seal.json`, and with a key `model.sig` after it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from loaderd.checkpoint.checkpoint import SEAL_LIMIT_BYTES, Checkpoint, open_directory
from loaderd.checkpoint.names import SEAL_FILE, SIGNATURE_FILE, shown
from loaderd.checkpoint.replacement import (
    check_writable,
    is_temporary,
    remove_temporaries,
    replace_file,
)
from loaderd.seal.document import Seal, SealedFile, SealedTensor, encode_seal, make_seal
from loaderd.seal.scan import FileScan, Progress, scan_checkpoint
from loaderd.signature.create import sign_files
from loaderd.signature.keys import SigningKey
from loaderd.signature.statement import ALWAYS_IGNORED, is_below
from shared.digest import file_digest, tensor_digest
from shared.errors import CheckpointError


def seal_directory(
    directory: Path, *, key: SigningKey | None = None, jobs: int = 1, progress: Progress | None = None
) -> Seal:
    """Hash the checkpoint in `directory` and write its seal, replacing one that is there.

    With a key, every file of the folder is hashed and a signature over all of them, the seal
    included, is written after the seal.  Blocking.  Raises CheckpointError if the folder is
    malformed, unfinished, not to be written to, being sealed already or changes meanwhile; then nothing
    is written and an older seal stays.
    """
    with open_directory(directory) as checkpoint:
        checkpoint.refuse_unfinished()
        # Before anything is hashed, which may take minutes.
        check_writable(checkpoint.borrow_folder_fd(), SEAL_FILE)
        # They would be signed, and a signed file that is removed later ends the signature.
        remove_temporaries(checkpoint.borrow_folder_fd())
        tree = checkpoint.tree(_is_ignored) if key is not None else {}
        beside = sorted(tree.keys() - {*checkpoint.files, *checkpoint.documents, SEAL_FILE})
        scans = scan_checkpoint(checkpoint, beside, jobs=jobs, progress=progress)
        seal = assemble_seal(checkpoint, scans)
        _verify_unchanged(checkpoint, tree if key is not None else None)
        text, signature = encode_seal(seal), None
        if len(text) > SEAL_LIMIT_BYTES:
            raise CheckpointError(
                f"would have {len(text)} bytes, {SEAL_LIMIT_BYTES} are allowed", file=SEAL_FILE
            )
        if key is not None:
            files = {path: scans[path].sha256 for path in beside}
            files |= {name: file.sha256 for name, file in seal.files.items()}
            files[SEAL_FILE] = file_digest(text)
            # Before anything is written: not every folder can be signed.
            signature = sign_files(checkpoint.name, files, key, has_symlinks=any(tree.values()))
            if (directory / SIGNATURE_FILE).is_dir():
                raise CheckpointError("is a directory: it cannot be replaced", file=SIGNATURE_FILE)
        replace_file(checkpoint.borrow_folder_fd(), SEAL_FILE, text)
        if signature is not None:
            replace_file(checkpoint.borrow_folder_fd(), SIGNATURE_FILE, signature)
    return seal


def assemble_seal(checkpoint: Checkpoint, scans: Mapping[str, FileScan]) -> Seal:
    """The seal of a checkpoint whose weight files were scanned."""
    files = {file: SealedFile(checkpoint.file_bytes(file), scans[file].sha256) for file in checkpoint.files}
    for name, data in checkpoint.documents.items():
        files[name] = SealedFile(len(data), file_digest(data))
    tensors = {
        source.name: SealedTensor(
            source.file,
            source.dtype,
            source.shape,
            source.nbytes,
            tensor_digest(scans[source.file].tensors[source.name].leaves),
            scans[source.file].tensors[source.name].crc32,
            scans[source.file].tensors[source.name].leaves,
        )
        for source in checkpoint.tensors
    }
    return make_seal(files, tensors)


def _verify_unchanged(checkpoint: Checkpoint, tree: Mapping[str, bool] | None) -> None:
    """Raise CheckpointError if a file has changed; with a tree, where all is signed, also for a new one."""
    try:
        checkpoint.verify_unchanged()
        if tree is not None and (changed := tree.keys() ^ checkpoint.tree(_is_ignored).keys()):
            raise CheckpointError("appeared or went away while it was signed", file=shown(min(changed)))
    except CheckpointError as error:
        if error.file != SEAL_FILE and not is_temporary(error.file):
            raise
        raise CheckpointError(
            "changed while the folder was hashed: another seal of it ran; try again when none does",
            file=error.file,
        ) from error


def _is_ignored(path: str) -> bool:
    return is_below(path, ALWAYS_IGNORED)
