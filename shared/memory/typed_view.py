"""Tensors over raw bytes, by safetensors dtype.  Importing this module imports torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch

from shared.errors import InvalidRequest, InvariantError
from shared.memory.dtypes import DTYPE_BITS

_TORCH_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "BOOL": "bool",
        "F4": "float4_e2m1fn_x2",
        "U8": "uint8",
        "I8": "int8",
        "F8_E4M3": "float8_e4m3fn",
        "F8_E5M2": "float8_e5m2",
        "F8_E4M3FNUZ": "float8_e4m3fnuz",
        "F8_E5M2FNUZ": "float8_e5m2fnuz",
        "F8_E8M0": "float8_e8m0fnu",
        "U16": "uint16",
        "I16": "int16",
        "F16": "float16",
        "BF16": "bfloat16",
        "U32": "uint32",
        "I32": "int32",
        "F32": "float32",
        "U64": "uint64",
        "I64": "int64",
        "F64": "float64",
        "C64": "complex64",
    }
)
"""By name and not by object: an older torch lacks some of them, and only their users need them."""


def torch_dtype(dtype: str) -> torch.dtype:
    """torch's counterpart of a safetensors dtype; raises InvalidRequest where it has none."""
    if dtype not in DTYPE_BITS:
        raise InvalidRequest(f"dtype {dtype!r} is not known", dtype=dtype)
    found = getattr(torch, _TORCH_NAMES.get(dtype, ""), None)
    if not isinstance(found, torch.dtype):
        raise InvalidRequest(f"torch {torch.__version__} has no dtype for {dtype}", dtype=dtype)
    return found


def typed_view(raw: torch.Tensor, dtype: str, shape: Sequence[int]) -> torch.Tensor:
    """The same bytes as a contiguous tensor; never a copy.

    `raw` is uint8[nbytes] and holds exactly the elements; `shape` counts elements of `dtype`.  Two
    F4 elements share a byte, which torch sees as one element: its last dimension is halved.
    Raises InvariantError where the address does not suit the dtype.
    """
    target = torch_dtype(dtype)
    sizes = tuple(shape)
    if dtype == "F4":
        if not sizes or sizes[-1] % 2:
            raise InvalidRequest(f"torch packs F4 in pairs along the last dimension of {sizes}", dtype=dtype)
        sizes = (*sizes[:-1], sizes[-1] // 2)
    if raw.data_ptr() % target.itemsize:
        raise InvariantError(f"address {raw.data_ptr():#x} is not aligned for {dtype}")
    return raw.view(target).view(sizes)
