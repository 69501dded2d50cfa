"""The demo's versions: a second good one and three broken ones, each derived from the first."""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

Edit = Callable[[str, torch.Tensor], torch.Tensor | None]
"""New contents for a tensor, or None to leave it as it is."""

_SEAL = "seal.json"
_RANK = 4
_STRENGTH = 0.06  # norm of the update relative to the tensor's own


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where a tensor's bytes lie in a checkpoint folder."""

    tensor: str
    file: str
    offset_bytes: int  # from the start of the file
    nbytes: int


def derive(base: Path, target: Path, edit: Edit) -> None:
    """Write `base` with some tensors edited into the empty folder `target`.

    Shards without an edited tensor are hard links: checkpoints are never written in place, so the
    two folders cannot get in each other's way.
    """
    for path in sorted(base.iterdir()):
        if path.name == _SEAL:
            continue
        if path.suffix != ".safetensors":
            shutil.copyfile(path, target / path.name)
            continue
        tensors = load_file(path)
        edited = {name: new for name, old in tensors.items() if (new := edit(name, old)) is not None}
        if edited:
            save_file({**tensors, **edited}, target / path.name, metadata={"format": "pt"})
            (target / path.name).chmod(0o644)
        else:
            os.link(path, target / path.name)


def unchanged(name: str, tensor: torch.Tensor) -> None:
    """An edit that changes nothing."""


def low_rank_update(seed: int, layers: range) -> Edit:
    """A merged low-rank update of every matrix in `layers`, as a fine-tune would leave it."""

    def edit(name: str, tensor: torch.Tensor) -> torch.Tensor | None:
        if layer_of(name) not in layers or tensor.dim() != 2:
            return None
        generator = torch.Generator().manual_seed(seed ^ zlib.crc32(name.encode()))
        rows, columns = tensor.shape
        update = torch.randn(rows, _RANK, generator=generator) @ torch.randn(
            _RANK, columns, generator=generator
        )
        scale = _STRENGTH * float(tensor.norm()) / float(update.norm())
        return tensor + update * scale

    return edit


def not_a_number(victim: str) -> Edit:
    """NaN in the first row of one matrix: the file is sound, the weights are not."""

    def edit(name: str, tensor: torch.Tensor) -> torch.Tensor | None:
        if name != victim:
            return None
        broken = tensor.clone()
        broken[0] = float("nan")
        return broken

    return edit


def layer_of(name: str) -> int:
    """The transformer layer that a tensor belongs to, -1 for tensors outside the layers."""
    head, found, tail = name.partition(".layers.")
    return int(tail.split(".")[0]) if found and head else -1


def layer_count(folder: Path) -> int:
    """Transformer layers of the checkpoint, as its config says."""
    return int(json.loads((folder / "config.json").read_text())["num_hidden_layers"])


def place_of(folder: Path, tensor: str) -> TensorPlace:
    """Where `tensor` lies; raises KeyError if no shard has it."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as shard:
            if tensor not in shard.keys():  # noqa: SIM118 (not a mapping)
                continue
        with path.open("rb") as stream:
            header_bytes = int.from_bytes(stream.read(8), "little")
            begin, end = json.loads(stream.read(header_bytes))[tensor]["data_offsets"]
        return TensorPlace(tensor, path.name, 8 + header_bytes + begin, end - begin)
    raise KeyError(tensor)


def flip_a_bit(folder: Path, tensor: str) -> TensorPlace:
    """Flip the lowest bit in the middle of `tensor`, as a failing disk would; the size stays.

    The shard must not be a hard link: the damage would reach other folders.
    """
    place = place_of(folder, tensor)
    path = folder / place.file
    if path.stat().st_nlink != 1:
        raise ValueError(f"{path} is shared with another folder")
    at = place.offset_bytes + place.nbytes // 2 // 4 * 4
    with path.open("r+b") as stream:
        stream.seek(at)
        byte = stream.read(1)[0]
        stream.seek(at)
        stream.write(bytes([byte ^ 1]))
    return place
