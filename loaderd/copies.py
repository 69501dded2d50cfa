"""`Copies`: brings a version's bytes to the devices where they are needed and not yet."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from loaderd.adoption import take_back
from loaderd.chronicle import Chronicle
from loaderd.gpu_watch import GpuWatch
from loaderd.leases import Lease
from loaderd.pace import Pace
from loaderd.replication import Replicated, replicate
from loaderd.residents import ResidentSlab
from loaderd.slab_closer import SlabCloser
from loaderd.slab_table import UserId
from loaderd.versions import Version, VersionTable
from shared.errors import ChangeoverError, OutOfMemory, PeerGone, ProtocolError
from shared.ids import DeviceId, SlabId
from shared.memory.backend import MemoryBackend, Slab
from shared.resident import ResidentVersion


class Copies:
    """Copies of the versions of one host.  Used from the event loop's thread only.

    Whoever asks keeps the version from being swept meanwhile: it holds its model's `slots_in_hand`.
    """

    def __init__(
        self,
        versions: VersionTable,
        backend: MemoryBackend,
        gpus: GpuWatch,
        chronicle: Chronicle,
        pace: Pace,
        closer: SlabCloser,
    ) -> None:
        self._pace = pace
        self._closer = closer
        self._versions = versions
        self._backend = backend
        self._gpus = gpus
        self._chronicle = chronicle

    def share(
        self, slab: ResidentSlab, devices: Iterable[DeviceId], user: UserId, sources: UserId
    ) -> dict[DeviceId, Slab]:
        """Count `user` for the replicas of a slab on these devices and borrow them.  Where there is none,
        one of another device is held for `sources`, to be copied from."""
        slabs = self._versions.slabs
        here = [device for device in devices if device in slab.replicas]
        if here:
            return {device: slabs.share(slab.replicas[device].slab_id, user) for device in here}
        device, replica = next(iter(slab.replicas.items()))
        return {device: slabs.share(replica.slab_id, sources)}

    async def on(self, device: DeviceId, version: Version) -> ResidentVersion:
        """The version's copy on a device, made from another if it is missing.  Raises OutOfMemory with who
        holds memory, DriverError, DigestMismatch; the version then is as it was."""
        if device not in version.copies:
            await self._replicate(device, version)
        return version.copies[device]

    async def complete(self, version: Version, devices: Iterable[DeviceId]) -> None:
        """Give a version the copies that it lacks on these devices; one that cannot be made is told."""
        for device in devices:
            try:
                await self.on(device, version)
            except ChangeoverError as error:
                self._record("version.not_replicated", error.message, version, device)

    async def adopt(self, lease: Lease, version: Version) -> None:
        """Take the copy back that an inferd maps, on a device where the version has none; where what comes
        back is of no use, make it from another.  Raises PeerGone, and what `on` raises."""
        slabs = self._versions.slabs
        user = self._versions.new_user()
        try:
            with self._pace.work(f"adopting {version.ref}") as work:
                copy = await take_back(lease, version.tag, self._backend, slabs, user, work)
            if not copy.is_copy_of(version.content):
                raise ProtocolError(f"{lease.name} handed back {version.tag} laid out in another way")
            self._give(version, lease.device, copy)
        except PeerGone:
            raise
        except ChangeoverError as error:
            self._record("inferd.not_adopted", f"inferd {lease.name}: {error.message}", version, lease.device)
            await self.on(lease.device, version)
        else:
            self._record("version.adopted", f"handed back by inferd {lease.name}", version, lease.device)
        finally:
            slabs.release(user)

    async def _replicate(self, device: DeviceId, version: Version) -> None:
        slabs, source = self._versions.slabs, self._versions.sound_copy(version)
        # For this work alone: if it fails, nothing of the version is on the device.
        user = self._versions.hold(version)
        try:
            made = await self._copy(source, device, user)
            for slab in made.new_slabs:
                slabs.add(slab, user)
            self._give(version, device, made.copy)
        except OutOfMemory as error:
            raise error.naming(self._gpus.holders(device)) from error
        finally:
            slabs.release(user)
        origin = source.layout.slabs[0].device
        self._record("version.replicated", f"copied to {device} from {origin}", version, device, made)

    async def _copy(self, source: ResidentVersion, device: DeviceId, user: UserId) -> Replicated:
        await self._closer.settle()
        residents = self._versions.residents()
        known: dict[SlabId, Slab] = {}
        for entry in source.layout.slabs:
            replica = residents.replica_on(device, entry.slab_id)
            if replica is not None and replica not in self._versions.damage:
                known[entry.slab_id] = self._versions.slabs.share(replica, user)
        with self._pace.work(f"copying {source.tag.ref}") as work:
            return await asyncio.to_thread(replicate, source, device, known, self._backend, work)

    def _give(self, version: Version, device: DeviceId, copy: ResidentVersion) -> None:
        """Make a copy whose slabs are in the table the version's own."""
        version.add_copy(device, copy)
        for slab in copy.slabs:
            self._versions.slabs.share(slab.entry.slab_id, version.user)

    def _record(
        self, kind: str, text: str, version: Version, device: DeviceId, made: Replicated | None = None
    ) -> None:
        facts: dict[str, Any] = {} if made is None else {"nbytes": made.nbytes, "copy_s": made.copy_s}
        self._chronicle.record(
            kind,
            text,
            model=version.ref.model,
            version=version.ref.version,
            device=device,
            **facts,
        )
