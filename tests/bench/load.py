"""Measure loading from storage to the memory that serves: changeover beside other loaders and the limits.

    python -m tests.bench.load run [--device cuda|host] [--gb N] [--budget-s N] [--out FILE] …
    python -m tests.bench.load plot FILE…       draw what runs wrote, an SVG beside each

All in one run, from the same files: at each place (tmpfs, page cache, cold disk) what the machine can do,
then changeover verified and unverified, then the other loaders that are installed.  Each loader runs in a
process of its own with a limit of time, and its bytes are compared with what they must be.
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
from tests.bench.load_report import COLD, OURS, PLACES, TMPFS, text
from tests.bench.load_schedule import Step, schedule
from tests.bench.load_worker import Job

WORKER = (sys.executable, "-m", "tests.bench.load_worker")

_STEP_S = 150
"""No step may take longer."""

_LEAST_S = 15
"""With less left, no step is begun."""

_SMALL_GB = 0.05


class Run:
    """One run: its folders, its time and its report, which is written after every step."""

    def __init__(self, options: argparse.Namespace, tmpfs: Path, disk: Path) -> None:
        self._options = options
        self._deadline = time.monotonic() + options.budget_s
        self._model = Model(options.gb)
        self._cores = len(os.sched_getaffinity(0))
        self._folders = {place: (tmpfs if place == TMPFS else disk) / "model" for place in PLACES}
        self._small = tmpfs / "small"
        self._filled: Residency | None = None  # what the kernel says is cached when all has just been written
        self.report: dict[str, Any] = {
            "date": datetime.now(UTC).strftime("%Y-%m-%d"),
            "command": shlex.join(["python", "-m", "tests.bench.load", *sys.argv[1:]]),
            "device": options.device,
            "machine": machine(options.device),
            "model": {
                "bytes": self._model.nbytes,
                "tensors": len(self._model.tensors),
                "shards": self._model.shards,
                "width": self._model.width,
            },
            "versions": installed("torch", "numpy"),
            "limits": [],
            "loads": [],
            "failures": [],
            "skipped": [],
        }

    def make(self, places: list[str]) -> None:
        """The models: the small one, and the large one where it is needed; from there it is copied."""
        began = time.monotonic()
        write_model(self._small, Model(_SMALL_GB))
        seal_directory(self._small)
        first = self._folders[TMPFS if TMPFS in places else COLD]
        _check_room(first.parent, self._model.nbytes)
        write_model(first, self._model)
        seal_directory(first, jobs=min(self._cores, self._model.shards))
        self.report["made_s"] = time.monotonic() - began
        _say(f"made {self._model.nbytes / 1e9:.2f} GB in {self.report['made_s']:.1f} s")

    def take(self, step: Step) -> None:
        """Measure a step and note what comes of it."""
        left = self._deadline - time.monotonic()
        if left < _LEAST_S:
            self._note("skipped", step, "no time left")
            return
        if not step.is_limits and step.what != OURS and self.report["device"] not in PEERS[step.what].devices:
            self._note("skipped", step, f"does not load to {self.report['device']}")
            return
        if step.place != TMPFS:
            self._copy_to_disk()
        result, reason = self._run(step, min(_STEP_S, left))
        self.report["versions"] |= result.get("versions", {})
        self.report["limits"] += result.get("limits", [])
        for entry in result.get("loads", []):
            self._note_load(entry, step)
        if reason:
            self._note("failures", step, reason)

    def _note_load(self, entry: dict[str, Any], step: Step) -> None:
        error = entry.pop("error")
        cached = [Residency(**each) for each in entry.pop("cached")]
        entry["cached_share"] = [each.share for each in cached]
        entry["is_cold"] = (
            step.place == COLD
            and self._filled is not None
            and all(is_proven_cold(self._filled, each) for each in cached)
        )
        if error:
            self._note("failures", step, f"{entry['setting']}: {error}")
        if entry["seconds"]:
            self.report["loads"].append(entry)

    def _note(self, kind: str, step: Step, reason: str) -> None:
        _say(f"{step.what}, {step.place}: {reason}")
        self.report[kind].append({"loader": step.what, "place": step.place, "reason": reason})

    def _copy_to_disk(self) -> None:
        folder = self._folders[COLD]
        if not folder.exists():
            _check_room(folder.parent, self._model.nbytes)
            began = time.monotonic()
            copy_model(self._folders[TMPFS], folder)
            _say(f"copied to {folder.parent} in {time.monotonic() - began:.1f} s")
        if self._filled is None:
            self._filled = residency(self._model.paths(folder))

    def _run(self, step: Step, limit_s: float) -> tuple[dict[str, Any], str]:
        """The step's result, as far as it came, and why it came no further."""
        repeats = self._options.repeats if step.what != OURS else self._options.our_repeats
        job = Job(
            place=step.place,
            what=step.what,
            device=self.report["device"],
            gb=self._options.gb,
            folder=str(self._folders[step.place]),
            small_gb=_SMALL_GB,
            small_folder=str(self._small),
            repeats=1 if step.place == COLD else repeats,
            cores=self._cores,
            own_format_bytes=int(self._options.own_format_gb * 1e9),
        )
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            asked, answered, log = (Path(folder, name) for name in ("job", "result", "log"))
            asked.write_text(json.dumps(asdict(job)))
            command = [*WORKER, str(asked), str(answered)]
            with log.open("wb") as output:
                worker = subprocess.Popen(
                    command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
                )
                try:
                    code = worker.wait(limit_s)
                    reason = "" if code == 0 else f"ended with {code}: {_last_line(log)}"
                except subprocess.TimeoutExpired:
                    reason = f"took longer than {limit_s:.0f} s"
                finally:
                    _end(worker)
            result = json.loads(answered.read_text()) if answered.exists() else {}
        _say(f"{step.what}, {step.place}: {time.monotonic() - began:.1f} s")
        return result, reason


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
    options.gb = options.gb or (16.0 if options.device == "cuda" else 0.5)
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
            for step in schedule(places, list(PEERS), options.skip_loaders):
                measured.take(step)
                out.write_text(json.dumps(report, indent=1) + "\n")
        finally:
            _say(f"\n{out}\n\n{text(report)}")


def plot(options: argparse.Namespace) -> None:
    """An SVG beside each report."""
    from tests.bench.load_plot import draw

    for path in options.reports:
        target = path.with_suffix(".svg")
        draw(json.loads(path.read_text()), target)
        _say(f"wrote {target}")


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
    running.add_argument("--tmpfs", type=Path, default=Path("/dev/shm"))
    running.add_argument("--disk", type=Path, default=Path("/var/tmp"))
    running.add_argument("--repeats", type=int, default=3)
    running.add_argument("--our-repeats", type=int, default=5)
    running.add_argument("--budget-s", type=float, default=360)
    running.add_argument("--only", type=_names(PLACES), default=list(PLACES), help=", ".join(PLACES))
    running.add_argument("--skip-loaders", type=_names((OURS, *PEERS)), default=[])
    running.add_argument(
        "--own-format-gb", type=float, default=2, help="for loaders with a format of their own"
    )
    running.add_argument("--out", type=Path, default=Path("docs/benchmarks"), help="a .json, or a folder")
    running.set_defaults(run=run)
    plotting = commands.add_parser("plot", help="draw reports")
    plotting.add_argument("reports", type=Path, nargs="+")
    plotting.set_defaults(run=plot)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
