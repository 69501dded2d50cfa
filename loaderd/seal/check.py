"""A checkpoint held against its seal: before loading by listing and sizes, after it by content."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from loaderd.checkpoint.checkpoint import Checkpoint, open_directory
from loaderd.checkpoint.header import TensorSource
from loaderd.checkpoint.names import SEAL_FILE
from loaderd.remedy import SEAL_IT, SIGN_IT, remedied
from loaderd.seal.create import assemble_seal
from loaderd.seal.document import Seal, SealedTensor, read_seal
from loaderd.seal.scan import FileScan, Progress, scan_checkpoint
from loaderd.signature.check import check_scans, check_signature, unread_files
from loaderd.signature.keys import TrustedKey
from shared.digest import LEAF_BYTES, SHA256_BYTES, file_digest, leaf_count
from shared.errors import CheckpointError, DigestMismatch, InvariantError


@dataclass(frozen=True, slots=True)
class VerifiedFolder:
    """What a folder that was read holds, and the trusted key that signed it, if it was held against one."""

    seal: Seal
    key: TrustedKey | None


def check_against(checkpoint: Checkpoint, seal: Seal) -> None:
    """Raise unless files, sizes, tensor table, config and tokenizer files are those of the seal.

    Weight bytes are not read.  CheckpointError names what is missing, added or of another size,
    shape or dtype; DigestMismatch names a config, tokenizer or index file with other content.
    """
    sizes = {file: checkpoint.file_bytes(file) for file in checkpoint.files}
    sizes.update({name: len(data) for name, data in checkpoint.documents.items()})
    for name in sorted(seal.files.keys() - sizes.keys()):
        raise CheckpointError("is in the seal and not in the folder", file=name)
    for name in sorted(sizes.keys() - seal.files.keys()):
        raise CheckpointError("is in the folder and not in the seal", file=name)
    for name in sorted(sizes):
        if sizes[name] != seal.files[name].nbytes:
            raise CheckpointError(
                f"has {sizes[name]} bytes, the seal says {seal.files[name].nbytes}", file=name
            )
    for name, data in checkpoint.documents.items():
        digest = file_digest(data)
        if digest != seal.files[name].sha256:
            raise DigestMismatch(f"is {digest}, the seal says {seal.files[name].sha256}", file=name)
    _check_table(checkpoint, seal)


def check_tensor(source: TensorSource, sealed: SealedTensor, *, leaves: bytes, crc32: int) -> None:
    """Raise DigestMismatch, at the first differing leaf's byte in the file, unless the bytes that
    `leaves` and `crc32` were computed over are those of the seal."""
    if len(leaves) != len(sealed.leaves):
        raise InvariantError(f"tensor {source.name!r} is compared with a seal for another size")
    if leaves != sealed.leaves:
        leaf = next(
            index
            for index in range(leaf_count(source.nbytes))
            if leaves[index * SHA256_BYTES :][:SHA256_BYTES]
            != sealed.leaves[index * SHA256_BYTES :][:SHA256_BYTES]
        )
        found = leaves[leaf * SHA256_BYTES :][:SHA256_BYTES].hex()
        expected = sealed.leaves[leaf * SHA256_BYTES :][:SHA256_BYTES].hex()
        raise DigestMismatch(
            f"leaf {leaf} is {found}, the seal says {expected}",
            file=source.file,
            tensor=source.name,
            byte=source.file_offset + leaf * LEAF_BYTES,
        )
    if crc32 != sealed.crc32:
        raise DigestMismatch(
            f"CRC32 is {crc32:08x}, the seal says {sealed.crc32:08x}, while all leaves agree: a wrong seal",
            file=source.file,
            tensor=source.name,
            byte=source.file_offset,
        )


def verify_directory(
    directory: Path,
    *,
    trusted: Sequence[TrustedKey] = (),
    jobs: int = 1,
    progress: Progress | None = None,
) -> VerifiedFolder:
    """Read everything in `directory` and hold it against its seal.

    With trusted keys it is held against its signature as well, and need not be sealed: then the seal
    is one made of what was read.  Blocking.  Raises CheckpointError if there is no seal or the folder
    is malformed or changes meanwhile, DigestMismatch at the first byte range that differs, and
    SignatureRefused as `check_signature` does.
    """
    with open_directory(directory) as checkpoint:
        with remedied():
            signed = check_signature(checkpoint, trusted) if trusted else None
        seal = None
        with remedied(SEAL_IT if signed is None else SIGN_IT):
            if checkpoint.seal_bytes is not None:
                seal = read_seal(checkpoint.seal_bytes)
                check_against(checkpoint, seal)
            elif signed is None:
                raise CheckpointError("does not exist: the folder is not sealed", file=SEAL_FILE)
        others = unread_files(checkpoint, signed) if signed is not None else ()
        scans = scan_checkpoint(checkpoint, others, jobs=jobs, progress=progress)
        checkpoint.verify_unchanged()
        if seal is not None:
            _check_scans(checkpoint, seal, scans)
        if signed is not None:
            with remedied():
                check_scans(signed, scans)
        return VerifiedFolder(
            assemble_seal(checkpoint, scans) if seal is None else seal,
            signed.key if signed is not None else None,
        )


def _check_scans(checkpoint: Checkpoint, seal: Seal, scans: Mapping[str, FileScan]) -> None:
    for source in checkpoint.tensors:
        scan = scans[source.file].tensors[source.name]
        check_tensor(source, seal.tensors[source.name], leaves=scan.leaves, crc32=scan.crc32)
    for file in checkpoint.files:
        found, sealed = scans[file].sha256, seal.files[file].sha256
        if found != sealed:
            # No tensor differs: the header does, or a tensor that the index leaves out.
            raise DigestMismatch(f"is {found}, the seal says {sealed}", file=file)


def _check_table(checkpoint: Checkpoint, seal: Seal) -> None:
    found = {tensor.name: tensor for tensor in checkpoint.tensors}
    for name in sorted(seal.tensors.keys() - found.keys()):
        raise CheckpointError("is in the seal and not in the file", file=seal.tensors[name].file, tensor=name)
    for name, tensor in found.items():
        sealed = seal.tensors.get(name)
        if sealed is None:
            raise CheckpointError("is in the file and not in the seal", file=tensor.file, tensor=name)
        if (tensor.file, tensor.dtype, tensor.shape) != (sealed.file, sealed.dtype, sealed.shape):
            raise CheckpointError(
                f"is {tensor.dtype} {list(tensor.shape)}, the seal says {sealed.dtype} {list(sealed.shape)} "
                f"in {sealed.file}",
                file=tensor.file,
                tensor=name,
                byte=tensor.file_offset,
            )
