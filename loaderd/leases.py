"""Leases: one per handoff connection, with what its inferd maps and the requests under way.

The connection is the lease.  When it ends, whatever ended it, the lease holds nothing any more.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import structlog

from shared.codec import HANDOFF_FRAME_BYTES, decode, encode
from shared.control import HolderReport, InferdReport, SlotReport
from shared.errors import DeadlineExceeded, PeerGone, PrepareFailed, ProtocolError
from shared.fdpass import ReceivedFds, SeqpacketChannel
from shared.handoff import (
    FROM_INFERD,
    Announce,
    Commit,
    Committed,
    Damaged,
    DamagedPlace,
    Failed,
    FromInferd,
    FromLoaderd,
    HandBack,
    HandedBack,
    Hello,
    Pace,
    Prepare,
    Prepared,
    Release,
    Released,
    Report,
    SlabBatch,
)
from shared.ids import DeviceId, Epoch, LeaseId, SlabId, VersionTag
from shared.messages import InFlight, Tag
from shared.resident import ResidentVersion
from shared.transfer import IncomingVersion, slab_batches, table_fds

log = structlog.get_logger(__name__)

Answer = TypeVar("Answer", bound=FromInferd)

ReportSink = Callable[["Lease"], None]

USABLE = frozenset({"prepared", "retained", "serving"})
"""Slot states from which a commit succeeds."""

SEND_WITHIN_S = 30.0
"""Longest wait for a peer to read what is sent to it; reading is all that an inferd's loop does there."""


class Lease:
    """An attached inferd as loaderd sees it.  Used from the event loop's thread only."""

    def __init__(self, lease_id: LeaseId, channel: SeqpacketChannel, hello: Hello) -> None:
        self.id = lease_id
        self.name = hello.name
        self.model = hello.model
        self.device = DeviceId(hello.device)
        self.peer = channel.peer
        self.epoch = Epoch(hello.epoch)
        self.slots: tuple[SlotReport, ...] = tuple(
            SlotReport(slot=held.slot, state=held.state, tag=held.tag) for held in hello.held
        )
        self._channel = channel
        self._attached_s = time.monotonic()
        self.last_report: Report | None = None
        self._request_ids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[FromInferd]] = {}
        self._announced: Commit | None = None
        self._asked_back: dict[int, VersionTag] = {}
        self._returns: dict[int, IncomingVersion] = {}  # each is closed by the request that asked for it
        self._has_spoken = True
        self._silent_looks = 0
        # From the moment fds are sent the memory must be counted as mapped.
        self._holds: dict[VersionTag, float] = {held.tag.to_tag(): self._attached_s for held in hello.held}
        self._sending = asyncio.Lock()

    # --- what it has -----------------------------------------------------------------------------

    @property
    def serving(self) -> VersionTag | None:
        """The version that new requests run on there."""
        return next((s.tag.to_tag() for s in self.slots if s.state == "serving" and s.tag), None)

    @property
    def held(self) -> tuple[VersionTag, ...]:
        """Versions whose memory this inferd may map."""
        return tuple(self._holds)

    def holds(self, tag: VersionTag) -> bool:
        """Whether this inferd may map the memory of `tag`."""
        return tag in self._holds

    def has_prepared(self, tag: VersionTag) -> bool:
        """Whether a commit of `tag` would be a flip, without preparing anything."""
        return any(
            s.tag is not None and s.tag.to_tag() == tag and s.state in USABLE and not s.is_damaged
            for s in self.slots
        )

    def holds_damaged(self, tag: VersionTag) -> bool:
        """Whether a slot there has `tag` and was found damaged; another may have it whole."""
        return any(s.is_damaged and s.tag is not None and s.tag.to_tag() == tag for s in self.slots)

    @property
    def serves_damaged(self) -> bool:
        """Whether what it serves was found damaged."""
        return any(s.state == "serving" and s.is_damaged for s in self.slots)

    def holder_report(self, tag: VersionTag) -> HolderReport | None:
        """How this inferd holds `tag`, for the status; None if it does not."""
        since_s = self._holds.get(tag)
        if since_s is None:
            return None
        slot = next((s for s in self.slots if s.tag is not None and s.tag.to_tag() == tag), None)
        return HolderReport(
            inferd=self.name,
            pid=self.peer.pid,
            device=self.device,
            state=slot.state if slot is not None else "mapping",
            references=slot.references if slot is not None else 0,
            age_s=time.monotonic() - since_s,
        )

    def report(self) -> InferdReport:
        """This inferd as the status shows it."""
        serving = self.serving
        load = self.last_report
        return InferdReport(
            name=self.name,
            pid=self.peer.pid,
            uid=self.peer.uid,
            model=self.model,
            device=self.device,
            lease=self.id,
            attached_s=time.monotonic() - self._attached_s,
            serving=Tag.of(serving) if serving is not None else None,
            epoch=self.epoch,
            slots=self.slots,
            running=load.running if load is not None else 0,
            waiting=load.waiting if load is not None else 0,
        )

    # --- what is asked of it ---------------------------------------------------------------------

    async def prepare(
        self, version: ResidentVersion, timeout_s: float, drain_timeout_s: float = 0.0
    ) -> Prepared:
        """Have the inferd map, check, build and warm a version, within `timeout_s` from when it has a
        slot for it; for that it may wait `drain_timeout_s` for requests on what the slot holds.

        Raises PrepareFailed if it cannot or answers for other bytes, DeadlineExceeded, PeerGone.
        """
        with self._expect() as (request_id, answer):
            message = Prepare(
                request_id=request_id,
                tag=Tag.of(version.tag),
                slabs=len(version.slabs),
                timeout_s=drain_timeout_s,
            )
            async with self._sending:  # the frames of one transfer stay together
                self._holds.setdefault(version.tag, time.monotonic())
                with table_fds(version) as fds:
                    await self._send(message, fds)
                for batch, borrowed in slab_batches(request_id, version.slabs):
                    await self._send(batch, borrowed)
            try:
                # The inferd's own time-out for the slot comes first and says who holds it.
                prepared = await self._await(answer, Prepared, drain_timeout_s + timeout_s, "prepare")
            except PrepareFailed:
                self._holds.pop(version.tag, None)
                raise
        if prepared.tag.to_tag() != version.tag:
            raise PrepareFailed(
                f"{self.name} mapped {prepared.tag.to_tag()}, offered was {version.tag}", inferd=self.name
            )
        return prepared

    async def announce(self, tag: VersionTag, epoch: Epoch, in_flight: InFlight) -> None:
        """Say ahead which commit may come next, so that it is carried out sooner.  Raises PeerGone."""
        order = Commit(request_id=next(self._request_ids), tag=Tag.of(tag), epoch=epoch, in_flight=in_flight)
        await self._send(Announce(order=order))
        self._announced = order

    async def commit(
        self, tag: VersionTag, epoch: Epoch, timeout_s: float, in_flight: InFlight = "finish"
    ) -> Committed:
        """Have the inferd flip to a prepared version; raises what it answers, DeadlineExceeded, PeerGone."""
        announced, self._announced = self._announced, None
        with self._expect(announced.request_id if announced is not None else None) as (request_id, answer):
            message = Commit(request_id=request_id, tag=Tag.of(tag), epoch=epoch, in_flight=in_flight)
            await self._send(message)
            committed = await self._await(answer, Committed, timeout_s, "commit")
        if committed.tag.to_tag() != tag or committed.epoch != epoch:
            raise ProtocolError(f"{self.name} confirmed {committed.tag.to_tag()} for epoch {committed.epoch}")
        self.epoch = epoch
        return committed

    async def release(self, tag: VersionTag, timeout_s: float) -> None:
        """Have the inferd drain and unmap a version; raises what it answers, DeadlineExceeded, PeerGone."""
        with self._expect() as (request_id, answer):
            message = Release(request_id=request_id, tag=Tag.of(tag), timeout_s=timeout_s)
            await self._send(message)
            # The inferd's own time-out comes first and says who holds the version.
            await self._await(answer, Released, timeout_s + 5.0, "release")
        self._holds.pop(tag, None)

    async def hand_back(self, tag: VersionTag, timeout_s: float) -> IncomingVersion:
        """Receive the fds of a version that the inferd holds; the caller owns the transfer."""
        with self._expect() as (request_id, answer):
            self._asked_back[request_id] = tag
            try:
                await self._send(HandBack(request_id=request_id, tag=Tag.of(tag)))
                await self._await(answer, HandedBack, timeout_s, "hand back")
                return self._returns.pop(request_id)
            finally:
                del self._asked_back[request_id]
                unclaimed = self._returns.pop(request_id, None)
                if unclaimed is not None:
                    unclaimed.close()

    async def set_pace(self, report_every_s: float, bytes_per_s: float) -> None:
        """Say how often the inferd shall report, and how fast it may hash: not at all for 0, as fast as it
        goes for infinity.  Raises PeerGone."""
        limit = None if math.isinf(bytes_per_s) else bytes_per_s
        await self._send(Pace(report_every_s=report_every_s, bytes_per_s=limit))

    async def tell_damage(self, places: Sequence[tuple[SlabId, int]]) -> None:
        """Say at which slabs and offsets bytes have changed since they were verified.  Raises PeerGone."""
        told = tuple(DamagedPlace(slab_id=slab_id, offset_bytes=offset) for slab_id, offset in places)
        await self._send(Damaged(places=told))

    def close(self) -> None:
        """End the lease; its reader sees the end and reports it."""
        self._channel.close()

    async def _send(self, message: FromLoaderd, borrow_fds: Sequence[int] = ()) -> None:
        """Send one frame.  A peer that does not read loses its lease, and PeerGone is raised: whoever
        asks holds locks that others wait for, and half a transfer cannot be taken back."""
        try:
            async with asyncio.timeout(SEND_WITHIN_S):
                await self._channel.send(encode(message, HANDOFF_FRAME_BYTES), borrow_fds)
        except TimeoutError as error:
            self.close()
            raise PeerGone(
                f"inferd {self.name} has not read for {SEND_WITHIN_S:g} s", inferd=self.name
            ) from error

    # --- what it says ----------------------------------------------------------------------------

    async def converse(self, on_report: ReportSink) -> None:
        """Receive until the connection ends; raises PeerGone or ProtocolError when it does."""
        try:
            while True:
                frame, fds = await self._channel.receive()
                with fds:
                    self._dispatch(decode(frame, FROM_INFERD, HANDOFF_FRAME_BYTES), fds, on_report)
                self._has_spoken = True
                # Receiving does not wait while frames are there: a flood would leave no turn to others.
                await asyncio.sleep(0)
        finally:
            gone = PeerGone(f"inferd {self.name} went away", inferd=self.name)
            for answer in self._answers.values():
                if not answer.done():
                    answer.set_exception(gone)
            self._holds.clear()

    def count_silence(self) -> int:
        """How many calls in a row, this one included, found that nothing came since the call before.

        Counted and not timed: after a pause of this process the clock would blame the peers.
        """
        self._silent_looks = 0 if self._has_spoken else self._silent_looks + 1
        self._has_spoken = False
        return self._silent_looks

    def _dispatch(self, message: FromInferd, fds: ReceivedFds, on_report: ReportSink) -> None:
        match message:
            case Report():
                self.slots = message.slots
                self.epoch = Epoch(message.epoch)
                self.last_report = message
                # What a preparation is still mapping is not in a slot yet, so holds only ever grow here.
                for slot in message.slots:
                    if slot.tag is not None:
                        self._holds.setdefault(slot.tag.to_tag(), time.monotonic())
                on_report(self)
            case HandedBack():
                tag = message.tag.to_tag()
                # The tag is what the bytes will be held against, so it must be the one asked for.
                if self._asked_back.get(message.request_id) != tag or message.request_id in self._returns:
                    raise ProtocolError(f"{self.name} handed back {tag}, which nobody asked for")
                incoming = IncomingVersion(tag, message.request_id, message.slabs, fds)
                self._returns[message.request_id] = incoming
                if incoming.is_complete:
                    self._settle(message.request_id, message)
            case SlabBatch():
                incoming_or_none = self._returns.get(message.request_id)
                if incoming_or_none is None:
                    raise ProtocolError(f"{self.name} sent slabs that nobody asked for")
                incoming_or_none.add(message, fds)
                if incoming_or_none.is_complete:
                    done = HandedBack(
                        request_id=message.request_id, tag=Tag.of(incoming_or_none.tag), slabs=0
                    )
                    self._settle(message.request_id, done)
            case Hello():
                raise ProtocolError(f"{self.name} said hello twice")
            case Prepared() | Committed() | Released() | Failed():
                self._settle(message.request_id, message)

    def _settle(self, request_id: int, message: FromInferd) -> None:
        answer = self._answers.get(request_id)
        if answer is None:
            # Its asker gave up; what it did shows in the next report.
            log.info("answer.late", inferd=self.name, kind=message.kind, request=request_id)
        elif not answer.done():
            answer.set_result(message)

    @contextmanager
    def _expect(self, reserved_id: int | None = None) -> Iterator[tuple[int, asyncio.Future[FromInferd]]]:
        request_id = next(self._request_ids) if reserved_id is None else reserved_id
        answer: asyncio.Future[FromInferd] = asyncio.get_running_loop().create_future()
        self._answers[request_id] = answer
        try:
            yield request_id, answer
        finally:
            del self._answers[request_id]
            if answer.done() and not answer.cancelled():
                answer.exception()  # marks it as seen if nobody awaited it

    async def _await(
        self, answer: asyncio.Future[FromInferd], kind: type[Answer], timeout_s: float, verb: str
    ) -> Answer:
        try:
            async with asyncio.timeout(timeout_s):
                message = await answer
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"inferd {self.name} did not {verb} within {timeout_s:g} s", inferd=self.name
            ) from error
        if isinstance(message, kind):
            return message
        if isinstance(message, Failed):
            cause = message.error.to_error()
            if kind is Prepared:
                raise PrepareFailed(
                    f"inferd {self.name}: {cause.message}", inferd=self.name, cause=cause.code
                ) from cause
            raise cause
        raise ProtocolError(f"inferd {self.name} answered {verb} with {message.kind}")
