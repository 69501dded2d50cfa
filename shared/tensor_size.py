"""How many bytes a tensor of a dtype and shape takes, within bounds that any table must keep."""

from __future__ import annotations

from collections.abc import Sequence

from shared.memory.dtypes import DTYPE_BITS

_SHOWN_CHARS = 40
_SHAPE_CHARS = 400

MAX_RANK = 64
"""torch's own limit."""

MAX_TENSOR_BYTES = 1 << 48
"""More than any host holds; keeps products of dimensions far from 64-bit overflow."""

MAX_NAME_CHARS = 1024
"""Longest tensor name that a header, a seal or a layout table may carry."""

MAX_TENSORS = 500_000
"""Most tensors that a header, a seal or a layout table may list."""


def tensor_nbytes(dtype: str, shape: Sequence[object]) -> int:
    """Bytes of a packed tensor; raises ValueError that says what is wrong with `dtype` or `shape`.

    Dimensions of zero count as one towards the limit, so that `(0, 2**62)` is refused as well.
    """
    bits = DTYPE_BITS.get(dtype)
    if bits is None:
        raise ValueError(f"dtype {dtype[:_SHOWN_CHARS]!r} is not known")
    if len(shape) > MAX_RANK:
        raise ValueError(f"shape has {len(shape)} dimensions, at most {MAX_RANK} are allowed")
    elements = 1
    extent = 1
    for dimension in shape:
        if type(dimension) is not int or dimension < 0:
            raise ValueError(f"dimension {repr(dimension)[:_SHOWN_CHARS]} is not a non-negative integer")
        elements *= dimension
        extent *= dimension or 1
        if extent * bits > MAX_TENSOR_BYTES * 8:
            raise ValueError(f"shape {str(list(shape))[:_SHAPE_CHARS]} exceeds {MAX_TENSOR_BYTES} bytes")
    nbytes, rest = divmod(elements * bits, 8)
    if rest:
        raise ValueError(f"{elements} elements of {bits} bits do not fill whole bytes")
    return nbytes
