"""The link to loaderd: attach, obey, report, and attach again when loaderd comes back.

While there is no loaderd, inferd goes on serving what it has.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, assert_never

import structlog

from inferd.engine.protocol import Engine
from inferd.preparation import Preparer
from inferd.slots import Slots
from shared.codec import HANDOFF_FRAME_BYTES, PROTOCOL_VERSION, decode, encode
from shared.errors import ChangeoverError, DriverError, InvalidRequest, PeerError, PeerGone, ProtocolError
from shared.fdpass import ReceivedFds, SeqpacketChannel
from shared.gate import Gate
from shared.handoff import (
    FROM_LOADERD,
    Announce,
    Commit,
    Committed,
    Damaged,
    Failed,
    FromInferd,
    FromLoaderd,
    HandBack,
    HandedBack,
    HeldVersion,
    Hello,
    Pace,
    Prepare,
    Prepared,
    Refused,
    Release,
    Released,
    Report,
    SlabBatch,
    Welcome,
)
from shared.ids import DeviceId, Epoch, SlabId, VersionTag
from shared.memory.backend import MemoryBackend
from shared.messages import InFlight, Tag, WireError
from shared.transfer import IncomingVersion, slab_batches, table_fds

log = structlog.get_logger(__name__)

REPORT_EVERY_S = 1.0
RETRY_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)


TurnRequests = Callable[[InFlight, VersionTag], int]
"""What to do with the requests that run on a version: the policy, the version → how many were turned."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Who this inferd is."""

    name: str
    model: str
    device: DeviceId


@dataclass(frozen=True, slots=True)
class _Announced:
    """A commit that may come: its frame, and what it says."""

    frame: bytes
    order: Commit
    tag: VersionTag

    @classmethod
    def of(cls, order: Commit) -> Self:
        """Encoded as the other end will encode it."""
        return cls(encode(order, HANDOFF_FRAME_BYTES), order, order.tag.to_tag())


class LoaderdLink:
    """One inferd's side of the handoff."""

    def __init__(
        self,
        identity: Identity,
        socket_path: Path,
        slots: Slots,
        preparer: Preparer,
        engine: Engine,
        backend: MemoryBackend,
        turn: TurnRequests,
        gate: Gate,
    ) -> None:
        """`turn` carries an in-flight policy out right after a flip; `gate` is set to the pace that loaderd
        asks for, and is wide open without one."""
        self._turn = turn
        self._identity = identity
        self._socket_path = socket_path
        self._slots = slots
        self._preparer = preparer
        self._engine = engine
        self._backend = backend
        self._channel: SeqpacketChannel | None = None
        self._incoming: IncomingVersion | None = None
        self._announced: _Announced | None = None
        self._changed = asyncio.Event()
        self._gate = gate
        self._report_every_s = REPORT_EVERY_S
        self._tasks: asyncio.TaskGroup | None = None

    @property
    def is_attached(self) -> bool:
        """A lease is open now."""
        return self._channel is not None

    def slots_changed(self) -> None:
        """Report soon; called by the slots."""
        self._changed.set()

    async def run(self) -> None:
        """Attach and serve loaderd's requests until cancelled."""
        attempt = 0
        async with asyncio.TaskGroup() as self._tasks:
            while True:
                try:
                    channel = await SeqpacketChannel.connect(str(self._socket_path))
                except OSError as error:
                    log.debug("loaderd.unreachable", error=str(error))
                else:
                    try:
                        if await self._converse(channel):
                            attempt = 0
                    finally:
                        channel.close()
                    _check_not_cancelled()
                await asyncio.sleep(RETRY_S[min(attempt, len(RETRY_S) - 1)])
                attempt += 1

    async def _converse(self, channel: SeqpacketChannel) -> bool:
        """One connection from hello to its end; True if it was ever welcome."""
        is_welcome = False
        try:
            _check_peer(channel, self._socket_path.parent)
            await channel.send(encode(self._hello(), HANDOFF_FRAME_BYTES))
            await self._expect_welcome(channel)
            is_welcome = True
            self._channel = channel
            async with asyncio.TaskGroup() as connection:
                reporting = connection.create_task(self._report(channel))
                try:
                    while True:
                        await self._receive_one(channel)
                finally:
                    reporting.cancel()
        except* (PeerError, DriverError) as errors:
            for error in errors.exceptions:
                log.warning("loaderd.detached", error=str(error))
        finally:
            self._channel = None
            self._announced = None
            self._set_pace(REPORT_EVERY_S, None)
            self._slots.wake_drains()
            if self._incoming is not None:
                self._incoming.close()
                self._incoming = None
        return is_welcome

    def _hello(self) -> Hello:
        abilities = self._engine.abilities
        return Hello(
            protocol=PROTOCOL_VERSION,
            name=self._identity.name,
            model=self._identity.model,
            backend=self._backend.name,
            device=self._identity.device,
            engine=abilities.name,
            flip=str(abilities.flip),
            serves_two_versions=abilities.serves_two_versions,
            epoch=self._slots.epoch,
            held=tuple(
                HeldVersion(
                    tag=Tag.of(slot.tag), slot=slot.index, state=str(slot.life.state), epoch=self._slots.epoch
                )
                for slot in self._slots
                if slot.tag is not None
            ),
        )

    async def _expect_welcome(self, channel: SeqpacketChannel) -> None:
        frame, fds = await channel.receive()
        fds.close()
        message = decode(frame, FROM_LOADERD, HANDOFF_FRAME_BYTES)
        match message:
            case Welcome():
                if message.protocol != PROTOCOL_VERSION:
                    raise ProtocolError(
                        f"loaderd speaks protocol {message.protocol}, this inferd {PROTOCOL_VERSION}"
                    )
                log.info("loaderd.attached", generation=message.generation, lease=message.lease)
            case Refused():
                raise ProtocolError(f"loaderd refused the lease: {message.error.message}")
            case _:
                raise ProtocolError(f"expected a welcome, got {message.kind}")

    async def _receive_one(self, channel: SeqpacketChannel) -> None:
        frame, fds = await channel.receive()
        arrived_ns = time.perf_counter_ns()
        announced, self._announced = self._announced, None
        if announced is not None and frame == announced.frame:
            fds.close()
            await self._send(channel, self._commit(announced.order, announced.tag, arrived_ns))
            return
        with fds:
            message: FromLoaderd = decode(frame, FROM_LOADERD, HANDOFF_FRAME_BYTES)
            match message:
                case Announce():
                    self._announced = _Announced.of(message.order)
                case Commit():
                    # Not a task: nothing may come between the order and the flip.
                    await self._send(channel, self._commit(message, message.tag.to_tag(), arrived_ns))
                case Prepare():
                    self._begin_transfer(message, fds, channel)
                case SlabBatch():
                    self._continue_transfer(message, fds, channel)
                case Release():
                    self._start(channel, message.request_id, self._release(message))
                case HandBack():
                    self._start(channel, message.request_id, self._hand_back(message, channel))
                case Damaged():
                    self._slots.note_damage({(SlabId(p.slab_id), p.offset_bytes) for p in message.places})
                case Pace():
                    self._announced = announced
                    self._set_pace(message.report_every_s, message.bytes_per_s)
                case Welcome() | Refused():
                    raise ProtocolError(f"unexpected {message.kind} on an open lease")
                case _:
                    assert_never(message)

    # --- commit ----------------------------------------------------------------------------------

    def _commit(self, message: Commit, tag: VersionTag, arrived_ns: int) -> FromInferd:
        try:
            before = self._slots.serving()
            flipped_ns = self._slots.commit(tag, Epoch(message.epoch))
            turned = 0
            if before is not None and before != tag:
                turned = self._turn(message.in_flight, before)
        except ChangeoverError as error:
            return Failed(request_id=message.request_id, error=WireError.of(error))
        return Committed(
            request_id=message.request_id,
            tag=message.tag,
            epoch=message.epoch,
            flip_ns=flipped_ns - arrived_ns,
            requests_turned=turned,
        )

    # --- prepare ---------------------------------------------------------------------------------

    def _begin_transfer(self, message: Prepare, fds: ReceivedFds, channel: SeqpacketChannel) -> None:
        if self._incoming is not None:
            raise ProtocolError("a second transfer began before the first was complete")
        self._incoming = IncomingVersion(message.tag.to_tag(), message.request_id, message.slabs, fds)
        self._timeout_s = message.timeout_s
        self._prepare_if_complete(channel)

    def _continue_transfer(self, message: SlabBatch, fds: ReceivedFds, channel: SeqpacketChannel) -> None:
        if self._incoming is None:
            raise ProtocolError("a slab batch came without a transfer")
        self._incoming.add(message, fds)
        self._prepare_if_complete(channel)

    def _prepare_if_complete(self, channel: SeqpacketChannel) -> None:
        incoming = self._incoming
        if incoming is None or not incoming.is_complete:
            return
        self._incoming = None
        self._start(channel, incoming.request_id, self._prepare(incoming, self._timeout_s, channel))

    async def _prepare(
        self, incoming: IncomingVersion, timeout_s: float, channel: SeqpacketChannel
    ) -> FromInferd:
        # A loaderd that has lost the connection will not commit it, but may want the way back that
        # is still in the slot.
        times = await self._preparer.prepare(incoming, timeout_s, lambda: self._channel is channel)
        return Prepared(
            request_id=incoming.request_id,
            tag=Tag.of(incoming.tag),
            map_s=times.map_s,
            verify_s=times.verify_s,
            build_s=times.build_s,
            warm_s=times.warm_s,
        )

    # --- release, hand back, report --------------------------------------------------------------

    async def _release(self, message: Release) -> FromInferd:
        await self._preparer.release(message.tag.to_tag(), message.timeout_s)
        return Released(request_id=message.request_id, tag=message.tag)

    async def _hand_back(self, message: HandBack, channel: SeqpacketChannel) -> None:
        # Damaged or not: whoever takes it back hashes it.
        slot = self._slots.holding(message.tag.to_tag()) or self._slots.releasable(message.tag.to_tag())
        version = slot.version if slot is not None else None
        if version is None:
            raise InvalidRequest(f"{message.tag.to_tag()} is not mapped here")
        with table_fds(version) as fds:
            first = HandedBack(request_id=message.request_id, tag=message.tag, slabs=len(version.slabs))
            await channel.send(encode(first, HANDOFF_FRAME_BYTES), fds)
        for batch, borrowed in slab_batches(message.request_id, version.slabs):
            await channel.send(encode(batch, HANDOFF_FRAME_BYTES), borrowed)

    async def _report(self, channel: SeqpacketChannel) -> None:
        while True:
            self._changed.clear()
            await channel.send(encode(self._slot_report(), HANDOFF_FRAME_BYTES))
            # Not wait_for: before Python 3.12 it swallows a cancellation that comes with the event, and
            # the shutdown would wait for this task for ever.
            with suppress(TimeoutError):
                async with asyncio.timeout(self._report_every_s):
                    await self._changed.wait()

    def _slot_report(self) -> Report:
        load = self._engine.load()
        return Report(
            epoch=self._slots.epoch,
            slots=self._slots.reports(),
            running=load.running,
            waiting=load.waiting,
            tokens_generated=load.tokens_generated,
            decode_steps=load.decode_steps,
            decode_ns=load.decode_ns,
            hashed_bytes=self._gate.admitted_bytes,
        )

    def _set_pace(self, report_every_s: float, bytes_per_s: float | None) -> None:
        self._gate.set_rate(math.inf if bytes_per_s is None else bytes_per_s)
        if report_every_s != self._report_every_s:
            self._report_every_s = report_every_s
            self._changed.set()

    # --- tasks -----------------------------------------------------------------------------------

    def _start(
        self, channel: SeqpacketChannel, request_id: int, work: Coroutine[Any, Any, FromInferd | None]
    ) -> None:
        """Carry out a request beside the conversation.  It outlives the connection: a preparation
        whose loaderd went away still ends with a prepared or an empty slot."""
        if self._tasks is None:
            raise InvalidRequest("the link does not run")
        self._tasks.create_task(self._answer(channel, request_id, work))

    async def _answer(
        self, channel: SeqpacketChannel, request_id: int, work: Coroutine[Any, Any, FromInferd | None]
    ) -> None:
        try:
            answer = await work
        except PeerGone:
            return
        except ChangeoverError as error:
            log.warning("request.failed", request=request_id, error=str(error))
            answer = Failed(request_id=request_id, error=WireError.of(error))
        if answer is not None:
            await self._send(channel, answer)

    async def _send(self, channel: SeqpacketChannel, message: FromInferd) -> None:
        """Send an answer; the slots as they are now go first, so that who reads it knows both."""
        try:
            await channel.send(encode(self._slot_report(), HANDOFF_FRAME_BYTES))
            await channel.send(encode(message, HANDOFF_FRAME_BYTES))
        except (PeerGone, DriverError) as error:
            # Whoever waits for the answer must not wait for ever, and this inferd serves on.
            log.info("answer.undelivered", kind=message.kind, error=error.message)
            channel.close()


def _check_not_cancelled() -> None:
    """Raise CancelledError where this task was cancelled and has not noticed: a TaskGroup that ends with an
    error of its own keeps a cancellation that comes meanwhile to itself (before Python 3.13)."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


def _check_peer(channel: SeqpacketChannel, run_dir: Path) -> None:
    """Take weights only from root, this daemon's own user, or the owner of the run directory: whoever
    else can create a socket there is not loaderd."""
    trusted = {0, os.getuid(), run_dir.stat().st_uid}
    if channel.peer.uid not in trusted:
        raise ProtocolError(f"loaderd runs as uid {channel.peer.uid}, which is not trusted")
