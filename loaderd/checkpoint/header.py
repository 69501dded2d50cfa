"""The safetensors header, read more strictly than the reference reader does.

Source of the format: safetensors 0.8 (u64 length, JSON, then the data without gaps).  Beyond the
reference, refused here are duplicate keys, leading white space, unknown fields, an empty name,
control characters in names, and shapes beyond any memory.
"""

from __future__ import annotations

import json
import re
import struct
from dataclasses import dataclass

from loaderd.checkpoint.names import shown
from loaderd.checkpoint.strict_json import duplicate_key, parse_pairs
from shared.errors import CheckpointError
from shared.tensor_size import MAX_NAME_CHARS, tensor_nbytes

PREFIX_BYTES = 8
HEADER_LIMIT_BYTES = 100_000_000
METADATA_KEY = "__metadata__"

_FIELDS = ("dtype", "shape", "data_offsets")
_SURROGATE = re.compile("[\ud800-\udfff]")
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class TensorSource:
    """One tensor of a checkpoint and where its bytes are."""

    name: str
    dtype: str  # as safetensors spells it
    shape: tuple[int, ...]
    nbytes: int
    file: str  # relative to the checkpoint folder
    file_offset: int  # from the start of the file; any alignment


def header_length(prefix: bytes, *, file: str, file_bytes: int) -> int:
    """Length of the JSON that follows the 8-byte prefix, within the limit and the file.

    Raises CheckpointError before anything of that size is allocated.
    """
    if len(prefix) < PREFIX_BYTES:
        raise CheckpointError(
            f"truncated: {len(prefix)} bytes, a header length takes {PREFIX_BYTES}",
            file=file,
            byte=len(prefix),
        )
    length: int = struct.unpack("<Q", prefix[:PREFIX_BYTES])[0]
    if length > HEADER_LIMIT_BYTES:
        raise CheckpointError(
            f"header claims {length} bytes, at most {HEADER_LIMIT_BYTES} are allowed", file=file, byte=0
        )
    if length > file_bytes - PREFIX_BYTES:
        raise CheckpointError(
            f"truncated: header claims {length} bytes, {file_bytes - PREFIX_BYTES} follow its length",
            file=file,
            byte=0,
        )
    return length


def parse_header(raw: bytes, *, file: str, file_bytes: int) -> tuple[TensorSource, ...]:
    """Tensors in the order of their bytes; `raw` is the JSON without the prefix.

    Raises CheckpointError that names file, tensor and byte unless the data section is covered
    exactly once, to the end of the file.
    """
    if not raw.startswith(b"{"):
        raise CheckpointError("header does not start with '{'", file=file, byte=PREFIX_BYTES)
    if not raw.rstrip(b" ").endswith(b"}"):
        raise CheckpointError(
            "header does not end with '}' and spaces",
            file=file,
            byte=PREFIX_BYTES + len(raw.rstrip(b" ")) - 1,
        )
    members = parse_pairs(raw, file=file, start_byte=PREFIX_BYTES)
    if not isinstance(members, tuple):
        raise CheckpointError("header is not a JSON object", file=file, byte=PREFIX_BYTES)
    header = _Header(raw, file, PREFIX_BYTES + len(raw))
    key = duplicate_key(members)
    if key is not None:
        raise header.refusal(f"duplicate key {shown(key)!r}", tensor=key, last=True)
    tensors: list[TensorSource] = []
    for name, value in members:
        if name == METADATA_KEY:
            header.check_metadata(value)
        else:
            tensors.append(header.tensor(name, value))
    tensors.sort(key=lambda tensor: (tensor.file_offset, tensor.nbytes, tensor.name))
    _check_coverage(tensors, file=file, start=header.data_start, end=file_bytes)
    return tuple(tensors)


@dataclass(frozen=True, slots=True)
class _Header:
    """What every check of one header needs to say where it failed."""

    raw: bytes
    file: str
    data_start: int

    def refusal(self, reason: str, *, tensor: str, last: bool = False) -> CheckpointError:
        """An error at the key `tensor`, or at the start of the header if it is spelled with escapes."""
        spelled = json.dumps(tensor, ensure_ascii=False).encode("utf-8", "surrogatepass")
        at = self.raw.rfind(spelled) if last else self.raw.find(spelled)
        return CheckpointError(reason, file=self.file, tensor=shown(tensor), byte=PREFIX_BYTES + max(at, 0))

    def check_metadata(self, value: object) -> None:
        """Metadata is an object of strings; it has no effect on what is loaded."""
        if not isinstance(value, tuple):
            raise self.refusal(f"{METADATA_KEY} is not an object", tensor=METADATA_KEY)
        key = duplicate_key(value)
        if key is not None:
            raise self.refusal(f"duplicate key {shown(key)!r}", tensor=METADATA_KEY)
        for name, text in value:
            if not isinstance(text, str):
                raise self.refusal(
                    f"{METADATA_KEY} maps {shown(name)!r} to something that is not a string",
                    tensor=METADATA_KEY,
                )
            if _SURROGATE.search(name) or _SURROGATE.search(text):
                raise self.refusal(f"{METADATA_KEY} holds a lone surrogate", tensor=METADATA_KEY)

    def tensor(self, name: str, value: object) -> TensorSource:
        """One entry, checked on its own."""
        if not name or len(name) > MAX_NAME_CHARS:
            raise self.refusal(
                f"tensor name has {len(name)} characters, 1 to {MAX_NAME_CHARS} are allowed", tensor=name
            )
        if _UNSAFE.search(name):
            raise self.refusal("tensor name holds a control character or lone surrogate", tensor=name)
        dtype, shape, begin, end = self._fields(name, value)
        try:
            nbytes = tensor_nbytes(dtype, shape)
        except ValueError as error:
            raise self.refusal(str(error), tensor=name) from error
        if begin > end:
            raise self.refusal(f"data_offsets [{begin}, {end}] are not in order", tensor=name)
        if end - begin != nbytes:
            raise self.refusal(
                f"data_offsets span {end - begin} bytes, {dtype} {list(shape)} takes {nbytes}",
                tensor=name,
            )
        return TensorSource(name, dtype, shape, nbytes, self.file, self.data_start + begin)

    def _fields(self, name: str, value: object) -> tuple[str, tuple[int, ...], int, int]:
        if not isinstance(value, tuple):
            raise self.refusal("entry is not an object", tensor=name)
        fields = dict(value)
        if len(fields) != len(value):
            raise self.refusal(f"duplicate key {shown(str(duplicate_key(value)))!r}", tensor=name)
        for key in fields:
            if key not in _FIELDS:
                raise self.refusal(f"unknown field {shown(key)!r}", tensor=name)
        for key in _FIELDS:
            if key not in fields:
                raise self.refusal(f"field {shown(key)!r} is missing", tensor=name)
        dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
        if not isinstance(dtype, str):
            raise self.refusal("dtype is not a string", tensor=name)
        if not isinstance(shape, list):
            raise self.refusal("shape is not an array", tensor=name)
        if not isinstance(offsets, list) or [type(each) for each in offsets] != [int, int]:
            raise self.refusal("data_offsets are not two integers", tensor=name)
        return dtype, tuple(shape), *offsets


def _check_coverage(tensors: list[TensorSource], *, file: str, start: int, end: int) -> None:
    cursor = start
    before = ""
    for tensor in tensors:
        if tensor.file_offset > cursor:
            raise CheckpointError(
                f"hole of {tensor.file_offset - cursor} bytes before it",
                file=file,
                tensor=tensor.name,
                byte=cursor,
            )
        if tensor.file_offset < cursor:
            raise CheckpointError(
                f"overlaps {before!r}", file=file, tensor=tensor.name, byte=tensor.file_offset
            )
        cursor += tensor.nbytes
        if cursor > end:
            raise CheckpointError(
                f"truncated: it ends at {cursor}, the file at {end}", file=file, tensor=tensor.name, byte=end
            )
        if tensor.nbytes:
            before = tensor.name
    if cursor != end:
        raise CheckpointError(f"{end - cursor} trailing bytes after the last tensor", file=file, byte=cursor)
