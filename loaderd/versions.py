"""Every version that loaderd knows: its life, its memory and who holds it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from loaderd.chronicle import Chronicle
from loaderd.damage import Damage
from loaderd.leases import Lease
from loaderd.lifecycle import ENDED, VERSION_TABLE, VersionEvent, VersionLife, VersionState
from loaderd.proof import Proof
from loaderd.residents import Residents
from loaderd.slab_table import SlabTable, UserId
from shared.control import DAMAGED_SHOWN, VersionReport
from shared.digest import file_digest
from shared.errors import ChangeoverError, InvariantError
from shared.ids import DeviceId, Digest, Epoch, VersionRef, VersionTag
from shared.layout import Layout
from shared.messages import Tag
from shared.resident import ResidentVersion


@dataclass(slots=True)
class Version:
    """One load of one version, with a copy of its bytes on each of its model's devices.

    A copy can be missing: after a restart until it was handed back or made again from another.
    """

    user: UserId
    ref: VersionRef
    life: VersionLife = field(default_factory=VERSION_TABLE.begin)
    since_ns: int = field(default_factory=time.time_ns)
    copies: dict[DeviceId, ResidentVersion] = field(default_factory=dict)
    proof: Proof = field(default_factory=Proof)
    epoch: Epoch | None = None
    config: Mapping[str, object] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)  # of each tensor, where it was read here

    @property
    def state(self) -> VersionState:
        """Where it is in its life."""
        return self.life.state

    @property
    def tag(self) -> VersionTag:
        """Its tag; raises InvariantError while it is not resident."""
        return self.content.tag

    @property
    def is_resident(self) -> bool:
        """Whether there is a copy on any device."""
        return bool(self.copies)

    @property
    def content(self) -> ResidentVersion:
        """One of the copies, for what all have alike: tag, tensors, the sizes of slabs, assets.  Raises
        InvariantError while there is none."""
        for copy in self.copies.values():
            return copy
        raise InvariantError(f"{self.ref} is not resident", self.life.story)

    def add_copy(self, device: DeviceId, copy: ResidentVersion) -> None:
        """Take a verified copy, whose slabs are in the table; raises InvariantError unless it is like the
        others and wholly on a device that has none."""
        if device in self.copies or any(slab.device != device for slab in copy.layout.slabs):
            raise InvariantError(f"{self.ref} has or gets two copies on {device}", self.life.story)
        if self.copies and not copy.is_copy_of(self.content):
            raise InvariantError(f"the copy of {self.ref} on {device} is another version", self.life.story)
        self.copies[device] = copy

    def asset_digests(self) -> dict[str, Digest]:
        """Flat SHA-256 of each config and tokenizer file."""
        return {name: file_digest(data) for name, data in self.content.assets.items()}


class VersionTable:
    """All versions since start that are not over, and the slabs they share.

    Used from the event loop's thread only.
    """

    def __init__(self, chronicle: Chronicle, slabs: SlabTable) -> None:
        self._chronicle = chronicle
        self._users = itertools.count(1)
        self._versions: dict[UserId, Version] = {}
        self.slabs = slabs
        self.damage = Damage()

    def __iter__(self) -> Iterator[Version]:
        return iter(tuple(self._versions.values()))

    def new(self, ref: VersionRef) -> Version:
        """A version that was just requested."""
        version = Version(UserId(next(self._users)), ref)
        self._versions[version.user] = version
        return version

    def advance(self, version: Version, event: VersionEvent, cause: str, operation: str = "") -> None:
        """Move a version along its table; the step is journaled and published."""
        before = version.state
        version.life = version.life.advance(event, cause)
        version.since_ns = time.time_ns()
        facts: dict[str, str | int | float] = {"from": str(before), "to": str(version.state)}
        if version.is_resident:
            facts["digest"] = version.tag.digest
        self._chronicle.record(
            "version.state",
            cause,
            model=version.ref.model,
            version=version.ref.version,
            operation=operation,
            **facts,
        )
        if version.state is VersionState.FREED:
            self._forget(version)

    def find(self, tag: VersionTag) -> Version | None:
        """The resident version with this tag that is not on its way out."""
        leaving = {VersionState.DRAINING, *ENDED}
        return next(
            (
                version
                for version in self._versions.values()
                if version.is_resident and version.tag == tag and version.state not in leaving
            ),
            None,
        )

    def is_leaving(self, tag: VersionTag) -> bool:
        """Whether what is known of this tag is on its way out, and nothing else."""
        known = any(v.is_resident and v.tag == tag for v in self._versions.values())
        return known and self.find(tag) is None

    def new_user(self) -> UserId:
        """A user of slabs that is no version; ends with `slabs.release`."""
        return UserId(next(self._users))

    def hold(self, version: Version) -> UserId:
        """Keep a version's slabs until `slabs.release` of the returned user."""
        user = self.new_user()
        for copy in version.copies.values():
            for slab in copy.slabs:
                self.slabs.share(slab.entry.slab_id, user)
        return user

    def damaged(self, version: Version) -> tuple[str, ...]:
        """Tensors of a version that are damaged on any of its devices."""
        names = (self.damage.names(copy.layout) for copy in version.copies.values())
        return tuple(sorted(set().union(*names)))

    def sound_copy(self, version: Version) -> ResidentVersion:
        """A copy to make others from: one in which nothing is damaged, if there is such."""
        copies = version.copies.values()
        return next((copy for copy in copies if not self.damage.names(copy.layout)), version.content)

    def residents(self, devices: Collection[DeviceId] = ()) -> Residents:
        """What a plan for these devices may share or must count, by version label."""
        return Residents.of(
            {
                self.label(version): self._shareable(version)
                for version in self._versions.values()
                if version.is_resident
            },
            devices,
        )

    def _shareable(self, version: Version) -> list[Layout]:
        """The layouts of a version's copies without the tensors of slabs that are damaged anywhere: their
        bytes count, and nobody gets them."""
        layouts = [copy.layout for copy in version.copies.values()]
        damaged = {
            index
            for layout in layouts
            for index, slab in enumerate(layout.slabs)
            if slab.slab_id in self.damage
        }
        if not damaged:
            return layouts
        return [
            replace(layout, tensors=tuple(t for t in layout.tensors if t.slab not in damaged))
            for layout in layouts
        ]

    def label(self, version: Version) -> str:
        """The version's folder name, told apart from another load of the same folder."""
        same = [other for other in self._versions.values() if other.ref == version.ref]
        return str(version.ref) if len(same) == 1 else f"{version.ref} (load {version.user})"

    def collect(self, leases: Sequence[Lease]) -> None:
        """Free what is on its way out and mapped by nobody any more."""
        for version in tuple(self._versions.values()):
            if version.state not in (VersionState.DRAINING, VersionState.FAILED):
                continue
            cause = "nobody maps it any more"
            if version.is_resident:
                tag = version.tag
                # Another load of the same content may be what those leases hold.
                twin = self.find(tag)
                if twin is None and any(lease.holds(tag) for lease in leases):
                    continue
                if twin is not None:
                    cause = f"only this copy: another of the same content is {twin.state}"
            version.copies.clear()
            self.slabs.release(version.user)
            if version.state is VersionState.DRAINING:
                self.advance(version, VersionEvent.RELEASE, cause)
            else:
                self._forget(version)

    def report(self, version: Version, leases: Sequence[Lease]) -> VersionReport | None:
        """A resident version as the status shows it."""
        if not version.is_resident:
            return None
        layout = version.content.layout
        holders = (lease.holder_report(version.tag) for lease in leases)
        return VersionReport(
            tag=Tag.of(version.tag),
            state=str(version.state),
            since_ns=version.since_ns,
            devices=tuple(version.copies),
            nbytes=sum(slab.nbytes for slab in layout.slabs),
            shared_bytes=self.slabs.shared_bytes([slab.slab_id for slab in layout.slabs]),
            tensors=len(layout.tensors),
            verified=version.proof.verified,
            epoch=version.epoch,
            damaged=self.damaged(version)[:DAMAGED_SHOWN],
            holders=tuple(holder for holder in holders if holder is not None),
        )

    def _forget(self, version: Version) -> None:
        self._versions.pop(version.user, None)


def cause_of(error: BaseException) -> str:
    """What the journal says of an error."""
    return error.message if isinstance(error, ChangeoverError) else type(error).__name__
