"""Small copies between host and device that do not stop the device's other work.

On the CPU both directions are plain tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def send(values: Sequence[int] | Sequence[float], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """`values` as a tensor on `device`, in the order of the current stream.  Does not wait."""
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    # From pageable memory the copy would wait for everything before it on the stream.
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


def fetch(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """`tensors`, all of one device, on the host.  Waits for the current stream, once."""
    device = tensors[0].device
    if device.type != "cuda":
        return list(tensors)
    hosts = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
    for host, tensor in zip(hosts, tensors, strict=True):
        host.copy_(tensor, non_blocking=True)
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record(torch.cuda.current_stream(device))
    done.synchronize()  # without the GIL
    return hosts
