"""A plan and an outcome in words: the lines that every way of showing a push has in common."""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass

from loaderd.ctl.exit_codes import ExitCode
from loaderd.ctl.follow import Conclusion
from loaderd.ctl.text import duration, microseconds, rate, size
from shared.control import OperationReport, PlanReport


@dataclass(frozen=True, slots=True)
class Line:
    """One line for stdout; `text` may still hold characters that are not printable."""

    text: str
    style: str = ""


_VERDICT_STYLE = {"hot": "bold green", "cold": "bold yellow", "refuse": "bold red"}
_OUTCOME_STYLE = {ExitCode.DONE: "bold green", ExitCode.SUPERSEDED: "bold yellow"}


def plan_lines(plan: PlanReport) -> Iterator[Line]:
    """What a push would do, its warnings and, where it is refused, every reason."""
    trust = ", ".join(word for word, holds in (("signed", plan.signed), ("sealed", plan.sealed)) if holds)
    yield Line(f"plan for {plan.name}: {plan.verdict}", _VERDICT_STYLE[plan.verdict])
    yield Line(
        f"  read {size(plan.bytes_to_read)}, share {size(plan.bytes_to_share)} already resident, "
        f"of {size(plan.bytes_total)} in {plan.tensors} tensors ({trust or 'not sealed'})"
    )
    for device in plan.devices:
        yield Line(
            f"  memory of {device.device}: allocate {size(device.bytes_to_allocate)} of "
            f"{size(device.free_bytes)} free, peak of all weights {size(device.peak_bytes)}"
        )
    if plan.sweep_first and plan.verdict == "hot":
        yield Line("  the retained version is released first; it cannot be rolled back to afterwards")
    for warning in plan.warnings:
        yield Line(f"  warning: {warning}", "yellow")
    for reason in plan.reasons:
        yield Line(f"  reason: {reason}", "red" if plan.verdict != "hot" else "")


def version_name(report: OperationReport) -> str:
    """Model and version as the folder is called."""
    version = report.version
    return version if version.startswith(report.model + "-") else f"{report.model}-{version}"


def outcome_lines(conclusion: Conclusion, said: Container[str] = ()) -> Iterator[Line]:
    """How it ended: digest, epoch, times and flips, as far as they are known, and the warnings that
    were not `said` with the plan."""
    report = conclusion.report
    if report is None or report.state == "running":
        return
    style = _OUTCOME_STYLE.get(conclusion.code, "bold red")
    serves = " serves" if report.state == "done" else ""
    yield Line(f"{report.state}: {report.kind} of {version_name(report)}{serves} ({report.operation})", style)
    if report.digest is not None:
        yield Line(f"  digest   {report.digest}")
    if report.epoch is not None:
        yield Line(f"  epoch    {report.epoch}")
    times = [
        ("load", report.load_s, rate(report.bytes_read, report.load_s)),
        ("verify", report.verify_s, rate(hashed_bytes(report), report.verify_s)),
        ("replicate", report.replicate_s, rate(report.bytes_replicated, report.replicate_s)),
        ("prepare", report.prepare_s, ""),
        ("commit", report.commit_s, ""),
    ]
    known = [f"{name} {duration(s)}" + (f" ({speed})" if speed else "") for name, s, speed in times if s]
    if known:
        yield Line(f"  times    {', '.join(known)}")
    if report.inferds_total:
        yield Line(f"  inferds  {report.inferds_committed} of {report.inferds_total} committed")
    elif report.state == "done" and report.commit_s:
        yield Line("  inferds  none is attached; those that attach later are given it", "yellow")
    if report.requests_turned:
        yield Line(f"  requests {report.requests_turned} that ran at the flip: {report.in_flight}")
    if report.flip_ns:
        yield Line(f"  flips    {', '.join(microseconds(flip) for flip in report.flip_ns)}")
    for warning in report.warnings:
        if warning not in said:
            yield Line(f"  warning: {warning}", "yellow")


def hashed_bytes(report: OperationReport) -> int:
    """Verified bytes without those that are shared: they were hashed when they were loaded."""
    return min(report.bytes_verified, report.bytes_total)


def failure(conclusion: Conclusion) -> str:
    """The line for stderr where the outcome is not success; empty where there is nothing to add."""
    report = conclusion.report
    if conclusion.message:
        return conclusion.message
    if conclusion.code is ExitCode.DONE or report is None:
        return ""
    if report.error is not None:
        return f"{report.error.message} [{report.error.code}]"
    if conclusion.code is ExitCode.SUPERSEDED:
        return f"a newer push of {report.model} took the place of {report.operation}"
    return f"{report.kind} of {version_name(report)} ended as {report.state}, no cause was given"


def reattach(operation: str) -> str:
    """How to go on watching an operation that continues."""
    return f"{operation} goes on. To wait for it: loaderctl wait {operation}"
