"""`python -m demo`: run the demo, print what was measured, and fail if anything was not as promised."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import get_args

from rich.console import Console

from demo.daemons import DaemonLostError
from demo.model_source import ModelUnavailableError, Wanted
from demo.report import build_report, expectations, judge_all
from demo.run import Options, run_demo
from demo.table import show_kept, show_report
from shared.memory.selection import BackendName

_REPORT_VARIABLE = "DEMO_REPORT"


def main() -> int:
    """Run the demo; 0 if every expectation was met, 1 if not or if it could not run."""
    parser = argparse.ArgumentParser(prog="python -m demo", description=__doc__)
    parser.add_argument("--build", type=Path, default=Path("build"), help="where models and state go (build)")
    parser.add_argument(
        "--model",
        type=Wanted,
        choices=list(Wanted),
        default=Wanted.AUTO,
        help="auto: SmolLM2 if it can be downloaded, else a tiny generated model",
    )
    parser.add_argument(
        "--backend", choices=get_args(BackendName), default="host", help="where the weights are (host)"
    )
    parser.add_argument(
        "--keep", action="store_true", help="leave both daemons running and show how to use them"
    )
    arguments = parser.parse_args()

    console = Console(highlight=False)
    began = time.monotonic()

    def say(text: str) -> None:
        console.print(f"[{time.monotonic() - began:6.1f} s] {text}", markup=False, soft_wrap=True)

    try:
        run, kept = asyncio.run(
            run_demo(Options(arguments.build, arguments.model, arguments.keep, arguments.backend), say)
        )
    except (DaemonLostError, ModelUnavailableError) as error:
        console.print(f"error: {error}", markup=False, style="bold red", soft_wrap=True)
        return 1
    report = {**build_report(run), "seconds": round(time.monotonic() - began, 1)}
    path = Path(os.environ.get(_REPORT_VARIABLE) or arguments.build / "demo-report.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2) + "\n")
    show_report(console, report, expectations(run, judge_all(run)))
    verdict = "passed" if report["passed"] else "FAILED"
    console.print(f"{verdict} in {report['seconds']} s; report: {path}", markup=False, soft_wrap=True)
    if kept is not None:
        show_kept(console, kept)
    return 0 if report["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
