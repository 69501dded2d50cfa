"""Carries a rollout out: asks leases, writes the decision, and feeds answers back to the machine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass

import structlog

from loaderd.chronicle import Chronicle
from loaderd.leases import Lease
from loaderd.operations import Operation, Operations
from loaderd.pace import Pace
from loaderd.proof import Proof
from loaderd.rollout import (
    Abandoned,
    CommitBroke,
    Committed,
    DecisionFailed,
    DecisionLogged,
    Fence,
    Finish,
    Instruction,
    LogDecision,
    PrepareBroke,
    Prepared,
    Rollout,
    RolloutEvent,
    SendCommit,
    SendRelease,
)
from shared.errors import ChangeoverError, DeadlineExceeded, PeerGone, PrepareFailed
from shared.ids import DeviceId, Epoch, LeaseId, VersionTag
from shared.resident import ResidentVersion

ANSWER_GRACE_S = 5.0


log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RolloutLimits:
    """How long the steps of a rollout may take, in seconds; before prepare a slot may have to drain."""

    prepare_s: float
    commit_s: float
    drain_s: float


class RolloutDriver:
    """One rollout of one resident version over the leases of its model, each given the copy on its device."""

    def __init__(
        self,
        tag: VersionTag,
        proof: Proof,
        copies: Mapping[DeviceId, ResidentVersion],
        epoch: Epoch,
        leases: Mapping[LeaseId, Lease],
        limits: RolloutLimits,
        operation: Operation,
        operations: Operations,
        chronicle: Chronicle,
        pace: Pace,
    ) -> None:
        self._pace = pace
        self.tag = tag
        self._proof = proof
        self._copies = copies
        self._epoch = epoch
        self._leases = leases
        self._limits = limits
        self._operation = operation
        self._operations = operations
        self._chronicle = chronicle
        self._events: asyncio.Queue[RolloutEvent] = asyncio.Queue()
        # Where it is prepared already, a rollout that comes to nothing leaves it so.
        self._had_it = frozenset(lease.id for lease in leases.values() if lease.has_prepared(tag))

    def abandon(self, error: ChangeoverError) -> None:
        """Give the rollout up if it is not decided yet."""
        self._events.put_nowait(Abandoned(error))

    async def run(self) -> None:
        """Return once the version is active; raises the reason if it was abandoned.

        Answers that are still due then are waited for, so that nobody is left half prepared.
        """
        started = time.perf_counter()
        decided = started
        outcome: Finish | None = None
        rollout, instructions = Rollout.begin(frozenset(self._leases))
        self._operation.inferds_total = len(self._leases)
        self._operation.inferds_prepared = 0
        self._operation.inferds_committed = 0
        async with asyncio.TaskGroup() as tasks:
            for lease in self._leases.values():
                tasks.create_task(self._prepare(lease))
            # Last resort: each inferd's answer comes before, and says more.
            limit_s = self._limits.drain_s + self._limits.prepare_s + ANSWER_GRACE_S
            deadline = asyncio.get_running_loop().call_later(
                limit_s,
                self.abandon,
                DeadlineExceeded(f"{self.tag.ref} was not prepared within {limit_s:g} s"),
            )
            try:
                while True:
                    for instruction in instructions:
                        if isinstance(instruction, Finish):
                            outcome = instruction
                        else:
                            self._carry_out(instruction, tasks)
                    if outcome is not None:
                        break
                    event = await self._events.get()
                    if isinstance(event, DecisionLogged):
                        decided = time.perf_counter()
                        self._operation.prepare_s = decided - started
                    self._count(event)
                    rollout, instructions = rollout.handle(event)
            finally:
                deadline.cancel()
        if outcome.error is not None:
            raise outcome.error
        self._operation.commit_s = time.perf_counter() - decided

    def _carry_out(self, instruction: Instruction, tasks: asyncio.TaskGroup) -> None:
        match instruction:
            case LogDecision():
                tasks.create_task(self._decide())
            case SendCommit(lease_id):
                tasks.create_task(self._commit(self._leases[lease_id]))
            case SendRelease(lease_id):
                tasks.create_task(self._release(self._leases[lease_id]))
            case Fence(lease_id):
                lease = self._leases[lease_id]
                self._chronicle.record(
                    "rollout.straggler",
                    f"inferd {lease.name} did not confirm epoch {self._epoch}; its lease ends",
                    model=lease.model,
                    inferd=lease.name,
                    epoch=self._epoch,
                )
                self._operation.warnings.append(f"inferd {lease.name} did not confirm the flip")
                lease.close()

    async def _decide(self) -> None:
        self._operations.enter(self._operation, "committing")
        for lease in self._leases.values():
            try:
                await lease.announce(self.tag, self._epoch, self._operation.in_flight)
            except ChangeoverError as error:
                # Its commit will fail as well, and say so.
                log.info("announce.failed", inferd=lease.name, error=error.message)
        try:
            self._chronicle.journal.commit(
                self.tag,
                self._proof,
                self._epoch,
                self._operation.id,
                f"{len(self._leases)} inferds prepared",
            )
        except ChangeoverError as error:
            self._events.put_nowait(DecisionFailed(error))
        else:
            self._events.put_nowait(DecisionLogged())

    def _count(self, event: RolloutEvent) -> None:
        match event:
            case Prepared():
                self._operation.inferds_prepared += 1
                self._operations.progress(self._operation)
            case Committed():
                self._operation.inferds_committed += 1
            case _:
                pass

    async def _prepare(self, lease: Lease) -> None:
        event: RolloutEvent
        try:
            if lease.id not in self._had_it:
                with self._pace.work(f"preparing {self.tag.ref}"):
                    done = await lease.prepare(
                        self._copies[lease.device], self._limits.prepare_s, self._limits.drain_s
                    )
                self._chronicle.publish(
                    "inferd.prepared",
                    f"inferd {lease.name} prepared {self.tag.ref}",
                    model=lease.model,
                    version=self.tag.ref.version,
                    operation=self._operation.id,
                    inferd=lease.name,
                    map_s=done.map_s,
                    verify_s=done.verify_s,
                    build_s=done.build_s,
                    warm_s=done.warm_s,
                )
            event = Prepared(lease.id)
        except PrepareFailed as error:
            event = PrepareBroke(lease.id, error)
        except ChangeoverError as error:
            what = "went away while it prepared" if isinstance(error, PeerGone) else error.message
            event = PrepareBroke(lease.id, PrepareFailed(f"inferd {lease.name}: {what}", inferd=lease.name))
        self._events.put_nowait(event)

    async def _commit(self, lease: Lease) -> None:
        event: RolloutEvent
        try:
            committed = await lease.commit(
                self.tag, self._epoch, self._limits.commit_s, self._operation.in_flight
            )
        except ChangeoverError as error:
            event = CommitBroke(lease.id, error)
        else:
            self._operation.flip_ns.append(committed.flip_ns)
            self._operation.requests_turned += committed.requests_turned
            event = Committed(lease.id)
        self._events.put_nowait(event)

    async def _release(self, lease: Lease) -> None:
        if lease.id in self._had_it:
            return
        try:
            await lease.release(self.tag, self._limits.drain_s)
        except ChangeoverError as error:
            self._chronicle.record(
                "inferd.release_failed", error.message, model=lease.model, inferd=lease.name
            )
