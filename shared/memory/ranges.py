"""The check that every backend makes before it passes a range on."""

from __future__ import annotations

from shared.errors import InvariantError
from shared.layout import SlabEntry


def check_range(entry: SlabEntry, offset_bytes: int, nbytes: int) -> None:
    """Raise InvariantError where a range is not inside the slab."""
    if offset_bytes < 0 or nbytes < 0 or offset_bytes + nbytes > entry.nbytes:
        raise InvariantError(
            f"bytes {offset_bytes} + {nbytes} are outside slab {entry.slab_id} of {entry.nbytes} bytes"
        )
