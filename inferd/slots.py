"""The double buffer: two slots, which of them serves, who holds a reference, and the flip.

All methods run on the event loop's thread, except `acquire`, `release` and the read-only ones, which
any thread may call: they rest on the native version slot.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from inferd.api.admission import NotReady, Ticket
from inferd.engine.protocol import SLOTS
from inferd.slot_states import SLOT_TABLE, SlotEvent, SlotLife, SlotState
from shared._native import VersionSlot
from shared.control import SlotReport
from shared.errors import InvalidRequest, PeerGone, SlotBusy, StaleEpoch
from shared.ids import Epoch, SlabId, VersionTag
from shared.messages import Tag
from shared.resident import ResidentVersion, name_tensors
from shared.verdict import Detail, Verdict

SESSIONS_KEPT = 10_000
"""Conversations remembered; the least recently used is forgotten and starts on the serving version."""

ADMITTING = frozenset({SlotState.SERVING, SlotState.RETAINED})


@dataclass(slots=True)
class Slot:
    """One half of the double buffer."""

    index: int
    life: SlotLife
    since_s: float  # monotonic
    version: ResidentVersion | None = None
    damaged: tuple[str, ...] = ()  # tensors whose bytes have changed since they were verified

    @property
    def tag(self) -> VersionTag | None:
        """The version in the slot, if it has been mapped."""
        return self.version.tag if self.version is not None else None


class Slots:
    """Two slots and the rules between them; the `Admission` of the API."""

    def __init__(
        self, model: str, on_change: Callable[[], None], on_retired: Callable[[VersionTag], None]
    ) -> None:
        """`on_change` is called after each change of a slot's state, `on_retired` when a version is no
        longer mapped; both on the loop's thread."""
        self.model = model
        self.epoch = Epoch(0)
        self._on_change = on_change
        self._on_retired = on_retired
        self._references = VersionSlot()
        self._slots = tuple(Slot(index, SLOT_TABLE.begin(), time.monotonic()) for index in range(SLOTS))
        self._sessions: OrderedDict[str, VersionTag] = OrderedDict()
        self._is_admitting = True
        self._released = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    # --- admission -------------------------------------------------------------------------------

    def acquire(self, session_id: str | None) -> Ticket:
        """A ticket for the version a new request runs on; see `Admission`."""
        if not self._is_admitting:
            raise NotReady("this replica is shutting down")
        if session_id is not None:
            kept = self._acquire_for_session(session_id)
            if kept is not None:
                return kept
        index = self._references.acquire()
        if index is None:
            raise NotReady(f"no version of {self.model} serves yet")
        tag = self._tag_of_referenced(index)
        if session_id is not None:
            self._sessions[session_id] = tag
            self._sessions.move_to_end(session_id)
            while len(self._sessions) > SESSIONS_KEPT:
                self._sessions.popitem(last=False)
        return Ticket(index, tag)

    def _acquire_for_session(self, session_id: str) -> Ticket | None:
        wanted = self._sessions.get(session_id)
        if wanted is None:
            return None
        for slot in self._slots:
            if slot.tag != wanted or slot.life.state is not SlotState.RETAINED or slot.damaged:
                continue
            # Refused once the slot is being drained; the session then moves on.
            if self._references.try_acquire(slot.index):
                self._sessions.move_to_end(session_id)
                return Ticket(slot.index, wanted)
        return None

    def _tag_of_referenced(self, index: int) -> VersionTag:
        # The reference just taken keeps the slot from being refilled, so its tag cannot change.
        tag = self._slots[index].tag
        if tag is None:
            self._references.release(index)
            raise NotReady(f"no version of {self.model} serves yet")
        return tag

    def release(self, ticket: Ticket) -> None:
        """Give a ticket back; wakes whoever drains the slot."""
        self._references.release(ticket.slot)
        if self._slots[ticket.slot].life.state is SlotState.DRAINING and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._released.set)

    def serving(self) -> VersionTag | None:
        """The version that new requests run on."""
        current = self._references.current()
        return None if current is None else self._slots[current].tag

    def resident(self) -> tuple[VersionTag, ...]:
        """Every version that can still answer, the serving one first."""
        tags = [
            (slot.life.state is not SlotState.SERVING, slot.tag)
            for slot in self._slots
            if slot.life.state in ADMITTING
        ]
        return tuple(tag for _, tag in sorted(tags, key=lambda pair: pair[0]) if tag is not None)

    def verdict(self) -> Verdict:
        """Ready while a verified version serves, undamaged, and new requests are admitted."""
        if not self._is_admitting:
            return Verdict(False, "shutting down")
        serving = self.serving()
        if serving is None:
            return Verdict(False, f"no version of {self.model} serves yet")
        details: dict[str, Detail] = {"serving": str(serving), "epoch": self.epoch}
        damaged = next((s.damaged for s in self._slots if s.life.state is SlotState.SERVING), ())
        if damaged:
            return Verdict(False, f"{serving} is damaged: {name_tensors(damaged)}", details)
        return Verdict(True, details=details)

    # --- slots -----------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._slots)

    def holding(self, tag: VersionTag) -> Slot | None:
        """The slot that holds `tag` undamaged, in whatever state."""
        return next((slot for slot in self._slots if slot.tag == tag and not slot.damaged), None)

    def releasable(self, tag: VersionTag) -> Slot | None:
        """The slot that a release of `tag` means: one that does not serve, if two hold it, of which one then
        is damaged; it may be the one that serves."""
        holding = [slot for slot in self._slots if slot.tag == tag]
        return min(holding, key=lambda slot: slot.life.state is SlotState.SERVING, default=None)

    def note_damage(self, places: Collection[tuple[SlabId, int]]) -> None:
        """Mark the slots in which tensors lie at these places (slab, offset); what serves goes on."""
        for slot in self._slots:
            layout = slot.version.layout if slot.version is not None else None
            if layout is None:
                continue
            slot.damaged = tuple(
                tensor.name
                for tensor in layout.tensors
                if tensor.name in slot.damaged
                or (layout.slabs[tensor.slab].slab_id, tensor.offset_bytes) in places
            )
        self._on_change()

    def empty(self) -> Slot | None:
        """A slot that can be filled at once."""
        return next((slot for slot in self._slots if slot.life.state is SlotState.EMPTY), None)

    def replaceable(self) -> Slot | None:
        """The slot that a new version takes when none is empty: the one that does not serve."""
        order = (SlotState.PREPARED, SlotState.RETAINED)
        candidates = [slot for slot in self._slots if slot.life.state in order]
        return min(candidates, key=lambda slot: order.index(slot.life.state), default=None)

    def advance(self, slot: Slot, event: SlotEvent, cause: str) -> None:
        """Move a slot along its table and report the change."""
        slot.life = slot.life.advance(event, cause)
        slot.since_s = time.monotonic()
        self._on_change()

    def fill(self, slot: Slot, version: ResidentVersion) -> None:
        """Give a mapping slot its version; the slot owns the version's slabs from here."""
        slot.version = version

    def mark_prepared(self, slot: Slot) -> None:
        """The version in the slot may be committed from here on."""
        self._references.open(slot.index)
        self.advance(slot, SlotEvent.WARMED, "warm")

    # --- the flip --------------------------------------------------------------------------------

    def commit(self, tag: VersionTag, epoch: Epoch) -> int:
        """Admit new requests to `tag` from now on: one atomic exchange.  Returns the moment after it,
        in ns of `time.perf_counter_ns`.

        Raises StaleEpoch unless `epoch` is newer than the last, InvalidRequest if `tag` is not
        prepared.  Allocates nothing that grows, touches no file and waits for nobody.
        """
        if epoch <= self.epoch:
            raise StaleEpoch(
                f"commit of epoch {epoch} after epoch {self.epoch}", epoch=epoch, newest=self.epoch
            )
        slot = self.holding(tag)
        if slot is None or slot.life.state not in (
            SlotState.PREPARED,
            SlotState.RETAINED,
            SlotState.SERVING,
        ):
            raise InvalidRequest(f"{tag} is not prepared here")
        flipped_ns = time.perf_counter_ns()
        if slot.life.state is not SlotState.SERVING:
            self._references.publish(slot.index)
            flipped_ns = time.perf_counter_ns()
            before = next((s for s in self._slots if s.life.state is SlotState.SERVING), None)
            slot.life = slot.life.advance(SlotEvent.COMMIT, f"epoch {epoch}")
            slot.since_s = time.monotonic()
            if before is not None:
                before.life = before.life.advance(SlotEvent.RETAIN, f"epoch {epoch}")
                before.since_s = slot.since_s
        self.epoch = epoch
        self._on_change()
        return flipped_ns

    # --- draining --------------------------------------------------------------------------------

    async def drain(
        self, slot: Slot, timeout_s: float, cause: str, is_wanted: Callable[[], bool] = lambda: True
    ) -> ResidentVersion:
        """Wait until nobody holds a reference on a slot that does not serve; return its version.

        Raises SlotBusy after `timeout_s`, naming how many hold it and for how long, and PeerGone once
        it is no longer wanted (looked at after each release and `wake_drains`); the slot then is what
        it was, or retained if it was only prepared.
        """
        self._references.close(slot.index)
        self.advance(slot, SlotEvent.DRAIN, cause)
        started = slot.since_s
        try:
            async with asyncio.timeout(timeout_s):
                while is_wanted() and not self._references.is_drained(slot.index):
                    self._released.clear()
                    if not self._references.is_drained(slot.index):
                        await self._released.wait()
        except TimeoutError as error:
            references = self._references.references(slot.index)
            self._reopen(slot, f"{references} requests did not end in time")
            raise SlotBusy(
                f"slot {slot.index} still holds {slot.tag}: {references} requests after "
                f"{time.monotonic() - started:.1f} s",
                references=references,
                slot=slot.index,
            ) from error
        if not is_wanted():
            self._reopen(slot, "whoever needed the slot went away")
            raise PeerGone(f"slot {slot.index} is not needed any more")
        version = slot.version
        if version is None:
            raise InvalidRequest(f"slot {slot.index} holds no version")
        return version

    def wake_drains(self) -> None:
        """Have a drain that is under way look whether it is still wanted."""
        self._released.set()

    def _reopen(self, slot: Slot, cause: str) -> None:
        self._references.reopen(slot.index)
        self.advance(slot, SlotEvent.REOPEN, cause)

    def take_version(self, slot: Slot) -> ResidentVersion | None:
        """Give up the version of a drained or failed slot, if one was mapped: the caller owns its slabs,
        closes them, and then calls `vacate`."""
        version, slot.version, slot.damaged = slot.version, None, ()
        return version

    def vacate(self, slot: Slot, was_mapped: VersionTag | None, cause: str) -> None:
        """Mark a slot empty that no version is mapped for any more."""
        if was_mapped is not None:
            self._on_retired(was_mapped)
        self.advance(slot, SlotEvent.RELEASE, cause)

    def retract(self) -> None:
        """Let no version serve any more; the shutdown's last step before draining."""
        self._references.retract()

    def stop_admitting(self) -> None:
        """Refuse new requests from here on; those admitted go on."""
        self._is_admitting = False
        self._on_change()

    def reports(self) -> tuple[SlotReport, ...]:
        """The slots as loaderd and `status` show them."""
        now = time.monotonic()
        return tuple(
            SlotReport(
                slot=slot.index,
                state=str(slot.life.state),
                tag=Tag.of(slot.tag) if slot.tag is not None else None,
                references=self._references.references(slot.index),
                age_s=now - slot.since_s,
                is_damaged=bool(slot.damaged),
            )
            for slot in self._slots
        )
