"""The report as tables for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from demo.commands import program
from demo.daemons import INFERD_NAME
from demo.models import MODEL
from demo.report import Expectation, Json
from demo.run import Kept

_MEASURED = (
    ("flip (commit received to new version admissible)", "flip_us", "µs"),
    ("flip of a rollback", "rollback_us", "µs"),
    ("rollback in loaderd (asked to done)", "rollback_operation_ms", "ms"),
    ("rollback, whole loaderctl command", "rollback_command_s", "s"),
    ("load", "load_s", "s"),
    ("time to first token", "ttft_ms", "ms"),
    ("inter-token latency, quiet", "itl_ms_quiet", "ms"),
    ("inter-token latency, during pushes", "itl_ms_push", "ms"),
)


def show_report(console: Console, report: Json, held: Sequence[Expectation]) -> None:
    """Print counts, measurements and expectations."""
    counts = Table(title=f"changeover demo: {report['model']}", show_header=False)
    counts.add_column()
    counts.add_column(justify="right")
    for key in (
        "requests_total",
        "requests_failed",
        "requests_mixed_version",
        "swaps",
        "rollbacks",
        "refused",
    ):
        counts.add_row(key.replace("_", " "), str(report[key]))
    for key in ("peak_weight_bytes", "version_weight_bytes"):
        counts.add_row(key.replace("_bytes", "").replace("_", " "), f"{int(str(report[key])) / 1e6:.1f} MB")
    console.print(counts)

    measured = Table(title="measured")
    measured.add_column("what")
    for column in ("samples", "p50", "p99", "max", "unit"):
        measured.add_column(column, justify="right")
    for title, key, unit in _MEASURED:
        summary = report[key]
        if isinstance(summary, Mapping):
            numbers = (
                f"{summary[name]:.1f}" if unit != "s" else f"{summary[name]:.2f}"
                for name in ("p50", "p99", "max")
            )
            measured.add_row(title, str(summary["count"]), *numbers, unit)
        else:
            measured.add_row(title, "0", "-", "-", "-", unit)
    console.print(measured)

    for expectation in held:
        mark = Text("ok    ", "green") if expectation.is_met else Text("FAILED", "bold red")
        console.print(Text.assemble(mark, " ", expectation.text), soft_wrap=True)
        if not expectation.is_met and expectation.detail:
            console.print(Text("       " + expectation.detail, "red"), soft_wrap=True)


def show_kept(console: Console, kept: Kept) -> None:
    """Print commands to try on the daemons that were left running."""
    pids = " ".join(str(pid) for pid in kept.pids)
    body = f'{{"model": "{MODEL}", "messages": [{{"role": "user", "content": "Hello"}}], "max_tokens": 20}}'
    loaderctl = program("loaderctl")[0] if len(program("loaderctl")) == 1 else "loaderctl"
    lines = (
        "both daemons are still running; things to try:",
        f"  export CHANGEOVER_RUN_DIR={kept.run_dir}",
        f"  {loaderctl} status",
        f"  {loaderctl} push {MODEL}-v1",
        f"  {loaderctl} rollback",
        f"  curl --unix-socket {kept.run_dir}/inferd-{INFERD_NAME}.health.sock http://localhost/readyz",
        f"  curl -i {kept.api}/chat/completions -H 'content-type: application/json' -d '{body}'",
        f"  kill {pids}",
    )
    for line in lines:
        console.print(Text(line), soft_wrap=True)
