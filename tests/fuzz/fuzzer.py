"""Runs cases of a target one after the other, each with a bound on time and, for some, on memory."""

from __future__ import annotations

import signal
import tracemalloc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from types import FrameType

from tests.fuzz.targets import Target

CPU_LIMIT_S = 2.0
"""Of one case; they take well under a millisecond."""

MEMORY_EVERY = 50
"""One case in so many is run with its allocations traced, which slows it down."""

MEMORY_BYTES, MEMORY_PER_BYTE = 1 << 20, 200
"""What a case may allocate: a fixed part, and a part for each of its bytes."""


class FuzzFailure(AssertionError):
    """A case broke a rule; the message says how to run it again."""


class _TooSlowError(BaseException):
    """Raised by the timer; no parser may catch it."""


@dataclass(frozen=True, slots=True)
class Tally:
    """How a run went."""

    cases: int
    accepted: int


def make_case(target: Target, seed: int) -> bytes:
    """The case with this seed: the same in every process."""
    return target.make(Random(f"{target.name} {seed}"))


def run(target: Target, seeds: Iterable[int]) -> Tally:
    """Run the cases with these seeds; raises FuzzFailure at the first that breaks a rule.

    Uses the timer of CPU time, and so must be on the main thread.
    """
    cases = accepted = 0
    with _cpu_timer():
        for seed in seeds:
            raw = make_case(target, seed)
            try:
                accepted += _run_one(target, raw, is_traced=seed % MEMORY_EVERY == 0)
            except (Exception, _TooSlowError) as error:
                # Whatever a parser lets out is the finding.
                raise FuzzFailure(
                    f"{type(error).__name__}: {error}\n"
                    f"  run it again: python -m tests.fuzz {target.name} --seed {seed}\n"
                    f"  case: {raw[:2000]!r}"
                ) from error
            cases += 1
    return Tally(cases, accepted)


def _run_one(target: Target, raw: bytes, *, is_traced: bool) -> bool:
    if is_traced:
        tracemalloc.start()
    signal.setitimer(signal.ITIMER_VIRTUAL, CPU_LIMIT_S)
    try:
        is_accepted = target.check(raw)
        if is_traced:
            _, peak = tracemalloc.get_traced_memory()
            limit = MEMORY_BYTES + MEMORY_PER_BYTE * len(raw)
            if peak > limit:
                raise AssertionError(f"allocated {peak} bytes for {len(raw)}, {limit} are allowed")
        return is_accepted
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        if is_traced:
            tracemalloc.stop()


@contextmanager
def _cpu_timer() -> Iterator[None]:
    def too_slow(number: int, frame: FrameType | None) -> None:
        raise _TooSlowError(f"took more than {CPU_LIMIT_S} s of CPU time")

    before = signal.signal(signal.SIGVTALRM, too_slow)
    try:
        yield
    finally:
        signal.signal(signal.SIGVTALRM, before)
