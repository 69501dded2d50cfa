"""Sealing a folder: hash everything once, then write `seal.json` last and atomically."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from loaderd.checkpoint.checkpoint import Checkpoint, open_directory
from loaderd.checkpoint.names import SEAL_FILE
from loaderd.seal.document import Seal, SealedFile, SealedTensor, encode_seal, make_seal
from loaderd.seal.scan import FileScan, Progress, scan_checkpoint
from shared.digest import file_digest, tensor_digest
from shared.errors import DriverError


def seal_directory(directory: Path, *, jobs: int = 1, progress: Progress | None = None) -> Seal:
    """Hash the checkpoint in `directory` and write its seal, replacing one that is there.

    Blocking.  Raises CheckpointError if the folder is malformed, unfinished or changes meanwhile;
    then no seal is written and an older one stays.
    """
    with open_directory(directory) as checkpoint:
        checkpoint.refuse_unfinished()
        seal = seal_of(checkpoint, jobs=jobs, progress=progress)
        _write(checkpoint.borrow_folder_fd(), encode_seal(seal))
    return seal


def seal_of(checkpoint: Checkpoint, *, jobs: int = 1, progress: Progress | None = None) -> Seal:
    """The seal that an open checkpoint amounts to; nothing is written.  Blocking.

    Raises CheckpointError if it changes meanwhile.
    """
    scans = scan_checkpoint(checkpoint, jobs=jobs, progress=progress)
    seal = _assemble(checkpoint, scans)
    checkpoint.verify_unchanged()
    return seal


def _assemble(checkpoint: Checkpoint, scans: dict[str, FileScan]) -> Seal:
    files = {file: SealedFile(checkpoint.file_bytes(file), scan.sha256) for file, scan in scans.items()}
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


def _write(folder_fd: int, data: bytes) -> None:
    """Replace the seal in one step: after a crash there is the old one, the new one or none."""
    temporary = f".{SEAL_FILE}.{secrets.token_hex(8)}"
    try:
        fd = os.open(
            temporary,
            os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC,
            0o644,
            dir_fd=folder_fd,
        )
        try:
            try:
                view = memoryview(data)
                while view:
                    view = view[os.write(fd, view) :]
                os.fsync(fd)
            finally:
                os.close(fd)
            os.rename(temporary, SEAL_FILE, src_dir_fd=folder_fd, dst_dir_fd=folder_fd)
        except OSError:
            os.unlink(temporary, dir_fd=folder_fd)
            raise
        directory = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder_fd)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    except OSError as error:
        raise DriverError("write", error.errno or 0, f"{SEAL_FILE}: {error.strerror}") from error
