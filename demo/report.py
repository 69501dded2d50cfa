"""The demo's verdict: what was expected, what was measured, and the JSON that records both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum

from demo.evidence import Answer, Judgement, Outcome, References, judge, telling_prompts
from demo.latency import Summary, Window, in_flight_during, split_gaps, summarize
from shared.control import OperationReport

Json = dict[str, object]
_EXAMPLES = 5
_MIN_SAMPLES_PER_WINDOW = 1


class StepKind(StrEnum):
    """What the operator asks for."""

    PUSH = "push"
    ROLLBACK = "rollback"
    BROKEN = "broken push"


@dataclass(frozen=True, slots=True)
class Step:
    """One loaderctl command, what it should do and what it did."""

    title: str
    kind: StepKind
    expected_exit: int
    expected_words: tuple[str, ...]  # each must be in the output, in any case
    expected_active: str  # version that must serve afterwards
    exit_code: int
    output: str
    window: Window
    has_traffic: bool
    active: str  # tag that status shows afterwards, empty if none
    operation: OperationReport | None  # None if the plan refused

    @property
    def is_as_expected(self) -> bool:
        """Whether the command did what it should."""
        output = self.output.lower()
        return (
            self.exit_code == self.expected_exit
            and all(word.lower() in output for word in self.expected_words)
            and self.active.partition("@")[0] == self.expected_active
        )


@dataclass(frozen=True, slots=True)
class Probes:
    """HTTP status codes of inferd's health socket, before and after the first push."""

    live_before: int
    ready_before: int
    live_after: int
    ready_after: int

    @property
    def is_as_expected(self) -> bool:
        """Live from the start, ready only once there is a version to serve."""
        return (self.live_before, self.ready_before, self.live_after, self.ready_after) == (
            200,
            503,
            200,
            200,
        )


@dataclass(frozen=True, slots=True)
class DemoRun:
    """Everything that was recorded, before it is judged."""

    model: str
    steps: tuple[Step, ...]
    probes: Probes | None
    answers: tuple[Answer, ...]
    references: References
    peak_weight_bytes: int
    version_bytes: int  # weight bytes of one version
    exit_codes: Mapping[str, int]  # daemon → exit status after SIGTERM
    were_kept: bool = False  # the daemons were left running on purpose


@dataclass(frozen=True, slots=True)
class Expectation:
    """One thing that the demo promises."""

    text: str
    is_met: bool
    detail: str = ""


def judge_all(run: DemoRun) -> tuple[tuple[Answer, Judgement], ...]:
    """Every answer with its judgement."""
    return tuple((answer, judge(answer, run.references)) for answer in run.answers)


def expectations(run: DemoRun, judged: Sequence[tuple[Answer, Judgement]]) -> tuple[Expectation, ...]:
    """What must hold, and whether it did."""
    failed = [(a, j) for a, j in judged if j.outcome is Outcome.FAILED]
    mixed = [(a, j) for a, j in judged if j.outcome is Outcome.MIXED]
    prompts = max((len(texts) for texts in run.references.values()), default=0)
    telling = telling_prompts(run.references)
    idle = [
        step.title
        for step in run.steps
        if step.has_traffic and in_flight_during(run.answers, step.window) < _MIN_SAMPLES_PER_WINDOW
    ]
    answered = Counter(answer.header for answer, judgement in judged if judgement.outcome is Outcome.GOOD)
    silent = [tag for tag in run.references if not answered[tag]]
    strays = session_strays(run)
    stopped = {name: code for name, code in run.exit_codes.items() if code != 0}
    return (
        Expectation(
            "inferd was live but not ready before the first push, and ready after it",
            run.probes is not None and run.probes.is_as_expected,
            str(run.probes),
        ),
        *(_step_expectation(step) for step in run.steps),
        Expectation("no request failed", not failed, _examples(failed)),
        Expectation("no request was answered by more than one version", not mixed, _examples(mixed)),
        Expectation("requests were in flight during every command", not idle, ", ".join(idle)),
        Expectation("every committed version answered requests", not silent, ", ".join(silent)),
        Expectation(
            "most prompts tell the versions apart",
            telling * 2 > prompts,
            f"{telling} of {prompts} prompts do",
        ),
        Expectation(
            "a session stayed on its version while that version was resident", not strays, "; ".join(strays)
        ),
        Expectation(
            "both daemons were left running"
            if run.were_kept
            else "both daemons ended with exit code 0 on SIGTERM",
            not stopped and (bool(run.exit_codes) or run.were_kept),
            ", ".join(f"{name}: {code}" for name, code in stopped.items()),
        ),
    )


def _step_expectation(step: Step) -> Expectation:
    wanted = f"{step.title}: exit code {step.expected_exit}, {step.expected_active} serves"
    if step.expected_words:
        wanted += ", output names " + ", ".join(step.expected_words)
    if step.is_as_expected:
        return Expectation(wanted, is_met=True)
    found = f"exit code {step.exit_code}, {step.active or 'nothing'} serves, output: {step.output.strip()}"
    return Expectation(wanted, is_met=False, detail=found)


def _examples(bad: Sequence[tuple[Answer, Judgement]]) -> str:
    shown = [f"{answer.client}/{answer.prompt}: {judgement.reason}" for answer, judgement in bad[:_EXAMPLES]]
    if len(bad) > len(shown):
        shown.append(f"and {len(bad) - len(shown)} more")
    return "; ".join(shown)


def session_strays(run: DemoRun) -> tuple[str, ...]:
    """Answers of a session on another version than its first, although that one was still resident.

    Until the first broken push needs a slot, both versions stay resident.
    """
    sweep_ns = min((s.window.started_ns for s in run.steps if s.kind is StepKind.BROKEN), default=None)
    first: dict[str, str] = {}
    strays = []
    for answer in sorted(run.answers, key=lambda a: a.started_ns):
        if answer.session is None or not answer.header:
            continue
        if sweep_ns is not None and answer.ended_ns >= sweep_ns:
            continue
        home = first.setdefault(answer.session, answer.header)
        if answer.header != home:
            strays.append(f"{answer.session} moved from {home} to {answer.header}")
    return tuple(strays)


def build_report(run: DemoRun) -> Json:
    """The report as JSON: measured numbers, then every expectation with what was found."""
    judged = judge_all(run)
    outcomes = Counter(judgement.outcome for _, judgement in judged)
    held = expectations(run, judged)
    done = [step for step in run.steps if step.operation is not None and step.exit_code == 0]
    pushes = [step for step in done if step.kind is StepKind.PUSH]
    rollbacks = [step for step in done if step.kind is StepKind.ROLLBACK]
    under_traffic = [step for step in run.steps if step.has_traffic]
    push_windows = [step.window for step in under_traffic if step.kind is not StepKind.ROLLBACK]
    all_windows = [step.window for step in under_traffic]
    by_tag = Counter(answer.header for answer in run.answers)
    return {
        "model": run.model,
        "passed": all(expectation.is_met for expectation in held),
        "requests_total": len(judged),
        "requests_failed": outcomes[Outcome.FAILED],
        "requests_mixed_version": outcomes[Outcome.MIXED],
        "swaps": len(pushes),
        "rollbacks": len(rollbacks),
        "refused": sum(step.kind is StepKind.BROKEN and step.exit_code != 0 for step in run.steps),
        "flip_us": _samples(ns / 1e3 for step in pushes for ns in _flips(step)),
        "rollback_us": _samples(ns / 1e3 for step in rollbacks for ns in _flips(step)),
        "rollback_operation_ms": _samples(_operation_ms(step) for step in rollbacks),
        "rollback_command_s": _samples(_seconds(step.window) for step in rollbacks),
        "load_s": _samples(
            step.operation.load_s
            for step in pushes
            if step.operation is not None and step.operation.bytes_read
        ),
        "ttft_ms": _summary(
            (answer.chunk_ns[0] - answer.started_ns) / 1e6 for answer in run.answers if answer.chunk_ns
        ),
        "itl_ms_quiet": _summary(split_gaps(run.answers, all_windows).quiet_ms),
        "itl_ms_push": _summary(split_gaps(run.answers, push_windows).busy_ms),
        "peak_weight_bytes": run.peak_weight_bytes,
        "version_weight_bytes": run.version_bytes,
        "versions": [{"tag": tag, "requests": by_tag[tag]} for tag in run.references],
        "prompts_that_tell_versions_apart": telling_prompts(run.references),
        "steps": [_step_json(step) for step in run.steps],
        "expectations": [asdict(expectation) for expectation in held],
    }


def _flips(step: Step) -> tuple[int, ...]:
    return step.operation.flip_ns if step.operation is not None else ()


def _operation_ms(step: Step) -> float:
    operation = step.operation
    if operation is None or operation.ended_ns is None:
        return 0.0
    return (operation.ended_ns - operation.started_ns) / 1e6


def _seconds(window: Window) -> float:
    return (window.ended_ns - window.started_ns) / 1e9


def _summary(samples: Iterable[float]) -> Json | None:
    summary = summarize(samples)
    return None if summary is None else _summary_json(summary)


def _summary_json(summary: Summary) -> Json:
    return {
        "count": summary.count,
        "p50": round(summary.p50, 3),
        "p99": round(summary.p99, 3),
        "max": round(summary.max, 3),
    }


def _samples(samples: Iterable[float]) -> Json | None:
    kept = [round(sample, 6) for sample in samples]
    summary = summarize(kept)
    return None if summary is None else {**_summary_json(summary), "samples": kept}


def _step_json(step: Step) -> Json:
    operation = step.operation
    return {
        "title": step.title,
        "kind": step.kind.value,
        "exit_code": step.exit_code,
        "seconds": round(_seconds(step.window), 3),
        "active": step.active,
        "output": step.output.strip(),
        "operation": None if operation is None else operation.model_dump(mode="json"),
    }
