"""`VersionLoad`: one version, from its opened checkpoint until every resident byte is verified."""

from __future__ import annotations

import asyncio
import threading
from types import TracebackType
from typing import Self

from loaderd.host import Host
from loaderd.lifecycle import VersionEvent
from loaderd.load_request import LoadProgress, LoadRequest
from loaderd.loading import Loaded, load_and_verify
from loaderd.operations import Operation
from loaderd.plan import Plan
from loaderd.planning import OpenedCheckpoint, check_hot
from loaderd.proving import hash_signed
from loaderd.versions import Version, cause_of
from shared.errors import DigestMismatch, InvariantError, OutOfMemory
from shared.gate import Pacer
from shared.ids import DeviceId, Digest

PROGRESS_EVERY_S = 0.2


class VersionLoad:
    """A new version while it is loaded: `prove`, `plan`, `read`, in this order and each once.

    A context manager; where the block raises, the version has failed and its memory is free.  The checkpoint
    stays the caller's.  Used from the event loop's thread only.
    """

    def __init__(
        self, operation: Operation, opened: OpenedCheckpoint, devices: tuple[DeviceId, ...], host: Host
    ) -> None:
        self._operation = operation
        self._opened = opened
        self._devices = devices
        self._host = host
        self._version = host.versions.new(operation.ref)
        self._sources = host.versions.new_user()  # of slabs that are held only to be copied from
        self._request: LoadRequest | None = None
        self._cancelled = threading.Event()  # one for each stage: a stage's work sets it when it ends

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if error is not None:
                self._advance(VersionEvent.FAIL, cause_of(error))
                self._host.collect()
        finally:
            self._host.versions.slabs.release(self._sources)

    def cancel(self) -> None:
        """End the work of the stage that runs; a later one asks first whether it was superseded."""
        self._cancelled.set()

    async def prove(self) -> None:
        """Hash what a signature covers and `read` would hold against nothing.  Raises what `hash_signed`
        does."""
        if self._opened.is_proven:
            return
        self._cancelled = threading.Event()
        with self._host.pace.work(f"hashing {self._operation.ref}", ended=self._cancelled) as work:
            self._opened = await hash_signed(
                self._operation, self._opened, self._host.operations, self._cancelled, work
            )

    def plan(self, active: Version | None, retained: Version | None) -> Plan:
        """Plan beside what is resident now, and hold what is shared.  Raises PlanRefused unless it is hot."""
        opened = self._opened
        plan = self._host.planner.plan(opened, self._devices, active, retained)
        check_hot(plan, opened.folder)
        self._operation.warnings.extend(plan.warnings)
        self._advance(VersionEvent.PLAN, "the plan is hot")
        # At once: what is on its way out may be gone after the first wait.
        shared = tuple(
            self._host.copies.share(slab, self._devices, self._version.user, self._sources)
            for slab in plan.shared_slabs
        )
        self._request = LoadRequest(
            ref=self._operation.ref,
            checkpoint=opened.checkpoint,
            seal=opened.seal,
            placement=plan.placement,
            shared=shared,
            devices=self._devices,
        )
        return plan

    async def read(self, expected: Digest | None) -> Version:
        """Load and verify what was planned; the version is resident then.

        Raises what `load_and_verify` does, OutOfMemory with who holds memory, and DigestMismatch where the
        content is not what is `expected`.
        """
        if self._request is None:
            raise InvariantError(f"{self._operation.ref} is loaded without a plan", self._version.life.story)
        version, operation, opened = self._version, self._operation, self._opened
        self._advance(VersionEvent.LOAD, "allocating and reading")
        self._cancelled = threading.Event()
        with self._host.pace.work(f"loading {operation.ref}", ended=self._cancelled) as work:
            loaded = await self._read_with_progress(self._request, work)
        for slab in loaded.new_slabs:
            self._host.versions.slabs.add(slab, version.user)
        for device, copy in loaded.copies.items():
            version.add_copy(device, copy)
        version.config = dict(opened.checkpoint.config)
        version.files = {source.name: source.file for source in opened.checkpoint.tensors}
        version.proof = opened.proof
        operation.tag = version.tag
        operation.load_s, operation.verify_s = loaded.load_s, loaded.verify_s
        operation.bytes_replicated, operation.replicate_s = loaded.bytes_replicated, loaded.replicate_s
        if expected is not None and version.tag.digest != expected:
            raise DigestMismatch(
                f"the folder now holds {version.tag.digest}, {expected} was active",
                file=opened.folder,
            )
        cause = "every resident byte is verified"
        if opened.signed is not None:
            cause += f", as signed with key {opened.signed.key.hint[:12]}"
        self._advance(VersionEvent.VERIFY, cause)
        return version

    async def _read_with_progress(self, request: LoadRequest, pacer: Pacer) -> Loaded:
        operation, operations = self._operation, self._host.operations
        progress = LoadProgress()
        operation.bytes_total = request.placement.bytes_to_read
        operation.check_not_superseded()
        operations.enter(operation, "loading")
        work = asyncio.ensure_future(
            asyncio.to_thread(load_and_verify, request, self._host.backend, progress, self._cancelled, pacer)
        )
        try:
            while not work.done():
                await asyncio.wait((work,), timeout=PROGRESS_EVERY_S)
                operation.bytes_read, operation.bytes_verified = progress.read, progress.verified
                operation.limit_bytes_per_s = self._host.pace.throttled_bytes_per_s
                if operation.stage == "loading" and progress.is_verifying:
                    operations.enter(operation, "verifying")
                operations.progress(operation)
            operation.check_not_superseded()
            return work.result()
        except OutOfMemory as error:
            raise error.naming(self._host.gpus.holders(DeviceId(error.device))) from error
        except BaseException:
            # The thread must be out of the slabs before anyone closes them.
            self._cancelled.set()
            await asyncio.wait((work,))
            if not work.cancelled() and work.exception() is None:
                self._host.closer.add(work.result().new_slabs)
            raise

    def _advance(self, event: VersionEvent, cause: str) -> None:
        self._host.versions.advance(self._version, event, cause, self._operation.id)
