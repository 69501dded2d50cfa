"""The RMS norm as a Triton kernel.

This module imports Triton: import it only where tensors lie on a CUDA device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def _normalise(  # type: ignore[no-untyped-def]
    rows,  # [count, WIDTH], contiguous
    weight,  # [WIDTH]
    out,  # as `rows`
    epsilon,
    WIDTH: tl.constexpr,  # noqa: N803
    PADDED: tl.constexpr,  # noqa: N803
):
    start = tl.program_id(0).to(tl.int64) * WIDTH
    at = tl.arange(0, PADDED)
    is_there = at < WIDTH
    row = tl.load(rows + start + at, mask=is_there, other=0.0).to(tl.float32)
    row = row * tl.rsqrt(tl.sum(row * row, 0) / WIDTH + epsilon)
    # Rounded before the weight is applied, as the model code does.
    scaled = row.to(out.dtype.element_ty) * tl.load(weight + at, mask=is_there, other=0.0)
    tl.store(out + start + at, scaled, mask=is_there)


def normalise(rows: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Contiguous `rows` [..., width] over their root mean square, times `weight` [width].  Asynchronous."""
    width = weight.shape[0]
    out = torch.empty_like(rows)
    _normalise[(rows.numel() // width,)](
        rows,
        weight,
        out,
        epsilon,
        WIDTH=width,
        PADDED=triton.next_power_of_2(width),
        num_warps=4 if width <= 2048 else 8,
    )
    return out
