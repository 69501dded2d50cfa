"""From a folder's name to a plan: opens the checkpoint and its seal, and asks the pure planner."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from loaderd.checkpoint.checkpoint import Checkpoint, open_checkpoint
from loaderd.config import ModelConfig
from loaderd.gpu_watch import GpuWatch
from loaderd.placement import PlacementRules
from loaderd.plan import Candidate, DeviceMemory, Plan, Serving, Verdict, plan_push
from loaderd.proof import Proof
from loaderd.remedy import SEAL_IT, SIGN_IT, remedied
from loaderd.seal.check import check_against
from loaderd.seal.document import Seal, read_seal
from loaderd.seal.scan import Progress
from loaderd.signature.check import SignedFolder, check_seal, check_signature, prove, unread_files
from loaderd.versions import Version, VersionTable
from shared.control import DevicePlanReport, PlanReport
from shared.digest import file_digest
from shared.errors import CheckpointError, PlanRefused
from shared.ids import DeviceId, VersionRef
from shared.memory.backend import MemoryBackend


@dataclass(frozen=True, slots=True)
class OpenedCheckpoint:
    """A checkpoint with its seal and signature, as far as it has them and they count; owns the checkpoint."""

    ref: VersionRef
    folder: str
    checkpoint: Checkpoint
    seal: Seal | None
    signed: SignedFolder | None = None

    @property
    def proof(self) -> Proof:
        """What a version that was loaded from it is held against."""
        if self.signed is not None:
            return Proof("signed", self.signed.key.hint)
        return Proof("digest" if self.seal is None else "sealed")

    @property
    def is_proven(self) -> bool:
        """Whether loading reads, and holds against something, all that the signature covers."""
        if self.signed is None:
            return True
        return self.seal is not None and not unread_files(self.checkpoint, self.signed)

    def proven(self, progress: Progress) -> OpenedCheckpoint:
        """The same with every file hashed that nothing else will be held against, and with a seal.

        Blocking, on as many threads as there are processors.  Raises SignatureRefused for a file that
        is not what was signed, CheckpointError for one that changes, and whatever `progress` raises.
        """
        if self.signed is None or self.is_proven:
            return self
        jobs = len(os.sched_getaffinity(0))
        seal = prove(self.checkpoint, self.signed, self.seal, jobs=jobs, progress=progress)
        return replace(self, seal=seal)

    def close(self) -> None:
        """Close the checkpoint; closing again does nothing."""
        self.checkpoint.close()


def open_checked(
    roots: Sequence[Path], folder: str, ref: VersionRef, config: ModelConfig
) -> OpenedCheckpoint:
    """What `Planner.open` gives.  Blocking."""
    with remedied(folder=folder):
        checkpoint = open_checkpoint(roots, folder)
    try:
        seal = signed = None
        if config.verify == "signed":
            # Before the seal is parsed: an altered one is told as such.
            with remedied(folder=folder):
                signed = check_signature(checkpoint, config.trusted_keys)
        if checkpoint.seal_bytes is not None:
            with remedied(SEAL_IT if signed is None else SIGN_IT, folder=folder):
                seal = read_seal(checkpoint.seal_bytes)
                check_against(checkpoint, seal)
                if signed is not None:
                    check_seal(signed, seal)
        elif config.verify == "sealed":
            raise CheckpointError(
                f"has no seal.json, and {ref.model} is served sealed only (seal it: `loaderctl seal DIR`)",
                file=folder,
            )
    except BaseException:
        checkpoint.close()
        raise
    return OpenedCheckpoint(ref, folder, checkpoint, seal, signed)


class Planner:
    """Plans pushes against what is resident.  Used from the event loop's thread only."""

    def __init__(
        self,
        roots: Sequence[Path],
        backend: MemoryBackend,
        versions: VersionTable,
        rules: PlacementRules,
        limit_bytes: int | None,
        gpus: GpuWatch,
    ) -> None:
        self._roots = tuple(roots)
        self._backend = backend
        self._versions = versions
        self._rules = rules
        self._limit_bytes = limit_bytes
        self._gpus = gpus

    async def open(self, folder: str, ref: VersionRef, config: ModelConfig) -> OpenedCheckpoint:
        """Open a folder below the model roots and hold it against its seal, and where the model's policy
        is `signed` against its signature; the caller owns the result.

        Raises UnknownVersion, CheckpointError or DigestMismatch with file, tensor and byte, and
        CheckpointError or SignatureRefused if the policy asks for what there is not.
        """
        opening = asyncio.ensure_future(asyncio.to_thread(open_checked, self._roots, folder, ref, config))
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            # The caller's deadline passed; the thread goes on, and what it opens is nobody's.
            opening.add_done_callback(_close_opened)
            raise

    def plan(
        self,
        opened: OpenedCheckpoint,
        devices: Sequence[DeviceId],
        active: Version | None,
        retained: Version | None,
    ) -> Plan:
        """Decide what a push to these devices would do, from what is resident now."""
        candidate = Candidate(
            name=opened.folder,
            tensors=opened.checkpoint.tensors,
            digests=opened.seal.tensor_digests if opened.seal is not None else {},
            config=opened.checkpoint.config,
            assets={name: file_digest(data) for name, data in opened.checkpoint.assets.items()},
            ignored=opened.checkpoint.ignored,
            is_signed=opened.signed is not None,
        )
        serving = None
        if active is not None:
            serving = Serving(
                name=self._versions.label(active),
                layout=active.content.layout,
                config=active.config,
                assets=active.asset_digests(),
            )
        memory = {
            device: DeviceMemory(
                self._backend.free_bytes(device), self._limit_bytes, self._gpus.holders(device)
            )
            for device in devices
        }
        return plan_push(
            candidate,
            serving,
            self._versions.residents(devices),
            memory,
            retained=self._versions.label(retained) if retained is not None else None,
            rules=self._rules,
        )


def _close_opened(opening: asyncio.Future[OpenedCheckpoint]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()


def check_hot(plan: Plan, folder: str) -> None:
    """Raise PlanRefused with the reasons unless the plan can be carried out while serving."""
    if plan.verdict is not Verdict.HOT:
        raise PlanRefused(f"{folder}: {'; '.join(plan.reasons)}", verdict=str(plan.verdict))


def plan_report(plan: Plan, opened: OpenedCheckpoint) -> PlanReport:
    """The plan as clients see it."""
    return PlanReport(
        name=opened.folder,
        verdict=plan.verdict.value,
        reasons=plan.reasons,
        warnings=plan.warnings,
        tensors=len(opened.checkpoint.tensors),
        bytes_total=plan.bytes_total,
        bytes_to_read=plan.bytes_to_read,
        bytes_to_share=plan.bytes_to_share,
        devices=tuple(
            DevicePlanReport(
                device=each.device,
                bytes_to_allocate=each.bytes_to_allocate,
                peak_bytes=each.peak_bytes,
                free_bytes=each.free_bytes,
            )
            for each in plan.devices
        ),
        sweep_first=plan.sweep_first,
        sealed=opened.seal is not None,
        signed=opened.signed is not None,
    )
