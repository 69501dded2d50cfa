"""The operator: runs loaderctl as a subprocess and reads what it says."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass

from demo.commands import program
from demo.latency import Window
from shared.control import OperationReport, StatusReport

_TIMEOUT_S = 300.0


class CommandFailedError(Exception):
    """A command that cannot fail while loaderd works failed."""


@dataclass(frozen=True, slots=True)
class CommandResult:
    """One finished loaderctl command."""

    exit_code: int
    output: str  # both streams
    lines: tuple[dict[str, object], ...]  # JSON objects on stdout
    window: Window

    @property
    def operation(self) -> OperationReport | None:
        """The last report of the operation, None if there never was one."""
        for line in reversed(self.lines):
            if line.get("report") is not None:
                return OperationReport.model_validate_json(json.dumps(line["report"]))
        return None

    @property
    def message(self) -> str:
        """Why it did not succeed, and the reasons of the plan; for people."""
        parts = []
        for line in self.lines:
            if isinstance(line.get("message"), str):
                parts.append(str(line["message"]))
            plan = line.get("plan")
            if isinstance(plan, dict):
                parts.extend(str(reason) for reason in plan.get("reasons", ()))
        return "\n".join(part for part in parts if part)


async def loaderctl(environment: Mapping[str, str], *arguments: str) -> CommandResult:
    """Run `loaderctl ARGUMENTS --json` to its end; a command that hangs is killed and has exit code -9."""
    started_ns = time.monotonic_ns()
    process = await asyncio.create_subprocess_exec(
        *program("loaderctl"),
        *arguments,
        "--json",
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=dict(environment),
    )
    talk = asyncio.ensure_future(process.communicate())
    done, _ = await asyncio.wait((talk,), timeout=_TIMEOUT_S)
    if not done:
        process.kill()
    stdout, stderr = await talk
    window = Window(started_ns, time.monotonic_ns())
    text = stdout.decode(errors="replace")
    lines = tuple(json.loads(line) for line in text.splitlines() if line.startswith("{"))
    return CommandResult(
        process.returncode if process.returncode is not None else -1,
        text + stderr.decode(errors="replace"),
        lines,
        window,
    )


async def read_status(environment: Mapping[str, str]) -> StatusReport:
    """`loaderctl status --json`; raises CommandFailedError if it fails."""
    result = await loaderctl(environment, "status")
    if result.exit_code != 0 or not result.lines:
        raise CommandFailedError(f"loaderctl status ended with {result.exit_code}: {result.output.strip()}")
    return StatusReport.model_validate_json(json.dumps(result.lines[-1]))


def active_tag(status: StatusReport, model: str) -> str:
    """The tag that serves, as `x-model-version` spells it; empty if none does."""
    for report in status.models:
        if report.model == model and report.active is not None:
            return str(report.active.to_tag())
    return ""
