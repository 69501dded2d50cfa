"""Answers that change nothing: status, versions, history, verify and diff."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from loaderd.checkpoint.checkpoint import open_checkpoint
from loaderd.checkpoint.listing import list_folders
from loaderd.deployment import Deployment
from loaderd.host import Host
from loaderd.lifecycle import VersionState
from loaderd.remedy import remedied
from loaderd.scrub import Scrub
from loaderd.seal.document import read_seal
from loaderd.seal.glance import SealGlance
from loaderd.versions import Version
from shared.control import (
    Diff,
    DiffReport,
    FolderReport,
    History,
    HistoryReport,
    MemoryReport,
    Operation,
    OperationReport,
    Status,
    StatusReport,
    Verify,
    VerifyReport,
    VersionReport,
    Versions,
    VersionsReport,
)
from shared.errors import InvalidRequest, ResourceError, UnknownVersion
from shared.ids import DeviceId, Digest
from shared.messages import FACT_CHARACTERS, Tag, cut_text

Found = TypeVar("Found")

FOLDER_READS_AT_ONCE = 8
"""Requests that wait for something from a folder; more are told to try again."""

SETTLE_WITHIN_S = 2.0
"""Longest wait of a status for memory that is being given back; a client waits for five seconds, and what is
wrong with a host whose driver hangs is seen in its status."""

NAMES_SHOWN = 200
"""Tensor names a diff lists of each kind; a reply must fit one frame."""


class Inquiries:
    """Reads the daemon's state.  Used from the event loop's thread only."""

    def __init__(
        self, host: Host, deployments: Mapping[str, Deployment], roots: tuple[Path, ...], scrub: Scrub
    ) -> None:
        self._scrub = scrub
        self._host = host
        self._deployments = deployments
        self._roots = roots
        self._started_s = time.monotonic()
        # One thread, and not one of those that pushes use: anyone may ask.
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="inquiry")
        self._folder_reads = 0
        self._seals = SealGlance()

    def close(self) -> None:
        """Drop what nobody waits for any more."""
        self._reader.shutdown(wait=False, cancel_futures=True)

    async def _read(self, work: Callable[[], Found]) -> Found:
        """Do blocking work on folders; raises ResourceError if too many requests wait for such."""
        if self._folder_reads >= FOLDER_READS_AT_ONCE:
            raise ResourceError(f"{FOLDER_READS_AT_ONCE} requests that read folders wait; try again")
        self._folder_reads += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._reader, work)
        finally:
            self._folder_reads -= 1

    async def status(self, _: Status) -> StatusReport:
        """Everything at one moment, with all that was let go of counted as free, unless that takes long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_WITHIN_S):
                await self._host.closer.settle()
        return StatusReport(
            generation=self._host.chronicle.generation,
            pid=os.getpid(),
            uptime_s=time.monotonic() - self._started_s,
            backend=self._host.backend.name,
            memory=tuple(self._memory(device) for device in self._host.devices.all),
            models=tuple(deployment.report() for _, deployment in sorted(self._deployments.items())),
            versions=self._resident(),
            inferds=tuple(
                lease.report() for lease in sorted(self._host.leases.values(), key=lambda each: each.name)
            ),
        )

    async def versions(self, _: Versions) -> VersionsReport:
        """Resident versions, and the folders below the model roots."""
        folders = await self._read(lambda: list_folders(self._roots, self._seals.fault))
        resident = {str(version.ref) for version in self._host.versions if version.is_resident}
        return VersionsReport(
            resident=self._resident(),
            folders=tuple(
                FolderReport(
                    name=folder.name,
                    root=str(folder.root),
                    sealed=folder.is_sealed,
                    seal_fault=cut_text(folder.seal_fault, FACT_CHARACTERS),
                    nbytes=folder.nbytes,
                    resident=folder.name in resident,
                )
                for folder in folders
            ),
        )

    async def history(self, body: History) -> HistoryReport:
        """The newest journal entries."""
        return HistoryReport(entries=self._host.chronicle.journal.newest(body.model, body.limit))

    async def operation(self, body: Operation) -> OperationReport:
        """One push or rollback."""
        return self._host.operations.get(body.operation).report()

    async def verify(self, body: Verify) -> VerifyReport:
        """Hash every resident byte of a version, on each of its devices, beside its serving."""
        version = self._find(body.name)
        tag, copies, layout = version.tag, dict(version.copies), version.content.layout
        started = time.perf_counter()
        found = await self._scrub.check(version, "verify")
        damaged = sorted({name for names in found.values() for name in names})
        return VerifyReport(
            tag=Tag.of(tag),
            against=version.proof.verified,
            devices=tuple(copies),
            tensors=len(layout.tensors),
            nbytes=layout.total_bytes * len(copies),
            seconds=time.perf_counter() - started,
            damaged=tuple(damaged[:NAMES_SHOWN]),
            damaged_devices=tuple(device for device, names in found.items() if names),
        )

    async def diff(self, body: Diff) -> DiffReport:
        """Compare two versions by content, resident or not."""
        before, after = await asyncio.gather(self._content(body.before), self._content(body.after))
        return compare(body.before, before, body.after, after)

    def _memory(self, device: DeviceId) -> MemoryReport:
        slabs = self._host.versions.slabs
        usage = self._host.backend.usage(device)
        reading = self._host.gpus.reading(device)
        return MemoryReport(
            device=device,
            used_bytes=slabs.used_bytes(device),
            free_bytes=usage.free_bytes,
            peak_bytes=slabs.peak_bytes(device),
            total_bytes=usage.total_bytes,
            pool_bytes=usage.pool_bytes,
            reserved_bytes=usage.reserved_bytes,
            largest_free_bytes=usage.largest_free_bytes,
            fragmentation=usage.fragmentation,
            nvml_free_bytes=reading.free_bytes,
            uncorrected_errors=reading.uncorrected_errors,
        )

    def _resident(self) -> tuple[VersionReport, ...]:
        leases = tuple(self._host.leases.values())
        reports = (self._host.versions.report(version, leases) for version in self._host.versions)
        return tuple(report for report in reports if report is not None)

    def _find(self, name: str) -> Version:
        """A resident version by folder name, version or tag; the newest load of several."""
        found = [
            version
            for version in self._host.versions
            if version.is_resident
            and version.state not in (VersionState.DRAINING, VersionState.FAILED)
            and name in (str(version.ref), version.ref.version, str(version.tag))
        ]
        if not found:
            raise UnknownVersion(f"no version {name!r} is resident", name=name)
        return found[-1]

    async def _content(self, name: str) -> Content:
        try:
            version = self._find(name)
        except UnknownVersion:
            return await self._read(lambda: self._content_of_folder(name))
        return Content(
            {t.name: (t.dtype, t.shape, t.nbytes, t.digest) for t in version.content.layout.tensors},
            version.asset_digests(),
        )

    def _content_of_folder(self, name: str) -> Content:
        """From the seal.  Raises InvalidRequest where there is none: to read every byte of a folder is
        work that a reader may not cause.  Blocking."""
        with remedied(folder=name), open_checkpoint(self._roots, name) as checkpoint:
            if checkpoint.seal_bytes is None:
                raise InvalidRequest(
                    f"{name} is not resident and has no seal to be compared by (seal it: "
                    "`loaderctl seal DIR`)",
                    name=name,
                )
            seal = read_seal(checkpoint.seal_bytes)
        return Content(
            {tensor: (t.dtype, t.shape, t.nbytes, t.digest) for tensor, t in seal.tensors.items()},
            seal.asset_digests,
        )


@dataclass(frozen=True, slots=True)
class Content:
    """What a version consists of, for comparison."""

    tensors: Mapping[str, tuple[str, tuple[int, ...], int, Digest]]  # dtype, shape, bytes, digest
    assets: Mapping[str, Digest]


def compare(before_name: str, before: Content, after_name: str, after: Content) -> DiffReport:
    """The differences between two versions' contents."""
    common = sorted(before.tensors.keys() & after.tensors.keys())
    reshaped = tuple(n for n in common if before.tensors[n][:2] != after.tensors[n][:2])
    changed = tuple(
        n
        for n in common
        if before.tensors[n][:2] == after.tensors[n][:2] and before.tensors[n][3] != after.tensors[n][3]
    )
    added = tuple(sorted(after.tensors.keys() - before.tensors.keys()))
    removed = tuple(sorted(before.tensors.keys() - after.tensors.keys()))
    files = sorted(
        name
        for name in before.assets.keys() | after.assets.keys()
        if before.assets.get(name) != after.assets.get(name)
    )
    lists = (changed, added, removed, reshaped)
    return DiffReport(
        before=before_name,
        after=after_name,
        changed=changed[:NAMES_SHOWN],
        added=added[:NAMES_SHOWN],
        removed=removed[:NAMES_SHOWN],
        reshaped=reshaped[:NAMES_SHOWN],
        files_changed=tuple(files),
        changed_bytes=sum(after.tensors[n][2] for n in (*changed, *reshaped, *added)),
        total_bytes=sum(entry[2] for entry in after.tensors.values()),
        truncated=any(len(names) > NAMES_SHOWN for names in lists),
    )
