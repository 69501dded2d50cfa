"""Bringing inferds and loaderd to agree: after an inferd attaches, and after loaderd was restarted."""

from __future__ import annotations

import asyncio

from loaderd.adoption import read_config, take_back
from loaderd.deployment import Deployment
from loaderd.host import Host
from loaderd.journal import Committed
from loaderd.leases import Lease
from loaderd.lifecycle import VersionEvent
from loaderd.proof import Proof
from loaderd.versions import Version, cause_of
from shared.errors import ProtocolError
from shared.handoff import Prepared
from shared.ids import Epoch, VersionTag

EPOCH_LEAP = 1 << 32
"""An inferd this far ahead of the newest commit was not led there by any loaderd, which takes one epoch
for each commit.  To follow it would use up the epochs, which have 63 bits."""


class Reconciliation:
    """Brings the inferds of one model to its active version, and finds out what that is.

    Used from the event loop's thread only.  Nothing here makes an inferd stop serving.
    """

    def __init__(self, deployment: Deployment, host: Host, recollected: Committed | None) -> None:
        """`recollected` is what the journal says was committed before this start."""
        self._deployment = deployment
        self._host = host
        self._recollected = recollected
        self._is_found = asyncio.Event()
        if recollected is not None:
            deployment.epoch = recollected.epoch

    # --- judging ---------------------------------------------------------------------------------

    def is_due(self, lease: Lease) -> bool:
        """Whether `welcome` would change anything for an inferd, and may run now."""
        if self._deployment.slots_in_hand.locked():
            return False  # a rollout is at it
        if any(self._is_needless(lease, tag) for tag in lease.held):
            return True
        return self._lost_to(lease) is not None or self._is_behind(lease)

    def _lost_to(self, lease: Lease) -> VersionTag | None:
        """What should be active, has no copy on the inferd's device, and can be taken back from it."""
        active = self._deployment.active
        wanted: VersionTag | None
        if active is not None:
            wanted = active.tag if lease.device not in active.copies else None
        else:
            wanted = self._recollected.tag if self._recollected is not None else lease.serving
        return wanted if wanted is not None and lease.holds(wanted) else None

    def _is_behind(self, lease: Lease) -> bool:
        active = self._deployment.active
        if active is None:
            return False
        is_to_heal = lease.serves_damaged and not self._host.versions.damaged(active)
        return lease.serving != active.tag or lease.epoch != self._deployment.epoch or is_to_heal

    def _is_needless(self, lease: Lease, tag: VersionTag) -> bool:
        """Whether an inferd keeps memory that is on its way out, or that nobody here knows."""
        versions = (self._deployment.active, self._deployment.retained)
        if self._deployment.active is None:
            # What serves is not known, or nothing does: only what failed here is surely of no use.
            return tag != lease.serving and self._host.versions.is_leaving(tag)
        return tag != lease.serving and all(v is None or v.tag != tag for v in versions)

    # --- an inferd attached, or is behind --------------------------------------------------------

    async def welcome(self, lease: Lease) -> None:
        """Adopt what an inferd holds if this loaderd has lost it, then bring the inferd up to date.

        Raises PeerError if it goes away, and whatever it answers if it cannot; it goes on serving
        what it has in any case.
        """
        deployment = self._deployment
        async with deployment.slots_in_hand:
            self._check_epoch(lease)
            try:
                await self._adopt_what_is_lost(lease)
            finally:
                if deployment.active is not None:
                    self._is_found.set()
            if deployment.active is not None:
                await self._reconcile(lease, deployment.active)
            else:
                await self._drop_needless(lease)
                self._host.collect()

    def _check_epoch(self, lease: Lease) -> None:
        """End the lease and raise ProtocolError if its epoch cannot be true."""
        newest = self._deployment.epoch
        if lease.epoch > newest + EPOCH_LEAP:
            lease.close()
            raise ProtocolError(f"{lease.name} claims epoch {lease.epoch}, the newest here is {newest}")

    async def _reconcile(self, lease: Lease, active: Version) -> None:
        """Bring an inferd to the active version, have it drop what is of no use, and prepare what is
        retained."""
        deployment = self._deployment
        config = deployment.config
        await self._drop_needless(lease)
        if self._is_behind(lease):
            was_damaged = lease.serves_damaged and lease.serving == active.tag
            if lease.epoch > deployment.epoch or (
                lease.epoch == deployment.epoch and (lease.serving != active.tag or was_damaged)
            ):
                deployment.commit_found(active, Epoch(lease.epoch + 1))
            done: Prepared | None = None
            if not lease.has_prepared(active.tag):
                deployment.check_sound(active)
                with self._host.pace.work(f"preparing {active.ref}"):
                    copy = await self._host.copies.on(lease.device, active)
                    done = await lease.prepare(copy, config.prepare_timeout_s, config.drain_timeout_s)
            await lease.commit(active.tag, deployment.epoch, config.commit_timeout_s)
            self._host.chronicle.record(
                "inferd.reconciled",
                f"inferd {lease.name} serves {active.tag}",
                model=deployment.model,
                version=active.ref.version,
                inferd=lease.name,
                epoch=deployment.epoch,
                map_s=done.map_s if done is not None else 0.0,
                prepare_s=done.map_s + done.verify_s + done.build_s + done.warm_s
                if done is not None
                else 0.0,
            )
            if was_damaged:
                # The slot that served has the same tag, and its bytes are of no use.
                await lease.release(active.tag, config.drain_timeout_s)
            await self._drop_needless(lease)
        self._host.collect()
        await deployment.prepare_retained(lease)

    async def _drop_needless(self, lease: Lease) -> None:
        for tag in lease.held:
            if self._is_needless(lease, tag):
                await lease.release(tag, self._deployment.config.drain_timeout_s)

    # --- after a restart -------------------------------------------------------------------------

    async def recover(self, grace_s: float) -> None:
        """Wait for an inferd that still maps the active version, else load it again from its folder.

        Operations wait meanwhile.  A device whose inferds have not handed their copy back by the end of
        the grace gets one from another device.
        """
        graced = asyncio.get_running_loop().time() + grace_s
        async with self._deployment.one_operation:
            try:
                async with asyncio.timeout_at(graced):
                    await self._is_found.wait()
            except TimeoutError:
                await self._restore()
        if self._lacks_copies():
            await asyncio.sleep(graced - asyncio.get_running_loop().time())
            async with self._deployment.slots_in_hand:
                for version in self._resident():
                    await self._host.copies.complete(version, self._deployment.devices)

    def _lacks_copies(self) -> bool:
        return any(version.copies.keys() < set(self._deployment.devices) for version in self._resident())

    def _resident(self) -> list[Version]:
        """What is active and what is retained, as far as there is any."""
        versions = (self._deployment.active, self._deployment.retained)
        return [version for version in versions if version is not None]

    async def _restore(self) -> None:
        committed = self._recollected
        async with self._deployment.slots_in_hand:
            pass  # an inferd that came in time may be handing it back: hashing it takes longer than a grace
        if committed is None or self._deployment.active is not None:
            return
        await self._deployment.restore(committed.tag)

    async def _adopt_what_is_lost(self, lease: Lease) -> None:
        """Take memory back as long as nothing is active: from then on what is unknown is stale.  Of what is
        active, take the copy on the inferd's device if there is none yet."""
        deployment, recollected = self._deployment, self._recollected
        wanted = self._lost_to(lease)
        if wanted is not None and deployment.active is not None:
            await self._host.copies.adopt(lease, deployment.active)
        elif wanted is not None:
            active = await self._adopt(lease, wanted)
            self._host.versions.advance(active, VersionEvent.CONFIRM, "it serves")
            if recollected is None:
                # The journal was lost; what serves is found out from who serves it.
                deployment.commit_found(active, lease.epoch)
            active.epoch, deployment.active = deployment.epoch, active
        await self._adopt_way_back(lease)

    async def _adopt_way_back(self, lease: Lease) -> None:
        """Take back what was retained, from whichever inferd still has it, unless a push came since."""
        deployment, recollected = self._deployment, self._recollected
        retained = deployment.retained
        if retained is not None and lease.device not in retained.copies and lease.holds(retained.tag):
            await self._host.copies.adopt(lease, retained)
        if recollected is None or deployment.active is None or deployment.retained is not None:
            return
        before = recollected.previous
        if before is None or before == recollected.tag or recollected.tag != deployment.active.tag:
            return
        if not lease.holds(before):
            return
        retained = await self._adopt(lease, before)
        self._host.versions.advance(retained, VersionEvent.RETAIN, "it is held for rollback")
        deployment.retained = retained
        for other in deployment.leases().values():
            if other is not lease:
                await deployment.prepare_retained(other)

    async def _adopt(self, lease: Lease, tag: VersionTag) -> Version:
        """A version whose every byte, where the inferd maps it, was hashed again."""
        versions = self._host.versions
        version = versions.new(tag.ref)
        try:
            with self._host.pace.work(f"adopting {tag.ref}") as work:
                copy = await take_back(lease, tag, self._host.backend, versions.slabs, version.user, work)
            version.add_copy(lease.device, copy)
            version.config = read_config(copy.assets)
            version.proof = self._known_proof(tag)
            versions.advance(version, VersionEvent.ADOPT, f"handed back by inferd {lease.name}")
        except BaseException as error:
            versions.advance(version, VersionEvent.FAIL, cause_of(error))
            self._host.collect()
            raise
        return version

    def _known_proof(self, tag: VersionTag) -> Proof:
        """What was proven of this content before the restart; an inferd's word does not count."""
        if self._recollected is None:
            return Proof()
        trusted = [key.hint for key in self._deployment.config.trusted_keys]
        return self._recollected.proof_of(tag).now(trusted)
