"""Builds safetensors files byte by byte, so that tests can break any rule, and small folders."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

Tensor = tuple[str, Sequence[int], bytes]
"""dtype, shape, bytes."""


def pack(header: str | bytes, data: bytes = b"", *, length: int | None = None) -> bytes:
    """A file from the text of its header; `length` overrides the true length."""
    raw = header.encode() if isinstance(header, str) else header
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def safetensors(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """A well-formed file with the tensors in the order given."""
    header: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
    data = b""
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [len(data), len(data) + len(content)],
        }
        data += content
    return pack(json.dumps(header), data)


def ranges(first: tuple[int, int], second: tuple[int, int], data_bytes: int) -> bytes:
    """A file of the U8 tensors `one` and `two` that says of each that it is where the range says."""
    header = {
        name: {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]}
        for name, (begin, end) in {"one": first, "two": second}.items()
    }
    return pack(json.dumps(header), bytes(data_bytes))


def content(seed: int, nbytes: int) -> bytes:
    """Bytes that differ by seed and do not repeat within a leaf."""
    return b"".join(struct.pack("<II", seed, index) for index in range(-(-nbytes // 8)))[:nbytes]


CONFIG = {"model_type": "tiny", "hidden_size": 4}


def write_single(folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, object] = CONFIG) -> Path:
    """A folder with model.safetensors and config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes(safetensors(tensors))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_sharded(
    folder: Path,
    shards: Mapping[str, Mapping[str, Tensor]],
    weight_map: Mapping[str, str] | None = None,
    config: Mapping[str, object] = CONFIG,
) -> Path:
    """A folder with shards and an index; the index follows from the shards unless it is given."""
    folder.mkdir(parents=True, exist_ok=True)
    for file, tensors in shards.items():
        (folder / file).write_bytes(safetensors(tensors))
    if weight_map is None:
        weight_map = {name: file for file, tensors in shards.items() for name in tensors}
    index = {"metadata": {"total_size": 0}, "weight_map": dict(weight_map)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def damage(path: Path, byte: int) -> None:
    """Flip one bit and leave size and times as they were."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(byte)
        value = file.read(1)[0]
        file.seek(byte)
        file.write(bytes([value ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
