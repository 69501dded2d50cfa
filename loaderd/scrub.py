"""`Scrub`: hashes what is resident again, when it is asked to and from time to time, and says what it finds.

Damage is what hashes to something else than when it was verified.  There is one way from finding it to
everything that follows: the version table knows it, so nothing is shared from there, prepared or rolled back
to; readiness fails with its name; and the inferds that map it are told.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import structlog

from loaderd.deployment import Deployment
from loaderd.host import Host
from loaderd.leases import Lease
from loaderd.lifecycle import VersionState
from loaderd.pace import Work
from loaderd.versions import Version
from shared.errors import ChangeoverError, Superseded
from shared.handoff import DAMAGED_PLACES
from shared.ids import DeviceId
from shared.resident import ResidentVersion, damaged_tensors

log = structlog.get_logger(__name__)

SCRUBBED = (VersionState.ACTIVE, VersionState.RETAINED)

Damage = Mapping[DeviceId, tuple[str, ...]]
"""Names of damaged tensors, by the device whose copy has them; empty where all is well."""


class Scrub:
    """Used from the event loop's thread only; hashing is on others."""

    def __init__(self, host: Host, deployments: Mapping[str, Deployment]) -> None:
        self._host = host
        self._deployments = deployments
        self.rounds = 0
        """Rounds that have ended."""

    async def check(self, version: Version, why: str, most_bytes_per_s: float = math.inf) -> Damage:
        """Hash every copy of a version where it lies, and follow up what is damaged.

        It goes on when whoever asks is cancelled: a thread cannot be, and the slabs must outlive it.  Raises
        Superseded where the version is released meanwhile.
        """
        user = self._host.versions.hold(version)
        ended = threading.Event()
        hashing = asyncio.ensure_future(self._hash(version, why, most_bytes_per_s, ended))
        hashing.add_done_callback(lambda _: self._host.versions.slabs.release(user))
        self._host.checks.add(hashing, version.user, ended)
        try:
            return await asyncio.shield(hashing)
        except Superseded as error:
            raise Superseded(f"{version.ref} was released while it was hashed") from error

    async def run(self, interval_s: float, bytes_per_s: float) -> None:
        """Scrub all that is active or retained, no faster than that, until cancelled; a round begins
        `interval_s` after the one before began, or when that has ended."""
        loop = asyncio.get_running_loop()
        next_s = loop.time()
        while True:
            next_s = max(next_s + interval_s, loop.time())
            await asyncio.sleep(next_s - loop.time())
            for deployment in tuple(self._deployments.values()):
                for version in (deployment.active, deployment.retained):
                    # A round takes a while, and what it began with may have gone meanwhile.
                    if version is not None and version.state in SCRUBBED and version.is_resident:
                        await self._scrub(version, bytes_per_s)
            self.rounds += 1

    async def _scrub(self, version: Version, bytes_per_s: float) -> None:
        try:
            await self.check(version, "scrub", bytes_per_s)
        except Superseded:
            pass  # what is gone needs no scrub
        except ChangeoverError as error:
            self._host.chronicle.record(
                "scrub.failed", error.message, model=version.ref.model, version=version.ref.version
            )

    async def _hash(
        self, version: Version, why: str, most_bytes_per_s: float, ended: threading.Event
    ) -> Damage:
        copies = dict(version.copies)
        name = f"{why} of {version.ref}"
        with self._host.pace.work(
            name, most_bytes_per_s=most_bytes_per_s, ended=ended, is_patient=True
        ) as work:
            found = await asyncio.to_thread(_damaged_by_device, copies, work)
        for device, names in found.items():
            await self._follow_up(version, device, copies[device], names, why)
        return found

    async def _follow_up(
        self, version: Version, device: DeviceId, copy: ResidentVersion, names: tuple[str, ...], why: str
    ) -> None:
        damage = self._host.versions.damage
        if not damage.note(copy.layout, names):
            return  # nothing, or nothing new
        self._host.chronicle.record(
            "version.damaged",
            f"{len(names)} tensors on {device}, the first is {names[0]}",
            model=version.ref.model,
            version=version.ref.version,
            tensors=len(names),
            tensor=names[0],
            file=version.files.get(names[0], ""),
            device=device,
            found_by=why,
        )
        # Everyone: another version may share the slab.
        for lease in tuple(self._host.leases.values()):
            await self.tell(lease)

    async def tell(self, lease: Lease) -> None:
        """Let an inferd know what is damaged; it finds out whether it maps that."""
        places = tuple(islice(self._host.versions.damage.places(), DAMAGED_PLACES))
        if places:
            try:
                await lease.tell_damage(places)
            except ChangeoverError as error:
                # Its lease is about to end; it is told again when it attaches.
                log.info("damage.untold", inferd=lease.name, error=error.message)


def _damaged_by_device(copies: Mapping[DeviceId, ResidentVersion], work: Work) -> Damage:
    """Damaged tensors of each copy; devices hash side by side.  Blocking."""
    with ThreadPoolExecutor(len(copies), thread_name_prefix="verify") as workers:
        found = workers.map(lambda copy: damaged_tensors(copy, work), copies.values())
        return dict(zip(copies, found, strict=True))
