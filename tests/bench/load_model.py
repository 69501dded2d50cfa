"""The model that loaders are measured with: a Llama's shapes, in shards, of bytes that can be told again.

A tensor's bytes are one random block, repeated, from a place of its own: no two tensors are equal (a
loader that knows digests would share them), and what every byte must be is known without the files.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from tests.bench.llama import llama_shapes

BLOCK_BYTES = 64 << 20
ITEM_BYTES = 2  # bfloat16
LAYERS = 32
WIDTH = 4096
VOCABULARY = 128_256
_FULL_BYTES = 16_060_522_496
"""Of Llama-3-8B, whose shape this is at its full width."""

_STEP_BYTES = 64 * 10_007
"""Between the places where tensors start in the block: odd in units of 64, so that none starts twice."""


@dataclass(frozen=True, slots=True)
class ModelTensor:
    """A tensor by name; `number` says which bytes it has."""

    name: str
    shape: tuple[int, ...]
    number: int

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * ITEM_BYTES

    @property
    def start_bytes(self) -> int:
        """Where in the block it starts."""
        return self.number * _STEP_BYTES % BLOCK_BYTES


@dataclass(frozen=True)
class Model:
    """A Llama of about `gb` GB: Llama-3-8B at 16, narrower below, always with all its layers."""

    gb: float
    shards: int = 4

    @cached_property
    def width(self) -> int:
        """The hidden size: bytes grow with its square, as the vocabulary shrinks with it."""
        return max(64, round(WIDTH * math.sqrt(self.gb * 1e9 / _FULL_BYTES) / 64) * 64)

    @cached_property
    def tensors(self) -> tuple[ModelTensor, ...]:
        """All tensors in the order of the files."""
        width = self.width
        words = VOCABULARY * width // WIDTH
        shapes = llama_shapes(layers=LAYERS, width=width, inner=width * 7 // 2, kv=width // 4, words=words)
        return tuple(ModelTensor(name, shape, n) for n, (name, shape) in enumerate(shapes.items()))

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @cached_property
    def files(self) -> dict[str, tuple[ModelTensor, ...]]:
        """The tensors of each shard; shards are about equal in bytes."""
        parts: list[list[ModelTensor]] = [[] for _ in range(self.shards)]
        done = 0
        for tensor in self.tensors:
            middle = done + tensor.nbytes // 2
            parts[min(self.shards - 1, middle * self.shards // self.nbytes)].append(tensor)
            done += tensor.nbytes
        return {
            f"model-{number:05d}-of-{self.shards:05d}.safetensors": tuple(part)
            for number, part in enumerate(parts, start=1)
        }

    def paths(self, folder: Path) -> list[Path]:
        """The shards in `folder`."""
        return [folder / file for file in self.files]


@cache
def doubled_block() -> npt.NDArray[np.uint8]:
    """The random block, twice: from any place in the first, a whole block lies in one piece."""
    block = np.random.default_rng(20).integers(0, 256, BLOCK_BYTES, dtype=np.uint8)
    return np.concatenate([block, block])


def pieces(tensor: ModelTensor) -> Iterator[npt.NDArray[np.uint8]]:
    """What the tensor's bytes are, in pieces of a block."""
    whole = doubled_block()[tensor.start_bytes :][:BLOCK_BYTES]
    for at in range(0, tensor.nbytes, BLOCK_BYTES):
        yield whole[: tensor.nbytes - at]


def write_model(folder: Path, model: Model) -> None:
    """Make the checkpoint in the new folder `folder`: shards, which are down on the disk then, index and
    config; unsealed."""
    folder.mkdir(parents=True)
    doubled_block()  # once, before the threads ask for it
    with ThreadPoolExecutor(model.shards) as pool:
        for _ in pool.map(lambda file: _write_shard(folder / file, model.files[file]), model.files):
            pass
    index = {
        "metadata": {"total_size": model.nbytes},
        "weight_map": {tensor.name: file for file, part in model.files.items() for tensor in part},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {"model_type": "llama", "hidden_size": model.width, "num_hidden_layers": LAYERS}
    (folder / "config.json").write_text(json.dumps(config))


def _write_shard(path: Path, tensors: Sequence[ModelTensor]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        header[tensor.name] = {
            "dtype": "BF16",
            "shape": tensor.shape,
            "data_offsets": [end, end + tensor.nbytes],
        }
        end += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            for piece in pieces(tensor):
                file.write(piece.data)
        sync(file)


def copy_model(source: Path, target: Path) -> None:
    """Copy a checkpoint into the new folder `target`, down to the disk."""
    target.mkdir(parents=True)

    def copy(path: Path) -> None:
        with path.open("rb") as read, (target / path.name).open("wb") as write:
            shutil.copyfileobj(read, write, 16 << 20)
            sync(write)

    with ThreadPoolExecutor() as pool:
        for _ in pool.map(copy, sorted(source.iterdir())):
            pass


def sync(file: BinaryIO) -> None:
    """Bring what was written to the disk."""
    file.flush()
    os.fsync(file.fileno())
