"""The demo from start to end: daemons up, traffic on, swaps and refusals under it, daemons down."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from demo.daemons import (
    INFERD_NAME,
    DaemonLostError,
    Daemons,
    free_port,
    inferd_config,
    loaderd_config,
    make_run_dir,
)
from demo.evidence import References
from demo.loaderctl import CommandFailedError, CommandResult, active_tag, loaderctl, read_status
from demo.model_source import Wanted
from demo.models import MODEL, Checkpoints, prepare_checkpoints
from demo.probe import probe
from demo.reference import reference_answers
from demo.report import DemoRun, Probes, Step, StepKind
from demo.traffic import MAX_TOKENS, PROMPTS, Traffic, client_plans
from shared.memory.selection import BackendName
from shared.run_dir import RunDir

_DONE, _FAILED, _REFUSED = 0, 3, 5  # exit codes of loaderctl, as its --help has them
_EXTRA_ROLLBACKS = 4  # even, so that v2 serves at the end

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Options:
    """How to run the demo."""

    build: Path
    wanted: Wanted
    keep: bool
    backend: BackendName


@dataclass(frozen=True, slots=True)
class Kept:
    """Daemons that were left running."""

    run_dir: Path
    api: str
    pids: tuple[int, ...]


@dataclass(slots=True)
class Scenario:
    """The operator's commands in order, each recorded as a Step."""

    daemons: Daemons
    checkpoints: Checkpoints
    traffic: Traffic
    say: Say
    steps: list[Step] = field(default_factory=list)
    probes: Probes | None = None

    async def play(self) -> None:
        """Push, roll back and try broken versions while the clients ask."""
        before = await self._readiness()
        await self._push("v1", has_traffic=False)
        self.probes = Probes(*before, *await self._readiness())
        clients = asyncio.create_task(self.traffic.run(), name="clients")
        try:
            await self._quiet(2)
            await self._push("v2")
            await self._quiet(2)
            await self._rollback("v1")
            await self._quiet(1)
            await self._push("v2")
            for serving in ("v1", "v2") * (_EXTRA_ROLLBACKS // 2):
                await self._quiet(1)
                await self._rollback(serving)
            await self._quiet(2)
            nan = self.checkpoints.nan_tensor.removesuffix(".weight")
            await self._broken("v3", "NaN weights", _FAILED, ("nan", nan))
            await self._quiet(1)
            file, tensor = self.checkpoints.flipped_file, self.checkpoints.flipped_tensor
            await self._broken("v4", "a flipped bit", _FAILED, (file, tensor))
            await self._quiet(1)
            await self._broken("v5", "another shape", _REFUSED, ("shape",))
            await self._quiet(1)
        finally:
            self.traffic.end()
            await clients

    async def _readiness(self) -> tuple[int, int]:
        path = RunDir(self.daemons.run_dir).inferd_health(INFERD_NAME)
        return await probe(path, "/livez"), await probe(path, "/readyz")

    async def _quiet(self, rounds: int) -> None:
        await self.traffic.wait_for_rounds(rounds)

    async def _push(self, version: str, *, has_traffic: bool = True) -> None:
        folder = f"{MODEL}-{version}"
        result = await loaderctl(self.daemons.environment, "push", folder)
        await self._record(
            f"push {folder}", StepKind.PUSH, result, _DONE, (), version, has_traffic=has_traffic
        )

    async def _rollback(self, serving: str) -> None:
        result = await loaderctl(self.daemons.environment, "rollback")
        await self._record(f"rollback to {serving}", StepKind.ROLLBACK, result, _DONE, (), serving)

    async def _broken(self, version: str, what: str, exit_code: int, words: tuple[str, ...]) -> None:
        folder = f"{MODEL}-{version}"
        result = await loaderctl(self.daemons.environment, "push", folder)
        await self._record(f"push {folder} ({what})", StepKind.BROKEN, result, exit_code, words, "v2")

    async def _record(
        self,
        title: str,
        kind: StepKind,
        result: CommandResult,
        exit_code: int,
        words: tuple[str, ...],
        serving: str,
        *,
        has_traffic: bool = True,
    ) -> None:
        status = await read_status(self.daemons.environment)
        step = Step(
            title=title,
            kind=kind,
            expected_exit=exit_code,
            expected_words=words,
            expected_active=serving,
            exit_code=result.exit_code,
            output=result.message or result.output if result.exit_code else "",
            window=result.window,
            has_traffic=has_traffic,
            active=active_tag(status, MODEL),
            operation=result.operation,
        )
        self.steps.append(step)
        seconds = (step.window.ended_ns - step.window.started_ns) / 1e9
        outcome = f"exit code {step.exit_code} after {seconds:.1f} s, {step.active[:20] or 'nothing'} serves"
        self.say(f"loaderctl {title}: {outcome}" + ("" if step.is_as_expected else "  <- NOT AS EXPECTED"))
        if step.output:
            self.say("    " + step.output.strip().replace("\n", "\n    "))


async def run_demo(options: Options, say: Say) -> tuple[DemoRun, Kept | None]:
    """Run the whole demo and return what was recorded.

    Raises DaemonLostError if a daemon does not start or goes away, ModelUnavailableError if the real
    model was insisted on and is out of reach.
    """
    build = options.build.absolute()
    checkpoints = prepare_checkpoints(build, options.wanted, say)
    say(f"model: {checkpoints.source.name}")
    texts = {
        version: _references(build, checkpoints, version, options.backend, say) for version in ("v1", "v2")
    }
    run_dir = make_run_dir(build / "demo")
    state_dir = run_dir / "state"
    state_dir.mkdir(mode=0o700)
    async with Daemons(run_dir, free_port()) as daemons:
        say(f"starting loaderd and inferd in {run_dir}")
        await daemons.start("loaderd", loaderd_config(run_dir, state_dir, checkpoints.root, options.backend))
        await daemons.start("inferd", inferd_config(run_dir, daemons.port, options.backend))
        traffic = Traffic(daemons.api, client_plans())
        scenario = Scenario(daemons, checkpoints, traffic, say)
        try:
            await scenario.play()
        except CommandFailedError as error:
            raise DaemonLostError(f"{error}\n{daemons.tails()}") from error
        status = await read_status(daemons.environment)
        kept = None
        exit_codes: dict[str, int] = {}
        if options.keep:
            kept = Kept(run_dir, daemons.api, daemons.detach())
        else:
            exit_codes = await daemons.stop()
    if kept is None and not any(exit_codes.values()):
        shutil.rmtree(run_dir)
    return (
        DemoRun(
            model=checkpoints.source.name,
            steps=tuple(scenario.steps),
            probes=scenario.probes,
            answers=tuple(traffic.answers),
            references=_by_tag(scenario.steps, texts),
            peak_weight_bytes=max((memory.peak_bytes for memory in status.memory), default=0),
            version_bytes=max((s.operation.bytes_total for s in scenario.steps if s.operation), default=0),
            exit_codes=exit_codes,
            were_kept=options.keep,
        ),
        kept,
    )


def _references(
    build: Path, checkpoints: Checkpoints, version: str, backend: BackendName, say: Say
) -> dict[str, str]:
    device = "cuda" if backend == "cuda" else "cpu"
    say(f"computing what {version} must answer, with transformers in float32 on {device}")
    folder = checkpoints.folder(version)
    cache = build / "demo" / f"references-{device}-{checkpoints.root.name}-{version}.json"
    return reference_answers(folder, PROMPTS, MAX_TOKENS, cache, device)


def _by_tag(steps: list[Step], texts: dict[str, dict[str, str]]) -> References:
    tags = {}
    for step in steps:
        operation = step.operation
        if step.kind is StepKind.PUSH and step.exit_code == 0 and operation is not None:
            tags[f"{operation.version}@{operation.digest}"] = texts[operation.version]
    return tags
