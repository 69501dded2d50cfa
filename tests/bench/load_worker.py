"""One step of the benchmark in a process of its own: what it allocates, breaks or hangs stays here.

    python -m tests.bench.load_worker JOB RESULT

Both are JSON files; the result is written anew after every round, so that what was measured before a crash
is not lost.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from tests.bench.load_cache import empty, fill
from tests.bench.load_changeover import CHANGEOVER
from tests.bench.load_limits import Limit, copy_limit, direct_limit, direct_shapes, pread_limits
from tests.bench.load_loaders import PEERS, Loader, torch_device
from tests.bench.load_model import Model
from tests.bench.load_report import CACHED, COLD, OURS
from tests.bench.load_schedule import LIMITS, cold_loads, samples
from tests.bench.load_series import Series, load_once


@dataclass(frozen=True, slots=True)
class Job:
    """What the parent asks for."""

    what: str
    device: str
    places: Sequence[str]
    folders: Mapping[str, Sequence[str]]  # of each place: one, on the cold disk sets that are read in turn
    gb: float
    cold_gb: float  # of each set
    small_folder: str  # a small model, to warm up with where the large one is to be read cold
    small_gb: float
    repeats: int
    cold_rounds: int
    first_set: int  # where on the cold disk the rotation goes on
    shape: Mapping[str, int]  # of direct reads there
    cores: int
    own_format_bytes: int

    def model(self, place: str) -> Model:
        """What lies in each folder of the place."""
        return Model(self.cold_gb if place == COLD else self.gb)


Entry = dict[str, Any]


# --- limits --------------------------------------------------------------------------------------


def measure_limits(job: Job, place: str) -> Iterator[Entry]:
    """The limits of the place, one by one.  The cold disk's is measured beside each load."""
    paths = _paths(job, place)
    if place == CACHED:
        fill(paths)
    yield _limit(copy_limit(job.device, job.cores, 3 * job.repeats), place)
    for limit in pread_limits(paths, job.device, job.cores, job.repeats):
        yield _limit(limit, place)


def try_direct_shapes(job: Job) -> list[Entry]:
    """What some shapes of direct reads give on the cold disk."""
    paths = _paths(job, COLD)
    empty(paths)
    return [_limit(limit, COLD) for limit in direct_shapes(paths, job.cores)]


def _paths(job: Job, place: str) -> list[Path]:
    return [path for folder in job.folders[place] for path in job.model(place).paths(Path(folder))]


def _limit(limit: Limit, place: str) -> Entry:
    return {
        "place": place,
        "what": limit.what,
        "shape": limit.shape,
        "bytes": limit.nbytes,
        "seconds": list(limit.seconds),
    }


# --- loads ---------------------------------------------------------------------------------------


def measure_loads(job: Job, place: str, loader: Loader) -> Iterator[list[Series]]:
    """Rounds over all settings in turn, so that what drifts drifts for all; the series after each round.

    A round that does not count comes first."""
    (folder,) = map(Path, job.folders[place])
    model = job.model(place)
    files = loader.files(folder)
    series = _series(job, place, loader)

    def load(each: Series, *, is_counted: bool, is_compared: bool) -> None:
        if place == CACHED:
            fill(files)
        load_once(each, loader, folder, model, job.device, is_counted=is_counted, is_compared=is_compared)

    _prepare(job, loader, folder, model)
    for each in series:
        load(each, is_counted=False, is_compared=True)
        yield series
    counts = [samples(job.repeats, each.first_s) for each in series]
    for number in range(1, max(counts) + 1):
        for each, count in zip(series, counts, strict=True):
            if number <= count and not each.error:
                load(each, is_counted=True, is_compared=number == count)
        yield series


def measure_cold(job: Job, loader: Loader) -> Iterator[tuple[list[Series], Entry]]:
    """Loads from the cold disk between direct reads (`cold_loads`); the series and the direct reads, after
    each of these.  To warm up, each setting loads the small model."""
    folders, model = [Path(folder) for folder in job.folders[COLD]], job.model(COLD)
    small_folder, small = Path(job.small_folder), Model(job.small_gb)
    series = _series(job, COLD, loader)
    loads = cold_loads(len(series), job.cold_rounds, job.first_set)
    _prepare(job, loader, small_folder, small)
    for files in sorted({load.files for load in loads}):
        _prepare(job, loader, folders[files], model)
    for each in series:
        load_once(each, loader, small_folder, small, job.device, is_counted=False, is_compared=False)

    def read_directly(files: int) -> Limit:
        paths = model.paths(folders[files])
        empty(paths)
        return direct_limit(paths, job.shape)

    before = read_directly(job.first_set)
    direct = _limit(before, COLD) | {"sets": [job.first_set]}
    yield series, direct
    for load in loads:
        each, folder = series[load.setting], folders[load.files]
        if each.error:
            continue
        cached = empty(loader.files(folder))
        load_once(each, loader, folder, model, job.device, is_counted=True, is_compared=load.is_last)
        after = read_directly(load.direct_files)
        direct["seconds"] += after.seconds
        direct["sets"].append(load.direct_files)
        if not each.error:
            each.cached.append(cached)
            each.sets.append(load.files)
            each.beside.append((before.gb_s, after.gb_s))
        before = after
        yield series, direct


def _series(job: Job, place: str, loader: Loader) -> list[Series]:
    settings = loader.settings(place, job.device, job.cores)
    return [Series(setting, loader.verification(setting).value) for setting in settings]


def _prepare(job: Job, loader: Loader, folder: Path, model: Model) -> None:
    """The loader's own format beside the files, where it has one."""
    if loader.prepare is not None and not all(path.exists() for path in loader.files(folder)):
        loader.prepare(folder, model, job.own_format_bytes)


def versions(loader: Loader) -> dict[str, str]:
    """Of the loader's package, where it is installed as one."""
    try:
        return {loader.package: version(loader.package)}
    except PackageNotFoundError:
        return {}


# --- the process ---------------------------------------------------------------------------------


class Result:
    """What the parent finds, whenever it looks: all that was measured, and the places that are done."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._content: dict[str, Any] = {"done": []}

    def write(self, place: str, **lists: Sequence[Entry]) -> None:
        """These lists, with what they had of other places."""
        for name, entries in lists.items():
            others = [entry for entry in self._content.get(name, []) if entry["place"] != place]
            self._content[name] = [*others, *entries]
        self._save()

    def finish(self, place: str) -> None:
        """Nothing more is measured there."""
        self._content["done"].append(place)
        self._save()

    def note(self, **values: object) -> None:
        """What holds for all places."""
        self._content |= values
        self._save()

    def _save(self) -> None:
        fresh = self._path.with_suffix(".new")
        fresh.write_text(json.dumps(self._content))
        fresh.rename(self._path)


def main() -> None:
    """Carry out the job of the first argument, write to the second."""
    job = Job(**json.loads(Path(sys.argv[1]).read_text()))
    result = Result(Path(sys.argv[2]))
    if job.what == LIMITS:
        for place in job.places:
            if place == COLD:
                result.write(COLD, tried=try_direct_shapes(job))
            else:
                found = []
                for limit in measure_limits(job, place):
                    found.append(limit)
                    result.write(place, limits=found)
            result.finish(place)
        return
    loader = CHANGEOVER if job.what == OURS else PEERS[job.what]
    environment = dict(loader.environment(job.places[0]))  # the same at all of them
    os.environ.update(environment)  # before it is imported
    torch.zeros(1, device=torch_device(job.device))  # the GPU's context

    def entries(place: str, series: Sequence[Series]) -> list[Entry]:
        return [
            {**asdict(each), "setting": {**each.setting, **environment}, "loader": job.what, "place": place}
            for each in series
        ]

    for place in job.places:
        if place == COLD:
            for series, direct in measure_cold(job, loader):
                result.write(COLD, loads=entries(COLD, series), limits=[direct])
        else:
            for series in measure_loads(job, place, loader):
                result.write(place, loads=entries(place, series))
        result.note(versions=versions(loader))
        result.finish(place)


if __name__ == "__main__":
    main()
