"""What the API counts.

Labels are bounded: endpoints and outcomes are fixed sets, and a version is a label only while it is
resident.  Nothing that a client sends becomes a label.
"""

from __future__ import annotations

import threading
from typing import Final, Literal

from prometheus_client import CollectorRegistry, Counter, Histogram

from shared.ids import VersionTag

Endpoint = Literal["chat", "completions", "models", "other"]
Outcome = Literal["2xx", "4xx", "5xx", "interrupted", "disconnected"]
TokenKind = Literal["prompt", "cached", "completion"]

NO_VERSION: Final = "none"
"""The label of a request that no version answered, or whose version is gone by now."""

_DIGEST_CHARS: Final = len("sha256:") + 12
_FIRST_TOKEN_S: Final = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
_NEXT_TOKEN_S: Final = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 5)


def version_label(tag: VersionTag) -> str:
    """`v7@sha256:` and the digest's first 12 digits."""
    return f"{tag.ref.version}@{tag.digest[:_DIGEST_CHARS]}"


class ApiMetrics:
    """Counters and histograms by version, in `registry`.  Thread-safe."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._lock = threading.Lock()
        # The series of each resident version, to be removed with it.
        self._series: dict[str, set[tuple[Counter | Histogram, tuple[str, ...]]]] = {}
        self._requests = Counter(
            "inferd_api_requests",
            "Requests by what came of them: a status class, 'interrupted' by an error after the headers were "
            "sent, or 'disconnected' by the client.",
            ("endpoint", "outcome", "version"),
            registry=registry,
        )
        self._tokens = Counter(
            "inferd_api_tokens",
            "Tokens by kind; 'cached' are prompt tokens found in the prefix cache.",
            ("kind", "version"),
            registry=registry,
        )
        self._first_token = Histogram(
            "inferd_api_time_to_first_token_seconds",
            "From the arrival of a request to the first token of a sequence.",
            ("endpoint", "version"),
            buckets=_FIRST_TOKEN_S,
            registry=registry,
        )
        self._next_token = Histogram(
            "inferd_api_inter_token_seconds",
            "Between two tokens of a sequence, as the engine delivered them.",
            ("version",),
            buckets=_NEXT_TOKEN_S,
            registry=registry,
        )

    def admit(self, tag: VersionTag) -> None:
        """Let `tag` be a label until it is forgotten."""
        with self._lock:
            self._series.setdefault(version_label(tag), set())

    def forget_version(self, tag: VersionTag) -> None:
        """Drop every series of `tag`, which has been retired."""
        with self._lock:
            for metric, labels in self._series.pop(version_label(tag), ()):
                metric.remove(*labels)

    def answered(self, endpoint: Endpoint, outcome: Outcome, tag: VersionTag | None) -> None:
        """Count a request that is over."""
        with self._lock:
            self._requests.labels(*self._enter(self._requests, tag, endpoint, outcome)).inc()

    def tokens(self, kind: TokenKind, count: int, tag: VersionTag) -> None:
        """Count tokens."""
        with self._lock:
            self._tokens.labels(*self._enter(self._tokens, tag, kind)).inc(count)

    def first_token(self, endpoint: Endpoint, seconds: float, tag: VersionTag) -> None:
        """A sequence's first token came `seconds` after its request."""
        with self._lock:
            self._first_token.labels(*self._enter(self._first_token, tag, endpoint)).observe(seconds)

    def next_tokens(self, count: int, seconds: float, tag: VersionTag) -> None:
        """`count` tokens of a sequence came `seconds` after the one before."""
        with self._lock:
            series = self._next_token.labels(*self._enter(self._next_token, tag))
            for _ in range(count):
                series.observe(seconds / count)

    def _enter(self, metric: Counter | Histogram, tag: VersionTag | None, *labels: str) -> tuple[str, ...]:
        """The label values of a series; the version comes last."""
        # An answer may end after its version was retired; it must not bring the series back.
        version = NO_VERSION if tag is None else version_label(tag)
        series = self._series.get(version)
        if series is None:
            return (*labels, NO_VERSION)
        values = (*labels, version)
        series.add((metric, values))
        return values
