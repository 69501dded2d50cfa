"""Answers, steps and runs with the fields that a test does not care about filled in."""

from __future__ import annotations

from dataclasses import replace

from demo.evidence import Answer
from demo.latency import Window
from demo.report import DemoRun, Probes, Step, StepKind
from shared.control import OperationReport

V1 = "v1@sha256:" + "1" * 64
V2 = "v2@sha256:" + "2" * 64
REFERENCES = {
    V1: {"sun": " east, as ever.", "france": "Paris."},
    V2: {"sun": " morning sky.", "france": "Paris."},
}
_MS = 1_000_000


def answer(**changes: object) -> Answer:
    """A good answer of v1 to `sun`, from 0 to 50 ms."""
    good = Answer(
        client="chat",
        prompt="sun",
        session=None,
        started_ns=0,
        ended_ns=50 * _MS,
        chunk_ns=(20 * _MS, 30 * _MS, 40 * _MS),
        header=V1,
        fingerprints=(V1,),
        text=REFERENCES[V1]["sun"],
        finish="length",
    )
    return replace(good, **changes)  # type: ignore[arg-type]


def operation(version: str, **changes: object) -> OperationReport:
    """A push that was done."""
    digest = {"v1": V1, "v2": V2}[version].partition("@")[2]
    return OperationReport(
        operation="op-1",
        kind="push",
        model="smollm2",
        version=version,
        state="done",
        stage="finished",
        digest=digest,
        bytes_read=100,
        load_s=0.5,
        flip_ns=(2_000,),
        started_ns=1,
    ).model_copy(update=changes)


def step(version: str = "v2", **changes: object) -> Step:
    """A push under traffic that went as it should, from 10 to 40 ms."""
    good = Step(
        title=f"push smollm2-{version}",
        kind=StepKind.PUSH,
        expected_exit=0,
        expected_words=(),
        expected_active=version,
        exit_code=0,
        output="",
        window=Window(10 * _MS, 40 * _MS),
        has_traffic=True,
        active={"v1": V1, "v2": V2}[version],
        operation=operation(version),
    )
    return replace(good, **changes)  # type: ignore[arg-type]


def run(**changes: object) -> DemoRun:
    """A run in which everything went as it should."""
    good = DemoRun(
        model="a model",
        steps=(step("v1", has_traffic=False), step("v2")),
        probes=Probes(200, 503, 200, 200),
        answers=(
            answer(),
            answer(header=V2, fingerprints=(V2,), text=REFERENCES[V2]["sun"], started_ns=30 * _MS),
        ),
        references={tag: {"sun": texts["sun"]} for tag, texts in REFERENCES.items()},
        peak_weight_bytes=2_000,
        version_bytes=1_000,
        exit_codes={"inferd": 0, "loaderd": 0},
    )
    return replace(good, **changes)  # type: ignore[arg-type]
