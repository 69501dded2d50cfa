"""Measure loading from storage to the memory that serves: changeover beside other loaders and the limits.

    python -m tests.bench.load run [--device cuda|host] [--gb N] [--budget-s N] [--out FILE] …
    python -m tests.bench.load plot FILE…       runs on one kind of machine as one table and one SVG

All in one run, from the same files: at each place (tmpfs, page cache, cold disk) what the machine can do,
then changeover verified and unverified, then the other loaders that are installed.  Each loader runs in a
process of its own with a limit of time, and its bytes are compared with what they must be.  On the cold disk
every load is between two direct reads, as the disk's rate drifts.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from loaderd.seal.create import seal_directory
from tests.bench.load_cache import Residency, is_proven_cold, residency
from tests.bench.load_loaders import PEERS
from tests.bench.load_model import Model, copy_model, write_model
from tests.bench.load_report import CACHED, COLD, OURS, PLACES, TMPFS, best_direct_shape, join, text
from tests.bench.load_schedule import COLD_SETS, Step, schedule
from tests.bench.load_worker import Job

WORKER = (sys.executable, "-m", "tests.bench.load_worker")

_SILENCE_S = 90
"""No process may be silent for longer: it writes its result after every load."""

_LOOK_S = 0.5
"""How often its result is looked for."""

_LEAST_S = 15
"""With less left, no step is begun."""

_SMALL_GB = 0.25
"""Of the model to warm up with: enough for every thread of a loader to take its buffers."""


class Run:
    """One run: its folders, its time and its report, which is written after every step."""

    def __init__(self, options: argparse.Namespace, tmpfs: Path, disk: Path) -> None:
        self._options = options
        self._deadline = time.monotonic() + options.budget_s
        self._models = {place: Model(options.gb) for place in (TMPFS, CACHED)}
        self._models[COLD] = Model(options.cold_gb)
        self._cores = len(os.sched_getaffinity(0))
        self._folders = {
            TMPFS: [tmpfs / "model"],
            CACHED: [disk / "model"],
            COLD: [disk / f"cold-{number}" for number in range(COLD_SETS)],
        }
        self._small = tmpfs / "small"
        self._filled: list[
            Residency
        ] = []  # what the kernel said was cached of each set just after it was written
        self._next_set = 0  # of those on the cold disk: each run of reads goes on where the last one ended
        self.report: dict[str, Any] = {
            "date": datetime.now(UTC).strftime("%Y-%m-%d"),
            "command": shlex.join(["python", "-m", "tests.bench.load", *sys.argv[1:]]),
            "device": options.device,
            "machine": machine(options.device),
            "model": _described(self._models[TMPFS]),
            "cold_model": _described(self._models[COLD]),
            "versions": installed("torch", "numpy"),
            "limits": [],
            "tried": [],
            "loads": [],
            "failures": [],
            "skipped": [],
            "took_s": {},
        }

    def make(self, places: list[str]) -> None:
        """The models: a small one, the large one where it is needed, and the sets of files to read cold.  Of
        each size one is made, the others are copies."""
        began = time.monotonic()
        self._make(self._small, Model(_SMALL_GB))
        made: dict[float, Path] = {}
        for place in places:
            model = self._models[place]
            for folder in self._folders[place]:
                _check_room(folder.parent, model.nbytes)
                if model.gb in made:
                    copy_model(made[model.gb], folder)
                else:
                    made[model.gb] = folder
                    self._make(folder, model)
                if place == COLD:
                    self._filled.append(residency(model.paths(folder)))
        self._took("making the files", began)

    def _make(self, folder: Path, model: Model) -> None:
        write_model(folder, model)
        seal_directory(folder, jobs=min(self._cores, model.shards))

    def take(self, step: Step) -> None:
        """Measure a step and note what comes of it.  Where it fails at one place, a new process goes on with
        the next."""
        left_s = self._deadline - time.monotonic()
        if left_s < _LEAST_S:
            self._note("skipped", step, "no time left")
            return
        if not step.is_limits and step.what != OURS and self.report["device"] not in PEERS[step.what].devices:
            self._note("skipped", step, f"does not load to {self.report['device']}")
            return
        if COLD in step.places and not step.is_limits and best_direct_shape(self.report) is None:
            self._note("skipped", Step(step.what, (COLD,)), "no direct reads to compare with")
            step = Step(step.what, tuple(place for place in step.places if place != COLD))
        if not step.places:
            return
        began = time.monotonic()
        result, reason = self._run(step, left_s)
        self._took(f"{step.what}: {', '.join(step.places)}", began)
        self.report["versions"] |= result.get("versions", {})
        for kind in ("limits", "tried"):
            self.report[kind] += result.get(kind, [])
        for entry in result.get("limits", []):
            if "sets" in entry:
                self._next_set = (entry["sets"][-1] + 1) % COLD_SETS
        for entry in result.get("loads", []):
            self._note_load(entry, step)
        if reason:
            done = len(result.get("done", []))
            failed, rest = step.places[done : done + 1], step.places[done + 1 :]
            self._note("failures", Step(step.what, failed), reason)
            if rest:
                self.take(Step(step.what, rest))

    def _note_load(self, entry: dict[str, Any], step: Step) -> None:
        error = entry.pop("error")
        cached = [Residency(**each) for each in entry.pop("cached")]
        entry["cached_share"] = [each.share for each in cached]
        entry["is_cold"] = entry["place"] == COLD and is_proven_cold(self._filled, cached)
        if error:
            self._note("failures", Step(step.what, (entry["place"],)), f"{entry['setting']}: {error}")
        if entry["seconds"]:
            self.report["loads"].append(entry)

    def _note(self, kind: str, step: Step, reason: str) -> None:
        for place in step.places:
            _say(f"{step.what}, {place}: {reason}")
            self.report[kind].append({"loader": step.what, "place": place, "reason": reason})

    def _took(self, what: str, began: float) -> None:
        self.report["took_s"][what] = time.monotonic() - began
        _say(f"{what}: {self.report['took_s'][what]:.1f} s")

    def _run(self, step: Step, limit_s: float) -> tuple[dict[str, Any], str]:
        """The step's result, as far as it came, and why it came no further."""
        is_ours = step.what == OURS
        job = Job(
            what=step.what,
            device=self.report["device"],
            places=step.places,
            folders={place: [str(folder) for folder in self._folders[place]] for place in step.places},
            gb=self._options.gb,
            cold_gb=self._options.cold_gb,
            small_folder=str(self._small),
            small_gb=_SMALL_GB,
            repeats=self._options.our_repeats if is_ours else self._options.repeats,
            cold_rounds=self._options.cold_rounds if is_ours else 1,
            first_set=self._next_set,
            shape=best_direct_shape(self.report) or {},
            cores=self._cores,
            own_format_bytes=int(self._options.own_format_gb * 1e9),
        )
        with tempfile.TemporaryDirectory() as folder:
            asked, answered, log = (Path(folder, name) for name in ("job", "result", "log"))
            asked.write_text(json.dumps(asdict(job)))
            command = [*WORKER, str(asked), str(answered)]
            with log.open("wb") as output:
                worker = subprocess.Popen(
                    command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
                )
                try:
                    reason = _wait(worker, answered, log, limit_s)
                finally:
                    _end(worker)
            result = json.loads(answered.read_text()) if answered.exists() else {}
        return result, reason


def _described(model: Model) -> dict[str, int]:
    return {
        "bytes": model.nbytes,
        "tensors": len(model.tensors),
        "shards": model.shards,
        "width": model.width,
    }


def _wait(worker: subprocess.Popen[bytes], answered: Path, log: Path, limit_s: float) -> str:
    """Until the worker ends, or is to be ended; what is wrong, if anything is."""
    began = heard = time.monotonic()
    seen = 0
    while True:
        try:
            code = worker.wait(_LOOK_S)
        except subprocess.TimeoutExpired:
            now = time.monotonic()
            written = answered.stat().st_mtime_ns if answered.exists() else 0
            if written != seen:
                seen, heard = written, now
            if now - began > limit_s:
                return f"cut off: the time was up after {limit_s:.0f} s"
            if now - heard > _SILENCE_S:
                return f"silent for {_SILENCE_S} s"
        else:
            return "" if code == 0 else f"ended with {code}: {_last_line(log)}"


def _end(worker: subprocess.Popen[bytes]) -> None:
    """End the worker and what it started; it leads a group of its own."""
    if worker.poll() is None:
        os.killpg(worker.pid, signal.SIGKILL)
        worker.wait()


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1][:500] if lines else "it said nothing"


def _check_room(folder: Path, nbytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < nbytes * 1.05:
        raise SystemExit(f"{folder} has {free / 1e9:.1f} GB free, {nbytes * 1.05 / 1e9:.1f} are needed")


def _say(line: str) -> None:
    print(line, flush=True)


def machine(device: str) -> dict[str, Any]:
    """What a reader of the figures wants to know of where they come from."""
    models = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    found: dict[str, Any] = {
        "cpu": models[0] if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }
    if device == "cuda":
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        try:
            answer = subprocess.run(query, capture_output=True, text=True, check=True, timeout=60).stdout
        except (OSError, subprocess.SubprocessError):
            answer = "unknown GPU, unknown"
        found["gpu"], found["driver"] = (part.strip() for part in answer.splitlines()[0].split(","))
    return found


def installed(*packages: str) -> dict[str, str]:
    """Versions of those that are there."""
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def file_name(report: dict[str, Any], gb: float) -> str:
    """Of the report, as the others in docs/benchmarks are called."""
    gpu = report["machine"].get("gpu", "host").split()[-1].lower()
    return f"{report['date']}-{gpu}-load-{gb:g}gb.json"


def run(options: argparse.Namespace) -> None:
    """Measure, write the JSON, print the table last."""
    is_cuda = options.device == "cuda"
    options.gb = options.gb or (16.0 if is_cuda else 0.5)
    options.cold_gb = options.cold_gb or (4.0 if is_cuda else 0.5)
    places = [place for place in PLACES if place in options.only]
    prefix = "changeover-load-"
    # A limit of time from outside must not leave gigabytes behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("told to end"))
    with (
        tempfile.TemporaryDirectory(prefix=prefix, dir=options.tmpfs) as tmpfs,
        tempfile.TemporaryDirectory(prefix=prefix, dir=options.disk) as disk,
    ):
        measured = Run(options, Path(tmpfs), Path(disk))
        report = measured.report
        out = options.out
        if out.suffix != ".json":
            out = out / file_name(report, options.gb)
        out.parent.mkdir(parents=True, exist_ok=True)
        try:
            measured.make(places)
            environments = {name: peer.environment for name, peer in PEERS.items()}
            for step in schedule(places, environments, options.skip_loaders):
                measured.take(step)
                out.write_text(json.dumps(report, indent=1) + "\n")
        finally:
            _say(f"\n{out}\n\n{text(report)}")


def plot(options: argparse.Namespace) -> None:
    """One table and one SVG of all reports; the SVG is beside the first unless --svg says where."""
    from tests.bench.load_plot import draw

    try:
        report = join([json.loads(path.read_text()) for path in options.reports])
    except ValueError as error:
        raise SystemExit(f"these are not runs of one benchmark: {error}") from None
    target = options.svg or options.reports[0].with_suffix(".svg")
    draw(report, target)
    _say(f"{text(report)}\n\nwrote {target}")


def _names(known: tuple[str, ...]) -> Any:
    def parse(value: str) -> list[str]:
        names = [name.strip() for name in value.split(",")]
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
        return names

    return parse


def main() -> None:
    """As the module says."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.load")
    commands = parser.add_subparsers(required=True)
    running = commands.add_parser("run", help="measure")
    running.add_argument("--device", choices=("cuda", "host"), default="host")
    running.add_argument("--gb", type=float, help="of the model; 16 on cuda, 0.5 on host")
    running.add_argument("--cold-gb", type=float, help="of each cold load; 4 on cuda, 0.5 on host")
    running.add_argument("--cold-rounds", type=int, default=5, help="of ours; the others load cold once")
    running.add_argument("--tmpfs", type=Path, default=Path("/dev/shm"))
    running.add_argument("--disk", type=Path, default=Path("/var/tmp"))
    running.add_argument("--repeats", type=int, default=3)
    running.add_argument("--our-repeats", type=int, default=5)
    running.add_argument("--budget-s", type=float, default=480)
    running.add_argument("--only", type=_names(PLACES), default=list(PLACES), help=", ".join(PLACES))
    running.add_argument("--skip-loaders", type=_names((OURS, *PEERS)), default=[])
    running.add_argument(
        "--own-format-gb", type=float, default=2, help="for loaders with a format of their own"
    )
    running.add_argument("--out", type=Path, default=Path("docs/benchmarks"), help="a .json, or a folder")
    running.set_defaults(run=run)
    plotting = commands.add_parser("plot", help="join and draw reports")
    plotting.add_argument("reports", type=Path, nargs="+")
    plotting.add_argument("--svg", type=Path, help="where to draw to")
    plotting.set_defaults(run=plot)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
