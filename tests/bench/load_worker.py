"""One step of the benchmark in a process of its own: what it allocates, breaks or hangs stays here.

    python -m tests.bench.load_worker JOB RESULT

Both are JSON files; the result is written anew after every round, so that what was measured before a crash
is not lost.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from tests.bench.load_cache import Residency, empty, fill
from tests.bench.load_changeover import CHANGEOVER
from tests.bench.load_limits import Limit, best_direct_shape, copy_limit, direct_limit, pread_limits
from tests.bench.load_loaders import PEERS, Loader, Resident, Setting, torch_device
from tests.bench.load_model import BLOCK_BYTES, Model, doubled_block
from tests.bench.load_report import CACHED, COLD, OURS

_SAMPLE_BYTES = 512 << 20
"""What is read to find the best shape of direct reads."""


@dataclass(frozen=True, slots=True)
class Job:
    """What the parent asks for."""

    place: str
    what: str
    device: str
    gb: float
    folder: str
    small_gb: float
    small_folder: str  # a small model, to warm up with where the large one is to be read once
    repeats: int
    cores: int
    own_format_bytes: int


@dataclass(slots=True)
class Series:
    """The loads of one setting."""

    setting: Setting
    verification: str
    bytes: int = 0
    first_s: float = 0.0  # the load that warmed up
    seconds: list[float] = field(default_factory=list)
    parts: list[dict[str, float]] = field(default_factory=list)
    cached: list[Residency] = field(default_factory=list)  # when a load from the disk began
    is_compared: bool = False
    is_right: bool = False
    wrong: str = "not compared"
    error: str = ""


# --- limits --------------------------------------------------------------------------------------


def measure_limits(job: Job) -> Iterator[dict[str, Any]]:
    """The limits of the place, one by one."""
    paths = Model(job.gb).paths(Path(job.folder))
    if job.place == COLD:
        empty(paths)
        yield _noted(direct_limit(paths, best_direct_shape(paths, job.cores, _SAMPLE_BYTES)), job)
        return
    if job.place == CACHED:
        fill(paths)
    yield _noted(copy_limit(job.device, job.cores, 3 * job.repeats), job)
    for limit in pread_limits(paths, job.device, job.cores, job.repeats):
        yield _noted(limit, job)


def _noted(limit: Limit, job: Job) -> dict[str, Any]:
    return {
        "place": job.place,
        "what": limit.what,
        "shape": limit.shape,
        "bytes": limit.nbytes,
        "seconds": limit.seconds,
    }


# --- loads ---------------------------------------------------------------------------------------


def measure_loads(job: Job, loader: Loader) -> Iterator[list[Series]]:
    """Rounds over all settings in turn, so that what drifts drifts for all; the series after each round.

    A round that does not count comes first.  Where the disk is to be read once, it loads the small model.
    """
    folder, model = Path(job.folder), Model(job.gb)
    small_folder, small = Path(job.small_folder), Model(job.small_gb)
    settings = list(loader.settings(job.place, job.device, job.cores))
    if loader.prepare is not None:
        for there, what in ((folder, model), (small_folder, small)):
            if not all(path.exists() for path in loader.files(there)):
                loader.prepare(there, what, job.own_format_bytes)
    torch.zeros(1, device=torch_device(job.device))  # the GPU's context
    series = [Series(setting, loader.verification(setting).value) for setting in settings]
    for each in series:
        if job.place == COLD:
            _load_once(each, loader, small_folder, small, job, is_counted=False, is_compared=False)
        else:
            _load_once(each, loader, folder, model, job, is_counted=False, is_compared=True)
    yield series
    for left in reversed(range(job.repeats)):
        for each in series:
            if not each.error:
                _load_once(each, loader, folder, model, job, is_counted=True, is_compared=left == 0)
        yield series


def _load_once(
    series: Series,
    loader: Loader,
    folder: Path,
    model: Model,
    job: Job,
    *,
    is_counted: bool,
    is_compared: bool,
) -> None:
    files = loader.files(folder)
    if is_counted and job.place == COLD:
        series.cached.append(empty(files))
    elif job.place == CACHED:
        fill(files)
    try:
        began = time.perf_counter()
        resident = loader.load(folder, job.device, series.setting)
        if job.device == "cuda":
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
    if job.device == "cuda":
        torch.cuda.empty_cache()


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


def versions(loader: Loader) -> dict[str, str]:
    """Of the loader's package, where it is installed as one."""
    try:
        return {loader.package: version(loader.package)}
    except PackageNotFoundError:
        return {}


def main() -> None:
    """Carry out the job of the first argument, write to the second."""
    job = Job(**json.loads(Path(sys.argv[1]).read_text()))
    result = Path(sys.argv[2])

    def write(**content: object) -> None:
        fresh = result.with_suffix(".new")
        fresh.write_text(json.dumps(content))
        fresh.rename(result)

    if job.what == "limits":
        found = []
        for limit in measure_limits(job):
            found.append(limit)
            write(limits=found)
        return
    loader = CHANGEOVER if job.what == OURS else PEERS[job.what]
    environment = dict(loader.environment(job.place))
    os.environ.update(environment)  # before it is imported
    for series in measure_loads(job, loader):
        loads = [
            {
                **asdict(each),
                "setting": {**each.setting, **environment},
                "loader": job.what,
                "place": job.place,
            }
            for each in series
        ]
        write(loads=loads, versions=versions(loader))


if __name__ == "__main__":
    main()
