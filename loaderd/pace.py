"""`Pace`: carries the throttle out.  Threads that copy or hash ask it; inferds are told what holds for them.

Everything that moves weights goes through it: reading into memory, hashing what lies there, hashing again
for `verify`, a scrub or an adoption here, and hashing what is mapped in the inferds.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import structlog

from loaderd.chronicle import Chronicle
from loaderd.leases import Lease
from loaderd.throttle import Limits, Throttle, Window
from shared.errors import ChangeoverError, Fact
from shared.gate import Gate
from shared.handoff import Report
from shared.ids import LeaseId

log = structlog.get_logger(__name__)

TICK_S = 0.1
"""How often reports are asked for, and decisions taken, while there is work."""

QUIET_REPORT_S = 1.0

PATIENT_PART = 1 / 3
"""Of what may be added to latency: so much for work that nobody waits for, to leave its mark not even where
latency is worst."""


class Work:
    """One load, verification or scrub under way (`Pacer`)."""

    def __init__(
        self, name: str, gate: Gate, most_bytes_per_s: float, ended: threading.Event, is_patient: bool
    ) -> None:
        self.name = name
        self.is_patient = is_patient
        self._gate = gate
        self._own = Gate(most_bytes_per_s)
        self._ended = ended

    def admit(self, nbytes: int) -> None:
        """Return when `nbytes` may be copied or hashed.  Blocking, from any thread; raises Superseded once
        the work was ended."""
        self._own.admit(nbytes, self._ended)
        self._gate.admit(nbytes, self._ended)

    def grain_bytes(self, most_bytes: int) -> int:
        """How many bytes to ask for at once: `most_bytes`, or fewer while the rate is limited."""
        return self._own.grain_bytes(self._gate.grain_bytes(most_bytes))

    def spread_s(self, nbytes: int) -> float:
        """Over which time to spread work on so many bytes: 0 without a limit."""
        return max(self._own.spread_s(nbytes), self._gate.spread_s(nbytes))

    def end(self) -> None:
        """Let no more through: who waits, or asks from now on, gets Superseded.  From any thread."""
        self._ended.set()


@dataclass(frozen=True, slots=True)
class _Mark:
    """An inferd's counters when it reported last."""

    now_s: float
    report: Report

    def window(self, now_s: float, report: Report) -> Window:
        """What happened since."""
        return Window(
            began_s=self.now_s,
            ended_s=now_s,
            steps=max(0, report.decode_steps - self.report.decode_steps),
            decode_s=max(0, report.decode_ns - self.report.decode_ns) / 1e9,
            is_serving=report.running > 0 or report.tokens_generated != self.report.tokens_generated,
        )


class Pace:
    """Used from the event loop's thread only, except what its `Work`s do."""

    def __init__(
        self,
        limits: Limits | None,
        leases: Mapping[LeaseId, Lease],
        chronicle: Chronicle,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Without `limits` nothing is ever held back."""
        self._is_on = limits is not None
        self._limits = limits or Limits()
        self._throttle = Throttle(self._limits)
        self._leases = leases
        self._chronicle = chronicle
        self._spawn = spawn
        self._clock = clock
        self._gate = Gate(clock=clock)
        self._works: list[Work] = []
        self._is_closed = False
        self._has_work = asyncio.Event()
        self._marks: dict[LeaseId, _Mark] = {}
        self._told: dict[LeaseId, tuple[float, float]] = {}
        self._telling: set[LeaseId] = set()
        self._inferds_hashed_bytes = 0
        self._moved_before = 0  # what had gone through when the throttle's phase or rate began
        self._slowest = math.inf
        self._excess_s = 0.0  # when the throttle began to back off

    @property
    def bytes_per_s(self) -> float:
        """What may go through now: infinite without a limit, 0 while the throttle looks."""
        return self._throttle.allowed

    @property
    def admitted_bytes(self) -> int:
        """What was copied or hashed in this process."""
        return self._gate.admitted_bytes

    @property
    def is_throttled(self) -> bool:
        """Whether copies are held back because latency has risen."""
        return self._throttle.excess is not None

    @property
    def throttled_bytes_per_s(self) -> int | None:
        """The rate that latency holds copies to; None while it does not."""
        return round(self._throttle.rate) if self.is_throttled else None

    @contextmanager
    def work(
        self,
        name: str,
        *,
        most_bytes_per_s: float = math.inf,
        ended: threading.Event | None = None,
        is_patient: bool = False,
    ) -> Iterator[Work]:
        """Something that copies or hashes until the block ends; `ended` is what cancels it.  While all that
        is under way is patient, latency may rise by PATIENT_PART of what it may else."""
        work = Work(name, self._gate, most_bytes_per_s, ended or threading.Event(), is_patient)
        if self._is_closed:
            work.end()
        self._works.append(work)
        self._choose_limits()
        if len(self._works) == 1 and self._is_on:
            self._has_work.set()
            self._become(self._throttle.begin(self._clock()))
        try:
            yield work
        except BaseException:
            work.end()  # its threads may be at the gate still
            raise
        finally:
            self._works.remove(work)
            self._choose_limits()
            if not self._works and self._is_on:
                self._has_work.clear()
                self._become(self._throttle.end(self._clock()))

    def close(self) -> None:
        """End all work, and what begins from now on: a thread at the gate would outlive all else here."""
        self._is_closed = True
        for work in self._works:
            work.end()

    def reported(self, lease: Lease) -> None:
        """An inferd's report came; the throttle goes by them."""
        report = lease.last_report
        if not self._is_on or report is None:
            return
        now_s = self._clock()
        before, self._marks[lease.id] = self._marks.get(lease.id), _Mark(now_s, report)
        if before is not None:
            self._inferds_hashed_bytes += max(0, report.hashed_bytes - before.report.hashed_bytes)
            self._become(self._throttle.observe(lease.id, before.window(now_s, report)))
            self._decide(now_s)
        self._tell(lease)

    def detached(self, lease: Lease) -> None:
        """An inferd is gone."""
        self._throttle = self._throttle.forget(lease.id)
        self._marks.pop(lease.id, None)
        self._told.pop(lease.id, None)

    async def run(self) -> None:
        """Decide also where no reports come, until cancelled."""
        while True:
            await self._has_work.wait()
            self._decide(self._clock())
            await asyncio.sleep(TICK_S)

    def _choose_limits(self) -> None:
        part = PATIENT_PART if all(work.is_patient for work in self._works) else 1.0
        limits = replace(self._limits, above_share=self._limits.above_share * part)
        self._throttle = replace(self._throttle, limits=limits)

    # --- carrying it out -------------------------------------------------------------------------

    def _decide(self, now_s: float) -> None:
        self._become(self._throttle.tick(now_s, self._moved_bytes() - self._moved_before))

    def _moved_bytes(self) -> int:
        return self._gate.admitted_bytes + self._inferds_hashed_bytes

    def _become(self, after: Throttle) -> None:
        before, self._throttle = self._throttle, after
        if after.since_s != before.since_s:
            self._moved_before = self._moved_bytes()
        self._say(before, after)
        self._gate.set_rate(after.allowed)
        for lease in self._leases.values():
            self._tell(lease)

    def _tell(self, lease: Lease) -> None:
        """Have an inferd know how often to report and how fast to hash."""
        wanted = self._wanted()
        if lease.id not in self._told:
            self._told[lease.id] = (QUIET_REPORT_S, math.inf)
        if self._told[lease.id] != wanted and lease.id not in self._telling:
            self._telling.add(lease.id)
            self._spawn(self._send(lease))

    def _wanted(self) -> tuple[float, float]:
        return (TICK_S if self._works else QUIET_REPORT_S), self._throttle.allowed

    async def _send(self, lease: Lease) -> None:
        """Tell the newest, until that is what was told."""
        try:
            while self._told.get(lease.id, wanted := self._wanted()) != wanted:
                self._told[lease.id] = wanted
                await lease.set_pace(*wanted)
        except ChangeoverError as error:
            # Its lease is about to end, which is told elsewhere.
            log.info("pace.untold", inferd=lease.name, error=error.message)
        finally:
            self._telling.discard(lease.id)

    def _say(self, before: Throttle, after: Throttle) -> None:
        excess = after.excess
        if excess is None:
            if before.excess is not None:
                self._say_ended()
            return
        self._slowest = min(self._slowest, after.rate)
        if excess is before.excess:
            return
        lease = self._leases.get(excess.lease)
        model, inferd = (lease.model, lease.name) if lease is not None else ("", "")
        text = (
            f"inter-token latency of inferd {inferd} is {excess.latency_s * 1e3:.1f} ms, "
            f"{excess.baseline_s * 1e3:.1f} ms without copies"
        )
        facts: dict[str, Fact] = {
            "inferd": inferd,
            "inter_token_ms": round(excess.latency_s * 1e3, 3),
            "quiet_ms": round(excess.baseline_s * 1e3, 3),
            "bytes_per_s": round(after.rate),
            "work": ", ".join(work.name for work in self._works),
        }
        if before.excess is None:
            self._excess_s = after.since_s
            self._chronicle.record("throttle.began", text, model=model, version="", operation="", **facts)
        else:
            # Many in a long push: only the first is history.
            self._chronicle.publish("throttle.slower", text, model=model, version="", operation="", **facts)

    def _say_ended(self) -> None:
        seconds = self._clock() - self._excess_s
        self._chronicle.record(
            "throttle.ended",
            f"after {seconds:.1f} s, down to {self._slowest / 1e6:.0f} MB/s",
            seconds=round(seconds, 3),
            slowest_bytes_per_s=round(self._slowest),
        )
        self._slowest = math.inf
