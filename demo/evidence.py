"""What the clients saw of each request, and what that proves about the versions that answered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

References = Mapping[str, Mapping[str, str]]
"""Version tag (`v1@sha256:…`) → prompt key → the greedy text that these weights give."""


class Endpoint(StrEnum):
    """Which call of the API a prompt is sent to."""

    CHAT = "chat"
    COMPLETIONS = "completions"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question of the demo's clients."""

    key: str
    endpoint: Endpoint
    text: str


@dataclass(frozen=True, slots=True)
class Answer:
    """One request as its client recorded it; times are CLOCK_MONOTONIC nanoseconds."""

    client: str
    prompt: str  # Prompt.key
    session: str | None
    started_ns: int
    ended_ns: int
    chunk_ns: tuple[int, ...]  # arrival of each chunk that carried text
    header: str  # x-model-version, empty if the response had none
    fingerprints: tuple[str, ...]  # system_fingerprint of the chunks, each distinct value once
    text: str
    finish: str  # finish_reason, empty if the stream ended without one
    error: str = ""  # what the client library raised, empty if nothing


class Outcome(StrEnum):
    """What one answer counts as."""

    GOOD = "good"
    FAILED = "failed"
    MIXED = "mixed"


@dataclass(frozen=True, slots=True)
class Judgement:
    """The outcome of one answer and, unless it is good, why."""

    outcome: Outcome
    reason: str = ""


def judge(answer: Answer, references: References) -> Judgement:
    """Whether one version, and only the one that the answer names, produced all of it.

    MIXED: the stream names more than one version, names one that was never committed, or its text
    is not what the weights of the version it names say.  FAILED: an error, a stream that ended
    early, or an answer that names no version.
    """
    if answer.error:
        return Judgement(Outcome.FAILED, answer.error)
    if not answer.header:
        return Judgement(Outcome.FAILED, "the response has no x-model-version")
    if not answer.finish:
        return Judgement(Outcome.FAILED, "the stream ended without a finish_reason")
    if not answer.fingerprints:
        return Judgement(Outcome.FAILED, "no chunk has a system_fingerprint")
    for fingerprint in answer.fingerprints:
        if fingerprint != answer.header:
            return Judgement(Outcome.MIXED, f"the header says {answer.header}, a chunk says {fingerprint}")
    texts = references.get(answer.header)
    if texts is None:
        return Judgement(Outcome.MIXED, f"{answer.header} was never committed")
    expected = texts[answer.prompt]
    if answer.text != expected:
        return Judgement(Outcome.MIXED, _difference(answer, expected, references))
    return Judgement(Outcome.GOOD)


def _difference(answer: Answer, expected: str, references: References) -> str:
    for tag, texts in references.items():
        if texts[answer.prompt] == answer.text:
            return f"says it is {answer.header}, but the text is that of {tag}"
    at = next(
        (i for i, (a, b) in enumerate(zip(answer.text, expected, strict=False)) if a != b),
        min(len(answer.text), len(expected)),
    )
    return (
        f"{answer.header} would say {expected!r}, the answer is {answer.text!r} (differs from character {at})"
    )


def telling_prompts(references: References) -> int:
    """How many prompts have a different text for each version; only these reveal mixed weights."""
    by_prompt: dict[str, list[str]] = {}
    for texts in references.values():
        for key, text in texts.items():
            by_prompt.setdefault(key, []).append(text)
    return sum(len(set(texts)) == len(texts) for texts in by_prompt.values())
