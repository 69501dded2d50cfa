"""`seal.json`: its values, its text, and a reader that believes nothing it can recompute.

The format is described in `docs/seal-format.md`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from loaderd.checkpoint.names import ASSET_FILES, CONFIG_FILE, INDEX_FILE, SEAL_FILE, is_shard_name, shown
from loaderd.checkpoint.strict_json import parse_object
from loaderd.seal.leaves import cut_leaves
from shared.digest import LEAF_BYTES, SHA256_BYTES, leaf_count, tensor_digest, version_digest
from shared.errors import CheckpointError
from shared.ids import Digest, is_digest
from shared.tensor_size import MAX_NAME_CHARS, MAX_TENSORS, tensor_nbytes

FORMAT = "changeover-seal"
FORMAT_VERSION = 1

_CRC32 = re.compile(r"[0-9a-f]{8}")


@dataclass(frozen=True, slots=True)
class SealedFile:
    """A file of the folder: size and flat SHA-256 (the hub's LFS oid)."""

    nbytes: int
    sha256: Digest


@dataclass(frozen=True, slots=True)
class SealedTensor:
    """A tensor: what it is, where it is, and what its bytes must hash to."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    digest: Digest
    crc32: int
    leaves: bytes  # 32 bytes for each LEAF_BYTES of the tensor


@dataclass(frozen=True, slots=True)
class Seal:
    """What a checkpoint folder must hold; names are sorted."""

    digest: Digest
    files: Mapping[str, SealedFile]
    tensors: Mapping[str, SealedTensor]

    @property
    def asset_digests(self) -> dict[str, Digest]:
        """Flat SHA-256 of each config and tokenizer file."""
        return {name: file.sha256 for name, file in self.files.items() if name in ASSET_FILES}

    @property
    def tensor_digests(self) -> dict[str, Digest]:
        """Digest of each tensor by name."""
        return {name: tensor.digest for name, tensor in self.tensors.items()}


def make_seal(files: Mapping[str, SealedFile], tensors: Mapping[str, SealedTensor]) -> Seal:
    """A seal over these files and tensors, with the version digest that follows from them."""
    sorted_files = {name: files[name] for name in sorted(files)}
    sorted_tensors = {name: tensors[name] for name in sorted(tensors)}
    return Seal(
        _version_digest(sorted_files, sorted_tensors),
        MappingProxyType(sorted_files),
        MappingProxyType(sorted_tensors),
    )


def encode_seal(seal: Seal) -> bytes:
    """The text of `seal.json`; equal seals give equal bytes."""
    document = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "leaf_bytes": LEAF_BYTES,
        "digest": seal.digest,
        "files": {name: {"size": file.nbytes, "sha256": file.sha256} for name, file in seal.files.items()},
        "tensors": {
            name: {
                "file": tensor.file,
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "digest": tensor.digest,
                "crc32": f"{tensor.crc32:08x}",
                "leaves": tensor.leaves.hex(),
            }
            for name, tensor in seal.tensors.items()
        },
    }
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode("utf-8") + b"\n"


def read_seal(raw: bytes) -> Seal:
    """Parse `seal.json`; raises CheckpointError if it is malformed or contradicts itself.

    Tensor digests are recomputed from their leaves and the version digest from everything else.  Takes
    half as much memory as `raw` has, and for what it says beside the leaves ten times of that.
    """
    cut = cut_leaves(raw)
    try:
        document = parse_object(cut.rest, file=SEAL_FILE)
    except CheckpointError as error:
        raise CheckpointError(error.reason, file=SEAL_FILE, byte=cut.place(error.byte)) from error
    name, version, leaf_bytes, digest, files, tensors = _fields(
        document, ("format", "version", "leaf_bytes", "digest", "files", "tensors"), "the seal"
    )
    if name != FORMAT or type(version) is not int or version != FORMAT_VERSION:
        raise _refusal(
            f"is {_show(name)} version {_show(version)}, this build reads {FORMAT!r} {FORMAT_VERSION}"
        )
    if type(leaf_bytes) is not int or leaf_bytes != LEAF_BYTES:
        raise _refusal(f"has leaves of {_show(leaf_bytes)} bytes, format {FORMAT_VERSION} has {LEAF_BYTES}")
    if not isinstance(files, dict) or not isinstance(tensors, dict):
        raise _refusal("'files' or 'tensors' is not an object")
    if not 0 < len(tensors) <= MAX_TENSORS:
        raise _refusal(f"lists {len(tensors)} tensors, 1 to {MAX_TENSORS} are allowed")
    sealed_files = {file: _read_file(file, value) for file, value in files.items()}
    if CONFIG_FILE not in sealed_files:
        raise _refusal(f"does not list {CONFIG_FILE}")
    sealed_tensors = {tensor: _read_tensor(tensor, value, cut.leaves) for tensor, value in tensors.items()}
    _check_references(sealed_files, sealed_tensors)
    _check_aliases(sealed_tensors)
    seal = make_seal(sealed_files, sealed_tensors)
    if digest != seal.digest:
        raise _refusal(
            f"contradicts itself: its version digest is {_show(digest)}, its content gives {seal.digest}"
        )
    return seal


def _version_digest(files: Mapping[str, SealedFile], tensors: Mapping[str, SealedTensor]) -> Digest:
    return version_digest(
        ((name, tensor.dtype, tensor.shape, tensor.digest) for name, tensor in tensors.items()),
        {name: file.sha256 for name, file in files.items() if name in ASSET_FILES},
    )


def _read_file(name: str, value: object) -> SealedFile:
    if name not in ASSET_FILES and name != INDEX_FILE and not is_shard_name(name):
        raise _refusal(f"lists {shown(name)!r}, which is no part of a checkpoint")
    size, sha256 = _fields(value, ("size", "sha256"), f"file {shown(name)!r}")
    if type(size) is not int or not 0 <= size < 1 << 63:
        raise _refusal(f"file {shown(name)!r} has size {_show(size)}")
    return SealedFile(size, _digest(sha256, f"file {shown(name)!r}"))


def _read_tensor(name: str, value: object, cut: dict[str, bytes]) -> SealedTensor:
    """A tensor whose leaves were cut out of the text, or are spelt so that they were not; uses them up."""
    where = f"tensor {shown(name)!r}"
    if not 0 < len(name) <= MAX_NAME_CHARS:
        raise _refusal(f"a tensor name has {len(name)} characters")
    file, dtype, shape, digest, crc32, leaves = _fields(
        value, ("file", "dtype", "shape", "digest", "crc32", "leaves"), where
    )
    if not isinstance(file, str) or not isinstance(dtype, str) or not isinstance(shape, list):
        raise _refusal("'file', 'dtype' or 'shape' has another type", tensor=name)
    try:
        nbytes = tensor_nbytes(dtype, shape)
    except ValueError as error:
        raise _refusal(str(error), tensor=name) from error
    if not isinstance(crc32, str) or not _CRC32.fullmatch(crc32):
        raise _refusal(f"CRC32 is {_show(crc32)}, not 8 hex digits", tensor=name)
    raw = cut.pop(leaves, None) if isinstance(leaves, str) else None
    if raw is None:
        raw = _hex(leaves)
    if raw is None:
        raise _refusal("leaves are not hex", tensor=name)
    expected = leaf_count(nbytes)
    if len(raw) != expected * SHA256_BYTES:
        raise _refusal(f"has {len(raw)} bytes of leaves, {expected} leaves are expected", tensor=name)
    claimed = _digest(digest, where)
    computed = tensor_digest(raw)
    if claimed != computed:
        raise _refusal(f"contradicts itself: digest is {claimed}, the leaves give {computed}", tensor=name)
    return SealedTensor(file, dtype, tuple(shape), nbytes, claimed, int(crc32, 16), raw)


def _check_references(files: Mapping[str, SealedFile], tensors: Mapping[str, SealedTensor]) -> None:
    used = {tensor.file for tensor in tensors.values()}
    weights = {name for name in files if is_shard_name(name)}
    for name in sorted(used - weights):
        raise _refusal(f"places tensors in {shown(name)!r}, which it does not list as a weight file")
    for name in sorted(weights - used):
        raise _refusal(f"lists {shown(name)!r}, which holds no tensor")


def _check_aliases(tensors: Mapping[str, SealedTensor]) -> None:
    """Tensors of one content are placed once, so their CRC32 must be one as well."""
    seen: dict[tuple[Digest, int], int] = {}
    for name, tensor in tensors.items():
        crc32 = seen.setdefault((tensor.digest, tensor.nbytes), tensor.crc32)
        if crc32 != tensor.crc32:
            raise _refusal(
                f"contradicts itself: CRC32 is {tensor.crc32:08x}, another with its digest has {crc32:08x}",
                tensor=name,
            )


def _fields(value: object, names: Sequence[str], where: str) -> list[object]:
    if not isinstance(value, dict):
        raise _refusal(f"{where} is not an object")
    for name in names:
        if name not in value:
            raise _refusal(f"{where} lacks {name!r}")
    if len(value) != len(names):
        unknown = min(set(value) - set(names))
        raise _refusal(f"{where} has an unknown field {shown(unknown)!r}")
    return [value[name] for name in names]


def _hex(value: object) -> bytes | None:
    """The bytes that a text of lower-case hex digits alone stands for."""
    if not isinstance(value, str):
        return None
    try:
        raw = bytes.fromhex(value)
    except ValueError:
        return None
    return raw if raw.hex() == value else None  # it takes spaces and capitals too


def _digest(value: object, where: str) -> Digest:
    if not isinstance(value, str) or not is_digest(value):
        raise _refusal(f"{where} has digest {_show(value)}, expected sha256: and 64 hex digits")
    return Digest(value)


def _show(value: object) -> str:
    return repr(value)[:100]


def _refusal(reason: str, *, tensor: str = "") -> CheckpointError:
    return CheckpointError(reason, file=SEAL_FILE, tensor=shown(tensor))
