"""The weight files of the folder that is sealed."""

from __future__ import annotations

from shared.digest import LEAF_BYTES
from tests.unit.checkpoint_files import Tensor, content

BIG = content(3, 5 * LEAF_BYTES + 11)
SHARDS: dict[str, dict[str, Tensor]] = {
    "a.safetensors": {"big": ("U8", [len(BIG)], BIG), "scalar": ("F32", [], b"abcd")},
    "b.safetensors": {"empty": ("I64", [0], b""), "w": ("U8", [3], b"www"), "stray": ("U8", [2], b"??")},
}
PLACED = {"big": "a.safetensors", "scalar": "a.safetensors", "empty": "b.safetensors", "w": "b.safetensors"}
