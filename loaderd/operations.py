"""Pushes and rollbacks as clients see them: one report per operation, and the newest ones kept."""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Literal

from loaderd.chronicle import Chronicle
from shared.control import OperationReport, OperationState, Stage
from shared.errors import ChangeoverError, InvalidRequest, PlanRefused, Superseded
from shared.ids import Epoch, OperationId, VersionRef, VersionTag
from shared.messages import InFlight, WireError

OPERATIONS_KEPT = 200
PROGRESS_EVERY_S = 0.1

Kind = Literal["push", "rollback", "restore"]


def new_operation_id() -> OperationId:
    """An id that sorts by time and is unique across restarts."""
    return OperationId(f"{time.time_ns() // 1_000_000:013d}-{secrets.token_hex(3)}")


@dataclass(slots=True)
class Operation:
    """One push, rollback or restore under way or ended.  Used from the event loop's thread only;
    the byte counters may lag behind the threads that do the work."""

    id: OperationId
    kind: Kind
    ref: VersionRef
    in_flight: InFlight = "finish"
    started_ns: int = field(default_factory=time.time_ns)
    state: OperationState = "running"
    stage: Stage = "planning"
    tag: VersionTag | None = None
    epoch: Epoch | None = None
    bytes_total: int = 0
    bytes_read: int = 0
    bytes_verified: int = 0
    limit_bytes_per_s: int | None = None
    bytes_replicated: int = 0
    inferds_total: int = 0
    inferds_prepared: int = 0
    inferds_committed: int = 0
    load_s: float = 0.0
    verify_s: float = 0.0
    replicate_s: float = 0.0
    prepare_s: float = 0.0
    commit_s: float = 0.0
    requests_turned: int = 0
    flip_ns: list[int] = field(default_factory=list)
    ended_ns: int | None = None
    error: ChangeoverError | None = None
    warnings: list[str] = field(default_factory=list)
    superseded_by: OperationId | None = None

    @property
    def is_running(self) -> bool:
        """Not ended."""
        return self.ended_ns is None

    def check_not_superseded(self) -> None:
        """Raise Superseded if a newer push of the model took this one's place."""
        if self.superseded_by is not None:
            raise self.superseded_error()

    def superseded_error(self) -> Superseded:
        """Why this operation does not go on."""
        return Superseded(f"superseded by {self.superseded_by}", by=self.superseded_by or "")

    def report(self) -> OperationReport:
        """The operation as clients see it."""
        return OperationReport(
            operation=self.id,
            kind=self.kind,
            model=self.ref.model,
            version=self.ref.version,
            state=self.state,
            stage=self.stage,
            digest=self.tag.digest if self.tag is not None else None,
            epoch=self.epoch,
            bytes_total=self.bytes_total,
            bytes_read=self.bytes_read,
            bytes_verified=self.bytes_verified,
            limit_bytes_per_s=self.limit_bytes_per_s if self.is_running else None,
            bytes_replicated=self.bytes_replicated,
            inferds_total=self.inferds_total,
            inferds_prepared=self.inferds_prepared,
            inferds_committed=self.inferds_committed,
            load_s=self.load_s,
            verify_s=self.verify_s,
            replicate_s=self.replicate_s,
            prepare_s=self.prepare_s,
            commit_s=self.commit_s,
            in_flight=self.in_flight,
            requests_turned=self.requests_turned,
            flip_ns=tuple(self.flip_ns),
            started_ns=self.started_ns,
            ended_ns=self.ended_ns,
            error=WireError.of(self.error) if self.error is not None else None,
            warnings=tuple(self.warnings),
        )


class Operations:
    """The operations of this generation; running ones are never forgotten."""

    def __init__(self, chronicle: Chronicle) -> None:
        self._chronicle = chronicle
        self._operations: OrderedDict[OperationId, Operation] = OrderedDict()

    def start(self, kind: Kind, ref: VersionRef, in_flight: InFlight = "finish") -> Operation:
        """A new running operation."""
        operation = Operation(new_operation_id(), kind, ref, in_flight)
        self._operations[operation.id] = operation
        for known in list(self._operations.values()):
            if len(self._operations) <= OPERATIONS_KEPT:
                break
            if not known.is_running:
                del self._operations[known.id]
        self._chronicle.record(
            "operation.started", kind, model=ref.model, version=ref.version, operation=operation.id
        )
        return operation

    def get(self, operation_id: str) -> Operation:
        """The operation with this id; raises InvalidRequest if there is none in this generation."""
        operation = self._operations.get(OperationId(operation_id))
        if operation is None:
            raise InvalidRequest(f"no operation {operation_id} since loaderd started", operation=operation_id)
        return operation

    def enter(self, operation: Operation, stage: Stage) -> None:
        """Move an operation to its next stage."""
        operation.stage = stage
        self._tell(operation, "operation.stage", stage)

    def progress(self, operation: Operation) -> None:
        """Publish the counters; the caller limits how often."""
        self._tell(operation, "operation.progress", operation.stage)

    def end(self, operation: Operation, error: ChangeoverError | None) -> None:
        """End an operation; the state follows from the error."""
        operation.ended_ns = time.time_ns()
        operation.error = error
        match error:
            case None:
                operation.state, operation.stage = "done", "finished"
            case PlanRefused():
                operation.state = "refused"
            case Superseded():
                operation.state = "superseded"
            case _:
                operation.state = "failed"
        self._chronicle.record(
            "operation.ended",
            error.message if error is not None else "done",
            model=operation.ref.model,
            version=operation.ref.version,
            operation=operation.id,
            state=operation.state,
        )

    def _tell(self, operation: Operation, kind: str, text: str) -> None:
        self._chronicle.publish(
            kind,
            text,
            model=operation.ref.model,
            version=operation.ref.version,
            operation=operation.id,
            bytes_total=operation.bytes_total,
            bytes_read=operation.bytes_read,
            bytes_verified=operation.bytes_verified,
            inferds_total=operation.inferds_total,
            inferds_prepared=operation.inferds_prepared,
            inferds_committed=operation.inferds_committed,
        )
