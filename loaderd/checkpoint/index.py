"""`model.safetensors.index.json`: which tensor lies in which shard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from loaderd.checkpoint.header import TensorSource
from loaderd.checkpoint.names import INDEX_FILE, is_shard_name, shown
from loaderd.checkpoint.strict_json import parse_object
from shared.errors import CheckpointError
from shared.tensor_size import MAX_TENSORS

INDEX_LIMIT_BYTES = 100_000_000
MAX_SHARDS = 4096


def parse_index(raw: bytes) -> Mapping[str, str]:
    """Tensor name → shard file name; raises CheckpointError."""
    weight_map = parse_object(raw, file=INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError("'weight_map' is missing, empty or not an object", file=INDEX_FILE)
    if len(weight_map) > MAX_TENSORS:
        raise CheckpointError(
            f"lists {len(weight_map)} tensors, at most {MAX_TENSORS} are allowed", file=INDEX_FILE
        )
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str) or not is_shard_name(shard):
            raise CheckpointError(
                f"names {shown(str(shard))!r}, which is not the plain name of a .safetensors file",
                file=INDEX_FILE,
                tensor=shown(tensor),
            )
    shards = len(set(weight_map.values()))
    if shards > MAX_SHARDS:
        raise CheckpointError(f"names {shards} shards, at most {MAX_SHARDS} are allowed", file=INDEX_FILE)
    return weight_map


def select_tensors(
    weight_map: Mapping[str, str], shards: Mapping[str, Sequence[TensorSource]]
) -> tuple[tuple[TensorSource, ...], tuple[str, ...]]:
    """The tensors that the index places, and a line for each that a shard holds beside them.

    The index is an allow-list per shard.  Raises CheckpointError if a shard lacks a tensor that the
    index places in it.
    """
    selected: list[TensorSource] = []
    ignored: list[str] = []
    for file, tensors in shards.items():
        for tensor in tensors:
            owner = weight_map.get(tensor.name)
            if owner == file:
                selected.append(tensor)
            elif owner is None:
                ignored.append(f"{file}: tensor {tensor.name!r} is not in the index")
            else:
                ignored.append(f"{file}: tensor {tensor.name!r} is placed in {owner} by the index")
    if len(selected) != len(weight_map):
        found = {tensor.name for tensor in selected}
        missing = min(name for name in weight_map if name not in found)
        raise CheckpointError(
            f"the index places {shown(missing)!r} here, the file does not hold it",
            file=weight_map[missing],
            tensor=shown(missing),
        )
    return tuple(selected), tuple(ignored)
