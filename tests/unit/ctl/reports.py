"""Reports as a daemon would send them, with the numbers that tests look for."""

from __future__ import annotations

from shared.control import (
    DevicePlanReport,
    DiffReport,
    FolderReport,
    HistoryEntry,
    HistoryReport,
    HolderReport,
    InferdReport,
    MemoryReport,
    ModelReport,
    OperationReport,
    PlanReport,
    PushReply,
    SlotReport,
    StatusReport,
    VerifyReport,
    VersionReport,
    VersionsReport,
)
from shared.messages import Tag, WireError

OPERATION = "1750000000000-5eed01"
MIB = 1 << 20
GIB = 1 << 30
DIGEST_1 = "sha256:" + "1a" * 32
DIGEST_2 = "sha256:" + "2b" * 32
V1 = Tag(model="smollm2", version="v1", digest=DIGEST_1)
V2 = Tag(model="smollm2", version="v2", digest=DIGEST_2)
STARTED_NS = 1_750_000_000_000_000_000


def plan(**changes: object) -> PlanReport:
    """A plan that is hot unless a test changes it."""
    fields: dict[str, object] = {
        "name": "smollm2-v2",
        "verdict": "hot",
        "tensors": 272,
        "bytes_total": 257 * MIB,
        "bytes_to_read": 64 * MIB,
        "bytes_to_share": 193 * MIB,
        "devices": (on_device("host"),),
        "sealed": True,
        **changes,
    }
    return PlanReport(**fields)  # type: ignore[arg-type]


def on_device(device: str, **changes: int) -> DevicePlanReport:
    """What the plan means for one device."""
    fields = {"bytes_to_allocate": 64 * MIB, "peak_bytes": 66 * MIB, "free_bytes": 6 * GIB, **changes}
    return DevicePlanReport(device=device, **fields)


def push_reply(operation: str | None = OPERATION, **changes: object) -> PushReply:
    """A push that was planned and, unless `operation` is None, started."""
    return PushReply(operation=operation, plan=plan(**changes))


def operation(**changes: object) -> OperationReport:
    """A push that loads, unless a test changes it."""
    fields: dict[str, object] = {
        "operation": OPERATION,
        "kind": "push",
        "model": "smollm2",
        "version": "v2",
        "state": "running",
        "stage": "loading",
        "bytes_total": 64 * MIB,
        "bytes_read": 16 * MIB,
        "inferds_total": 2,
        "load_s": 0.25,
        "started_ns": STARTED_NS,
        **changes,
    }
    return OperationReport(**fields)  # type: ignore[arg-type]


def ended(state: str = "done", **changes: object) -> OperationReport:
    """A push that has ended; done unless a test changes it."""
    fields: dict[str, object] = {
        "state": state,
        "stage": "finished",
        "digest": DIGEST_2,
        "epoch": 7,
        "bytes_read": 64 * MIB,
        "bytes_verified": 64 * MIB,
        "inferds_prepared": 2,
        "inferds_committed": 2 if state == "done" else 0,
        "load_s": 0.5,
        "verify_s": 0.125,
        "prepare_s": 1.5,
        "commit_s": 0.0021,
        "flip_ns": (18_400, 21_950) if state == "done" else (),
        "ended_ns": STARTED_NS + 3_000_000_000,
        **changes,
    }
    return operation(**fields)


def a_whole_push() -> list[OperationReport]:
    """Every stage of a push that ends well."""
    return [
        operation(stage="planning", bytes_read=0, load_s=0.0),
        operation(),
        operation(bytes_read=48 * MIB, load_s=0.375),
        operation(stage="verifying", bytes_read=64 * MIB, bytes_verified=32 * MIB, verify_s=0.0625),
        operation(stage="preparing", bytes_read=64 * MIB, bytes_verified=64 * MIB, inferds_prepared=1),
        operation(stage="committing", bytes_read=64 * MIB, bytes_verified=64 * MIB, inferds_prepared=2),
        ended(),
    ]


def wire_error(code: str, message: str) -> WireError:
    """An error inside a report."""
    return WireError(code=code, message=message)


def versions() -> tuple[VersionReport, ...]:
    """Two versions, the retained one still held."""
    holder = HolderReport(
        inferd="replica-0", pid=4242, device="host", state="serving", references=3, age_s=61.0
    )
    late = HolderReport(
        inferd="replica-1", pid=4243, device="host", state="draining", references=1, age_s=4000.0
    )
    return (
        VersionReport(
            tag=V1,
            state="retained",
            since_ns=STARTED_NS,
            devices=("host",),
            nbytes=257 * MIB,
            shared_bytes=193 * MIB,
            tensors=272,
            verified="digest",
            epoch=6,
            holders=(late,),
        ),
        VersionReport(
            tag=V2,
            state="active",
            since_ns=STARTED_NS,
            devices=("host",),
            nbytes=257 * MIB,
            shared_bytes=193 * MIB,
            tensors=272,
            verified="sealed",
            epoch=7,
            holders=(holder,),
        ),
    )


def status(**changes: object) -> StatusReport:
    """A daemon with one model, one inferd and a push under way."""
    slots = (
        SlotReport(slot=0, state="retained", tag=V1, references=0, age_s=12.0),
        SlotReport(slot=1, state="serving", tag=V2, references=3, age_s=12.0),
    )
    inferd = InferdReport(
        name="replica-0",
        pid=4242,
        uid=990,
        model="smollm2",
        device="host",
        lease=1,
        attached_s=7384.0,
        serving=V2,
        epoch=7,
        slots=slots,
        running=3,
        waiting=0,
    )
    fields: dict[str, object] = {
        "generation": "5b0c6f0e-7f0e-4c6f-9a53-3c0f1a1f4a11",
        "pid": 4100,
        "uptime_s": 7400.0,
        "backend": "host",
        "memory": (
            MemoryReport(device="host", used_bytes=321 * MIB, free_bytes=6 * GIB, peak_bytes=387 * MIB),
        ),
        "models": (ModelReport(model="smollm2", active=V2, epoch=7, retained=V1, operation=operation()),),
        "versions": versions(),
        "inferds": (inferd,),
        **changes,
    }
    return StatusReport(**fields)  # type: ignore[arg-type]


def versions_report() -> VersionsReport:
    """Two resident versions and two folders."""
    return VersionsReport(
        resident=versions(),
        folders=(
            FolderReport(name="smollm2-v2", root="/srv/models", sealed=True, nbytes=257 * MIB, resident=True),
            FolderReport(
                name="smollm2-v3", root="/srv/models", sealed=False, nbytes=257 * MIB, resident=False
            ),
            FolderReport(
                name="smollm2-v4",
                root="/srv/models",
                sealed=False,
                seal_fault="seal.json: byte 0: is not valid JSON",
                nbytes=257 * MIB,
                resident=False,
            ),
        ),
    )


def history() -> HistoryReport:
    """Two journal entries."""
    return HistoryReport(
        entries=(
            HistoryEntry(
                sequence=41,
                time_ns=STARTED_NS,
                kind="operation.started",
                model="smollm2",
                version="v2",
                operation=OPERATION,
                cause="push",
            ),
            HistoryEntry(
                sequence=42,
                time_ns=STARTED_NS + 3_000_000_000,
                kind="version.state",
                model="smollm2",
                version="v2",
                operation=OPERATION,
                cause="all inferds committed",
                data={"epoch": 7, "state": "active"},
            ),
        )
    )


def verification(damaged: tuple[str, ...] = ()) -> VerifyReport:
    """A version hashed where it lies."""
    return VerifyReport(
        tag=V2,
        against="sealed",
        devices=("host",),
        tensors=272,
        nbytes=257 * MIB,
        seconds=0.25,
        damaged=damaged,
        damaged_devices=("host",) if damaged else (),
    )


def difference() -> DiffReport:
    """Two versions that differ in a few tensors."""
    return DiffReport(
        before="smollm2-v1",
        after="smollm2-v2",
        changed=("model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"),
        added=(),
        removed=(),
        reshaped=(),
        files_changed=("config.json",),
        changed_bytes=64 * MIB,
        total_bytes=257 * MIB,
    )


def gpu_memory() -> MemoryReport:
    """Memory of a GPU with a pool, of which NVML tells too."""
    return MemoryReport(
        device="GPU-1",
        used_bytes=24 * GIB,
        free_bytes=15 * GIB,
        peak_bytes=24 * GIB,
        total_bytes=80 * GIB,
        pool_bytes=32 * GIB,
        reserved_bytes=8 * GIB,
        largest_free_bytes=12 * GIB,
        fragmentation=0.2,
        nvml_free_bytes=7 * GIB,
        uncorrected_errors=3,
    )
