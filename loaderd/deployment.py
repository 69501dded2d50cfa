"""One model on this host: what is active, what is retained, and the operations that change it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import closing
from typing import Any

from loaderd.compatibility import compare_assets, is_tokenizer_file
from loaderd.config import ModelConfig
from loaderd.host import Host
from loaderd.leases import Lease
from loaderd.lifecycle import VersionEvent, VersionState
from loaderd.operations import Kind, Operation
from loaderd.planning import OpenedCheckpoint
from loaderd.remedy import remedied
from loaderd.rollout_driver import RolloutDriver, RolloutLimits
from loaderd.version_load import VersionLoad
from loaderd.versions import Version, cause_of
from shared.control import ModelReport
from shared.errors import (
    ChangeoverError,
    DigestMismatch,
    InvalidRequest,
    PlanRefused,
    UnknownVersion,
)
from shared.ids import Digest, Epoch, LeaseId, VersionRef, VersionTag
from shared.messages import InFlight, Tag

_ON_ITS_WAY = frozenset({VersionState.RESIDENT, VersionState.PREPARING, VersionState.PREPARED})


class Deployment:
    """One model's versions.  Used from the event loop's thread only.

    Operations run one after the other; a push or rollback that is asked for while another has not
    been decided yet supersedes it.  Between prepare and commit nobody else may touch the slots.
    """

    def __init__(self, model: str, config: ModelConfig, host: Host) -> None:
        """Raises InvalidRequest where the configuration chooses no device for the model."""
        self.model = model
        self.devices = host.devices.of(model)
        self.config = config
        self.epoch = Epoch(0)
        self.active: Version | None = None
        self.retained: Version | None = None
        self._host = host
        self.one_operation = asyncio.Lock()
        self.slots_in_hand = asyncio.Lock()
        self._newest: Operation | None = None
        self._current: Operation | None = None  # under way, not queued; None while a restore is
        self._loading: VersionLoad | None = None
        self._rollout: RolloutDriver | None = None

    # --- what it has -----------------------------------------------------------------------------

    def leases(self) -> dict[LeaseId, Lease]:
        """The leases of this model's inferds."""
        return {key: lease for key, lease in self._host.leases.items() if lease.model == self.model}

    def report(self) -> ModelReport:
        """This model as the status shows it."""
        return ModelReport(
            model=self.model,
            active=Tag.of(self.active.tag) if self.active is not None else None,
            epoch=self.epoch,
            retained=Tag.of(self.retained.tag) if self.retained is not None else None,
            operation=self._newest.report() if self._newest is not None else None,
        )

    @property
    def failure(self) -> str:
        """How the newest operation failed; empty if it did not."""
        newest = self._newest
        if newest is None or newest.error is None:
            return ""
        return f"{newest.kind} of {newest.ref} {newest.state}: {newest.error.message}"

    # --- push ------------------------------------------------------------------------------------

    def push(self, take_opened: OpenedCheckpoint, in_flight: InFlight) -> Operation:
        """Start a push; owns the checkpoint from here."""
        operation = self._begin("push", take_opened.ref, in_flight)
        self._host.spawn(self._run(operation, self._push(operation, take_opened), take_opened))
        return operation

    async def _push(
        self, operation: Operation, opened: OpenedCheckpoint, expected: Digest | None = None
    ) -> None:
        version = await self._load(operation, opened, expected)
        opened.close()
        try:
            async with self.slots_in_hand:
                # Asked only now: while this waited, an inferd may have handed the same content back.
                if not await self._is_resident_twice(operation, version):
                    await self._activate(operation, version)
        except BaseException as error:
            if version.state in _ON_ITS_WAY:
                self._host.versions.advance(version, VersionEvent.FAIL, cause_of(error), operation.id)
                self._host.collect()
            raise

    async def _load(self, operation: Operation, opened: OpenedCheckpoint, expected: Digest | None) -> Version:
        with (
            VersionLoad(operation, opened, self.devices, self._host) as load,
            remedied(folder=opened.folder),
        ):
            self._loading = load
            try:
                await load.prove()
                await self._host.closer.settle()
                # Planned here, not when the client was answered: an operation before this one may have
                # changed what is resident.
                if load.plan(self.active, self.retained).sweep_first:
                    await self._sweep_retained(f"its memory is needed for {operation.ref}")
                return await load.read(expected)
            finally:
                self._loading = None

    async def _is_resident_twice(self, operation: Operation, version: Version) -> bool:
        """End a push whose content is what serves; turn one of what is retained into a rollback.  What is
        damaged is no twin: the push heals it.  What the new copy was held against counts for its twin."""
        twin = next((v for v in (self.active, self.retained) if v is not None and v.tag == version.tag), None)
        if twin is None:
            return False
        versions = self._host.versions
        if versions.damaged(twin):
            if twin is self.retained:
                self.retained = None
                await self._sweep(twin, "it is damaged")
            return False
        proof = twin.proof.with_later(version.proof)
        if twin is self.active and proof != twin.proof:
            # As durable as what the commit says: a signature by a new key is to count after a restart.
            cause = f"pushed again: {proof.verified}"
            self._host.chronicle.journal.commit(twin.tag, proof, self.epoch, operation.id, cause)
        twin.proof = proof
        cause = f"only this copy: the same content is {twin.state} already"
        versions.advance(version, VersionEvent.SWEEP, cause, operation.id)
        self._host.collect()
        if twin is self.active:
            operation.epoch = twin.epoch
            operation.warnings.append(f"{twin.tag} serves already; nothing was changed")
            return True
        operation.warnings.append(f"{twin.tag} was retained; it was committed without using the new copy")
        await self._activate_again(operation, twin)
        return True

    # --- rollback --------------------------------------------------------------------------------

    def rollback(self, to: str | None, in_flight: InFlight) -> Operation:
        """Start to commit a version that is still resident.

        Raises InvalidRequest if nothing is retained, UnknownVersion if `to` is not resident, DigestMismatch
        if it is damaged.
        """
        target = self._rollback_target(to)
        operation = self._begin("rollback", target.ref, in_flight)
        self._host.spawn(self._run(operation, self._roll_back(operation, target), None))
        return operation

    def has(self, folder: str) -> bool:
        """Whether `folder`, as a version of this model is named in full, is active or retained here."""
        return any(v is not None and str(v.ref) == folder for v in (self.active, self.retained))

    def _rollback_target(self, to: str | None) -> Version:
        if to is None:
            if self.retained is None:
                raise InvalidRequest(f"no version of {self.model} is retained: nothing to roll back to")
            self.check_sound(self.retained)
            return self.retained
        for version in (self.retained, self.active):
            if version is not None and to in (version.ref.version, str(version.ref), str(version.tag)):
                self.check_sound(version)
                return version
        raise UnknownVersion(f"{to} of {self.model} is not resident; push it instead", name=to)

    async def _roll_back(self, operation: Operation, target: Version) -> None:
        async with self.slots_in_hand:
            if target is self.active:
                operation.epoch, operation.tag = target.epoch, target.tag
                operation.warnings.append(f"{target.tag} serves already; nothing was changed")
                return
            if target is not self.retained:
                raise InvalidRequest(f"{target.ref} is no longer retained")
            await self._activate_again(operation, target)

    async def _activate_again(self, operation: Operation, target: Version) -> None:
        operation.tag = target.tag
        try:
            await self._activate(operation, target)
        except BaseException as error:
            if target.state in _ON_ITS_WAY:
                self._host.versions.advance(target, VersionEvent.RETAIN, cause_of(error), operation.id)
            raise

    # --- prepare, commit, retain, sweep ----------------------------------------------------------

    async def _activate(self, operation: Operation, version: Version) -> None:
        """Prepare on every inferd, commit, and let what was active be retained; the caller holds
        `slots_in_hand`."""
        operation.check_not_superseded()
        self.check_sound(version)
        self._check_tokens_keep_their_meaning(operation, version)
        self._host.operations.enter(operation, "preparing")
        for lease in tuple(self.leases().values()):
            if not lease.has_prepared(version.tag):
                await self._host.copies.on(lease.device, version)
        versions = self._host.versions
        versions.advance(version, VersionEvent.PREPARE, operation.kind, operation.id)
        epoch = Epoch(self.epoch + 1)
        driver = RolloutDriver(
            version.tag,
            version.proof,
            version.copies,
            epoch,
            self.leases(),
            self._limits(),
            operation,
            self._host.operations,
            self._host.chronicle,
            self._host.pace,
        )
        self._rollout = driver
        try:
            await driver.run()
        except ChangeoverError:
            # The push needed the slot that held the way back; prepare it there again.
            for lease in self.leases().values():
                await self.prepare_retained(lease)
            raise
        finally:
            self._rollout = None
        operation.epoch = version.epoch = self.epoch = epoch
        versions.advance(version, VersionEvent.PREPARED, "prepared everywhere", operation.id)
        versions.advance(version, VersionEvent.COMMIT, f"epoch {epoch}", operation.id)
        before, self.active = self.active, version
        if self.retained is version:
            self.retained = None
        if before is not None:
            versions.advance(before, VersionEvent.RETAIN, f"{version.ref} is active", operation.id)
            out, self.retained = self.retained, before
            if out is not None:
                await self._sweep(out, f"{before.ref} is retained instead")
            if versions.damaged(before):
                self.retained = None
                await self._sweep(before, "it is damaged, and no way back")
        # After a restart, what served may be damaged and have the same tag.
        await self._release_everywhere(version.tag)
        self._host.collect()

    def check_sound(self, version: Version) -> None:
        """Raise DigestMismatch where bytes of a version have changed since they were verified."""
        damaged = self._host.versions.damaged(version)
        if damaged:
            raise DigestMismatch(
                f"{version.tag} is damaged where it is resident ({len(damaged)} tensors); push it again",
                file=version.files.get(damaged[0], str(version.ref)),
                tensor=damaged[0],
            )

    def _check_tokens_keep_their_meaning(self, operation: Operation, version: Version) -> None:
        """Raise PlanRefused where requests would be carried over to a version with another tokenizer."""
        if operation.in_flight not in ("switch", "restart") or self.active is None:
            return
        changed = compare_assets(version.asset_digests(), self.active.asset_digests())
        tokenizer = [name for name in changed if is_tokenizer_file(name)]
        if tokenizer:
            raise PlanRefused(
                f"in-flight policy {operation.in_flight!r} needs one tokenizer: "
                f"{', '.join(tokenizer)} of {version.ref} differs from {self.active.ref}'s"
            )

    async def _sweep_retained(self, cause: str) -> None:
        async with self.slots_in_hand:  # it may just be prepared on an inferd that attached
            if self.retained is not None:
                out, self.retained = self.retained, None
                await self._sweep(out, cause)
        await self._host.closer.settle()

    async def _sweep(self, version: Version, cause: str) -> None:
        """Have nobody map a retained version any more, then free it; who does not let go keeps it."""
        self._host.versions.advance(version, VersionEvent.SWEEP, cause)
        await self._host.checks.end(version.user)
        await self._release_everywhere(version.tag)
        self._host.collect()

    async def _release_everywhere(self, tag: VersionTag) -> None:
        """Have every inferd let go of a version; of the active one, only of slots in which it is damaged."""
        async with asyncio.TaskGroup() as releases:
            for lease in self.leases().values():
                is_renewed = self.active is not None and self.active.tag == tag
                if lease.holds_damaged(tag) if is_renewed else lease.holds(tag):
                    releases.create_task(self._release(lease, tag))

    async def _release(self, lease: Lease, tag: VersionTag) -> None:
        try:
            await lease.release(tag, self.config.drain_timeout_s)
        except ChangeoverError as error:
            self._host.chronicle.record(
                "inferd.release_failed",
                error.message,
                model=self.model,
                version=tag.ref.version,
                inferd=lease.name,
            )

    async def prepare_retained(self, lease: Lease) -> None:
        retained = self.retained
        if retained is None or lease.has_prepared(retained.tag) or self._host.versions.damaged(retained):
            return
        try:
            with self._host.pace.work(f"preparing {retained.ref}"):
                copy = await self._host.copies.on(lease.device, retained)
                await lease.prepare(copy, self.config.prepare_timeout_s, self.config.drain_timeout_s)
        except ChangeoverError as error:
            self._host.chronicle.record(
                "inferd.not_retained",
                error.message,
                model=self.model,
                version=retained.ref.version,
                inferd=lease.name,
            )

    # --- after a restart -------------------------------------------------------------------------

    async def restore(self, tag: VersionTag) -> None:
        """Load what the journal says was active; the caller holds `one_operation`.

        Its outcome is an operation's, like any other's; a folder that is gone, or whose content changed, is
        refused.
        """
        operation = self._host.operations.start("restore", tag.ref)
        self._newest = self._newest or operation
        error: ChangeoverError | None = None
        try:
            with closing(await self._reopen(tag.ref)) as opened:
                await self._push(operation, opened, tag.digest)
        except ChangeoverError as caught:
            error = caught
        self._host.operations.end(operation, error)

    async def _reopen(self, ref: VersionRef) -> OpenedCheckpoint:
        """Open the folder that a version was pushed from."""
        usual, other = ref.folders
        try:
            return await self._host.planner.open(usual, ref, self.config)
        except UnknownVersion as missing:
            try:
                # Pushed with the model named; whichever folder it is, its digest is held to the journal's.
                return await self._host.planner.open(other, ref, self.config)
            except UnknownVersion:
                raise missing from None

    def commit_found(self, version: Version, epoch: Epoch) -> None:
        """Journal an epoch that an inferd knows and this loaderd's journal does not."""
        self._host.chronicle.journal.commit(version.tag, version.proof, epoch, "", "found out from an inferd")
        self.epoch = version.epoch = epoch

    # --- operations ------------------------------------------------------------------------------

    def _begin(self, kind: Kind, ref: VersionRef, in_flight: InFlight) -> Operation:
        operation = self._host.operations.start(kind, ref, in_flight)
        before, self._newest = self._newest, operation
        if before is not None and before.is_running and before.kind != "restore":
            before.superseded_by = operation.id
            # What is queued behind a restore must not take that with it.
            if before is self._current:
                if self._loading is not None:
                    self._loading.cancel()
                if self._rollout is not None:
                    self._rollout.abandon(before.superseded_error())
        return operation

    async def _run(
        self, operation: Operation, work: Coroutine[Any, Any, None], take_opened: OpenedCheckpoint | None
    ) -> None:
        """Carry out one operation and record how it ended."""
        error: ChangeoverError | None = None
        try:
            async with self.one_operation:
                operation.check_not_superseded()
                self._current = operation
                try:
                    await work
                finally:
                    self._current = None
        except ChangeoverError as caught:
            error = caught
        finally:
            work.close()
            if take_opened is not None:
                take_opened.close()
        self._host.operations.end(operation, error)

    def _limits(self) -> RolloutLimits:
        return RolloutLimits(
            prepare_s=self.config.prepare_timeout_s,
            commit_s=self.config.commit_timeout_s,
            drain_s=self.config.drain_timeout_s,
        )
