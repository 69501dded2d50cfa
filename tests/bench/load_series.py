"""The loads of one setting of a loader: timed one by one, and their bytes compared."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tests.bench.load_cache import Residency
from tests.bench.load_loaders import Loader, Resident, Setting
from tests.bench.load_model import BLOCK_BYTES, Model, doubled_block
from tests.bench.load_report import NOT_COMPARED

_REST_S = 0.05
"""After memory was freed.  The driver clears it with the engine that copies to the GPU, which halves the
speed of a load that begins meanwhile (16 GB take 20 ms); no loader measures its own freeing."""


@dataclass(slots=True)
class Series:
    """The loads of one setting at one place."""

    setting: Setting
    verification: str
    bytes: int = 0
    first_s: float = 0.0  # the load that warmed up
    seconds: list[float] = field(default_factory=list)
    parts: list[dict[str, float]] = field(default_factory=list)
    cached: list[Residency] = field(default_factory=list)  # when a load from the disk began
    beside: list[tuple[float, float]] = field(default_factory=list)  # GB/s read directly before and after
    sets: list[int] = field(default_factory=list)  # the files that each load from the disk read
    is_compared: bool = False
    is_right: bool = False
    wrong: str = NOT_COMPARED
    error: str = ""


def load_once(
    series: Series,
    loader: Loader,
    folder: Path,
    model: Model,
    device: str,
    *,
    is_counted: bool,
    is_compared: bool,
) -> None:
    """Load `folder`, which holds `model`, free it again and note what came of it, an error too."""
    try:
        began = time.perf_counter()
        resident = loader.load(folder, device, series.setting)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began
    except Exception as error:  # noqa: BLE001 - it is another's code: whatever it raises is its result
        series.error = f"{type(error).__name__}: {error}"[:500]
        return
    series.bytes = sum(tensor.nbytes for tensor in resident.tensors.values())
    if is_counted:
        series.seconds.append(seconds)
        series.parts.append(dict(resident.parts))
    else:
        series.first_s = seconds
    if is_compared and (series.is_right or not series.is_compared):  # once wrong, wrong it stays
        series.wrong = difference(resident, model, is_part=loader.prepare is not None)
        series.is_right, series.is_compared = not series.wrong, True
    resident.close()
    del resident
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        time.sleep(_REST_S)


def difference(resident: Resident, model: Model, *, is_part: bool) -> str:
    """How the tensors differ from what they must be, every byte compared; empty if they do not."""
    expected = {tensor.name: tensor for tensor in model.tensors}
    for name in sorted(expected.keys() ^ resident.tensors.keys()):
        if name not in expected:
            return f"{name} is not in the model"
        if not is_part:
            return f"{name} is missing"
    block: torch.Tensor | None = None
    for name, tensor in resident.tensors.items():
        if tensor.dtype != torch.bfloat16 or tuple(tensor.shape) != expected[name].shape:
            return f"{name} is {tensor.dtype} {tuple(tensor.shape)}"
        if block is None:
            block = torch.from_numpy(doubled_block()).to(tensor.device)
        flat = tensor.contiguous().view(torch.uint8).reshape(-1)
        whole = block[expected[name].start_bytes :][:BLOCK_BYTES]
        for at in range(0, flat.numel(), BLOCK_BYTES):
            piece = flat[at : at + BLOCK_BYTES]
            if not torch.equal(piece, whole[: piece.numel()]):
                return f"{name} differs in its bytes from {at} on"
    return ""
