"""What a health check says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Detail = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether something is well, why not, and what it was judged by."""

    is_ok: bool
    reason: str = ""  # why not; may be empty where all is well
    details: Mapping[str, Detail] = field(default_factory=dict)
    checks: tuple[tuple[str, Verdict], ...] = ()  # the named parts of a combined verdict


OK = Verdict(True)


def combine(checks: Mapping[str, Verdict]) -> Verdict:
    """Well only if every check is; the reason names each one that is not, details are merged."""
    bad = [(name, verdict) for name, verdict in checks.items() if not verdict.is_ok]
    details = {f"{name}.{key}": value for name, part in checks.items() for key, value in part.details.items()}
    reason = "; ".join(f"{name}: {verdict.reason or 'not ok'}" for name, verdict in bad)
    return Verdict(not bad, reason, details, tuple(checks.items()))
