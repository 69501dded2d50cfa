"""The checks that every backend makes before it passes a range or a copy on."""

from __future__ import annotations

from shared.errors import InvariantError
from shared.layout import SlabEntry


def check_range(entry: SlabEntry, offset_bytes: int, nbytes: int) -> None:
    """Raise InvariantError where a range is not inside the slab."""
    if offset_bytes < 0 or nbytes < 0 or offset_bytes + nbytes > entry.nbytes:
        raise InvariantError(
            f"bytes {offset_bytes} + {nbytes} are outside slab {entry.slab_id} of {entry.nbytes} bytes"
        )


def check_same_size(target: SlabEntry, source: SlabEntry) -> None:
    """Raise InvariantError unless one slab can be a copy of the other."""
    if target.nbytes != source.nbytes:
        raise InvariantError(
            f"slab {target.slab_id} of {target.nbytes} bytes cannot be a copy of {source.slab_id} of "
            f"{source.nbytes}"
        )
