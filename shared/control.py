"""What travels on `control.sock` and `events.sock`: requests, replies, reports and events.

Times named `_ns` are nanoseconds: `deadline_ns` on CLOCK_MONOTONIC, which all processes of a host
share and no clock change moves; `time_ns` and `since_ns` on CLOCK_REALTIME, for people to read.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, TypeAdapter, model_validator

from shared.messages import Count, DigestText, InFlight, Name, Seconds, Tag, WireError, WireModel

Verified = Literal["digest", "sealed", "signed"]
"""What a version's bytes were held against when they were loaded: nothing but their own digest from then on,
the folder's seal, or what a trusted key had signed."""

# --- requests ------------------------------------------------------------------------------------


class Push(WireModel):
    """Load, verify, prepare and commit the checkpoint folder `name`."""

    verb: Literal["push"] = "push"
    name: Name
    model: Name | None = None
    dry_run: bool = False
    in_flight: InFlight = "finish"


class Rollback(WireModel):
    """Commit a version that is still resident: the retained one, or the one named `to`."""

    verb: Literal["rollback"] = "rollback"
    model: Name | None = None  # None: the only model there is
    to: Name | None = None  # version (`v1`) or folder (`smollm2-v1`)
    in_flight: InFlight = "finish"


class Status(WireModel):
    """Report everything that `loaderctl status` shows."""

    verb: Literal["status"] = "status"


class Versions(WireModel):
    """Report the versions that are resident and the folders that could be pushed."""

    verb: Literal["versions"] = "versions"


class History(WireModel):
    """Report the newest journal entries, oldest first."""

    verb: Literal["history"] = "history"
    model: Name | None = None
    limit: Annotated[int, Field(ge=1, le=1000)] = 50


class Operation(WireModel):
    """Report on one push or rollback; also how a client reattaches."""

    verb: Literal["operation"] = "operation"
    operation: Name


class Verify(WireModel):
    """Hash what is resident now and compare it with what was verified when it was loaded."""

    verb: Literal["verify"] = "verify"
    name: Name


class Diff(WireModel):
    """Compare two versions tensor by tensor."""

    verb: Literal["diff"] = "diff"
    before: Name
    after: Name


Verb = Annotated[
    Push | Rollback | Status | Versions | History | Operation | Verify | Diff, Field(discriminator="verb")
]


class Request(WireModel):
    """One request frame."""

    protocol: int
    request_id: Annotated[str, Field(min_length=1, max_length=64)]
    deadline_ns: Count
    body: Verb


# --- reports -------------------------------------------------------------------------------------

Verdict = Literal["hot", "cold", "refuse"]


class DevicePlanReport(WireModel):
    """What a push would do to the memory of one device."""

    device: str
    bytes_to_allocate: Count
    peak_bytes: Count
    free_bytes: Count


class PlanReport(WireModel):
    """What a push would do, decided before anything is changed."""

    name: str
    verdict: Verdict
    reasons: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    tensors: Count
    bytes_total: Count
    bytes_to_read: Count
    bytes_to_share: Count
    devices: tuple[DevicePlanReport, ...]  # each is to have a copy
    sweep_first: bool = False
    sealed: bool = False
    signed: bool = False  # by a trusted key


OperationState = Literal["running", "done", "refused", "failed", "superseded"]
Stage = Literal["planning", "hashing", "loading", "verifying", "preparing", "committing", "finished"]


class OperationReport(WireModel):
    """A push or rollback, as far as it has come.

    `refused`: the plan said no; `failed`: it broke before any inferd flipped, and the version before
    serves; `superseded`: a newer push took its place.  Once decided, a push is `done`.
    """

    operation: Name
    kind: Literal["push", "rollback", "restore"]
    model: Name
    version: Name
    state: OperationState
    stage: Stage
    digest: DigestText | None = None
    epoch: Count | None = None
    bytes_total: Count = 0
    bytes_read: Count = 0
    bytes_verified: Count = 0
    limit_bytes_per_s: Count | None = None  # while copies yield to decoding
    bytes_replicated: Count = 0  # copied from one device to others
    inferds_total: Count = 0
    inferds_prepared: Count = 0
    inferds_committed: Count = 0
    load_s: Seconds = 0.0
    verify_s: Seconds = 0.0
    replicate_s: Seconds = 0.0
    prepare_s: Seconds = 0.0
    commit_s: Seconds = 0.0
    in_flight: InFlight = "finish"
    requests_turned: Count = 0  # moved or ended by the policy, over all inferds
    flip_ns: tuple[Count, ...] = ()  # one per inferd: commit received → new version admissible
    started_ns: Count
    ended_ns: Count | None = None
    error: WireError | None = None
    warnings: tuple[str, ...] = ()


class HolderReport(WireModel):
    """Someone who keeps a version's memory."""

    inferd: str
    pid: Count
    device: str
    state: str
    references: Count
    age_s: Seconds


DAMAGED_SHOWN = 20
"""Names of damaged tensors in a report; `verify` names more."""


class VersionReport(WireModel):
    """A version that loaderd knows."""

    tag: Tag
    state: str
    since_ns: Count
    devices: tuple[str, ...]  # each has a copy
    nbytes: Count  # of one copy
    shared_bytes: Count = 0  # of nbytes, also used by another version
    tensors: Count
    verified: Verified
    epoch: Count | None = None
    damaged: tuple[str, ...] = ()  # tensors, the first DAMAGED_SHOWN
    holders: tuple[HolderReport, ...] = ()


class SlotReport(WireModel):
    """One of the two slots of an inferd."""

    slot: Annotated[int, Field(ge=0, lt=2)]
    state: str
    tag: Tag | None = None
    references: Count = 0
    age_s: Seconds = 0.0
    is_damaged: bool = False


class InferdReport(WireModel):
    """An attached inference daemon."""

    name: Name
    pid: Count
    uid: Count
    model: Name
    device: str
    lease: Count
    attached_s: Seconds
    serving: Tag | None = None
    epoch: Count | None = None
    slots: tuple[SlotReport, ...] = ()
    running: Count = 0
    waiting: Count = 0


class ModelReport(WireModel):
    """What serves, what can be rolled back to and what is under way, for one model."""

    model: Name
    active: Tag | None = None
    epoch: Count = 0
    retained: Tag | None = None
    operation: OperationReport | None = None


class MemoryReport(WireModel):
    """Weight memory of one device.  None: nothing tells."""

    device: str
    used_bytes: Count
    free_bytes: Count
    peak_bytes: Count
    total_bytes: Count | None = None
    pool_bytes: Count = 0  # kept for weights, in slabs or reserved
    reserved_bytes: Count = 0  # of the pool, not in a slab
    largest_free_bytes: Count | None = None
    fragmentation: Annotated[float, Field(ge=0, le=1)] = 0.0  # share of free that one slab cannot take
    nvml_free_bytes: Count | None = None
    uncorrected_errors: Count | None = None  # ECC, since the driver was loaded


class StatusReport(WireModel):
    """All that `loaderctl status` shows."""

    generation: str
    pid: Count
    uptime_s: Seconds
    backend: str
    memory: tuple[MemoryReport, ...]
    models: tuple[ModelReport, ...]
    versions: tuple[VersionReport, ...]
    inferds: tuple[InferdReport, ...]


class FolderReport(WireModel):
    """A checkpoint folder below a model root."""

    name: str
    root: str
    sealed: bool
    seal_fault: str = ""  # why its seal cannot be read, where it has one
    nbytes: Count
    resident: bool


class VersionsReport(WireModel):
    """Resident versions and pushable folders."""

    resident: tuple[VersionReport, ...]
    folders: tuple[FolderReport, ...]


class HistoryEntry(WireModel):
    """One journal entry."""

    sequence: Count
    time_ns: Count
    kind: str
    model: str = ""
    version: str = ""
    operation: str = ""
    cause: str = ""
    data: dict[str, str | int | float] = Field(default_factory=dict)


class HistoryReport(WireModel):
    """Journal entries, oldest first."""

    entries: tuple[HistoryEntry, ...]


class VerifyReport(WireModel):
    """Outcome of hashing the resident bytes of every copy; `damaged` names tensors whose bytes changed."""

    tag: Tag
    against: Verified
    devices: tuple[str, ...]  # whose copies were hashed
    tensors: Count
    nbytes: Count  # of all copies
    seconds: Seconds
    damaged: tuple[str, ...] = ()
    damaged_devices: tuple[str, ...] = ()


class DiffReport(WireModel):
    """Tensors and files in which two versions differ; sizes are bytes of `after`."""

    before: str
    after: str
    changed: tuple[str, ...]
    added: tuple[str, ...]
    removed: tuple[str, ...]
    reshaped: tuple[str, ...]
    files_changed: tuple[str, ...]
    changed_bytes: Count
    total_bytes: Count
    truncated: bool = False  # the name lists were cut; the byte counts were not


class PushReply(WireModel):
    """A push was planned; `operation` is None for a dry run or a refusal."""

    operation: Name | None
    plan: PlanReport


class RollbackReply(WireModel):
    """A rollback was started."""

    operation: Name


Result = (
    PushReply
    | RollbackReply
    | StatusReport
    | VersionsReport
    | HistoryReport
    | OperationReport
    | VerifyReport
    | DiffReport
)


class Reply(WireModel):
    """One reply frame: a result or an error, never both."""

    protocol: int
    request_id: str
    result: Result | None = None
    error: WireError | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.result is None) == (self.error is None):
            raise ValueError("a reply is a result or an error")
        return self


class Event(WireModel):
    """One event frame; `sequence` grows by one within a generation, so a gap is a lost event."""

    protocol: int
    generation: str
    sequence: Count
    time_ns: Count
    kind: str
    model: str = ""
    version: str = ""
    operation: str = ""
    text: str = ""
    data: dict[str, str | int | float] = Field(default_factory=dict)


REQUEST: TypeAdapter[Request] = TypeAdapter(Request)
REPLY: TypeAdapter[Reply] = TypeAdapter(Reply)
EVENT: TypeAdapter[Event] = TypeAdapter(Event)
