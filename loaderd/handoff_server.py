"""The handoff socket: accepts inferds, checks who they are and runs one lease per connection."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import structlog

from loaderd.authorisation import Caller, Policy
from loaderd.chronicle import Chronicle
from loaderd.leases import Lease
from loaderd.model_devices import ModelDevices
from loaderd.peer_groups import groups_of
from shared.codec import HANDOFF_FRAME_BYTES, PROTOCOL_VERSION, decode, encode
from shared.errors import (
    ChangeoverError,
    DriverError,
    InvalidRequest,
    NotPermitted,
    PeerError,
    ProtocolError,
)
from shared.fdpass import PeerCredentials, SeqpacketChannel
from shared.handoff import FROM_INFERD, Hello, Refused, Welcome
from shared.ids import Generation, LeaseId
from shared.memory.backend import MemoryBackend
from shared.messages import WireError

log = structlog.get_logger(__name__)

HELLO_WITHIN_S = 5.0

STRANGERS_AT_ONCE = 16
"""Connections of users who may not attach that are kept until they have been told so; more are closed
at once, so that nobody else can use up this process's fds."""


class LeaseHolder(Protocol):
    """Who is told about leases."""

    def attached(self, lease: Lease) -> None:
        """The lease is open; called before the inferd can be asked anything by others."""
        ...

    def reported(self, lease: Lease) -> None:
        """The inferd reported its slots."""
        ...

    def detached(self, lease: Lease) -> None:
        """The lease ended; it holds nothing any more."""
        ...


class HandoffServer:
    """Accepts inferds until cancelled."""

    def __init__(
        self,
        generation: Generation,
        policy: Policy,
        backend: MemoryBackend,
        devices: ModelDevices,
        chronicle: Chronicle,
        holder: LeaseHolder,
    ) -> None:
        self._generation = generation
        self._policy = policy
        self._backend = backend
        self._devices = devices
        self._chronicle = chronicle
        self._holder = holder
        self._lease_ids = itertools.count(1)
        self._strangers = 0
        self._refusals: dict[str, str] = {}  # by name of the inferd: what the journal says already
        self.leases: dict[LeaseId, Lease] = {}

    async def run(self, borrow_listener: socket.socket) -> None:
        """Accept and serve until cancelled; ends every lease then."""
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as connections:
            while True:
                try:
                    end, _ = await loop.sock_accept(borrow_listener)
                except OSError as error:
                    # Out of fds or memory: those who wait in the backlog are served when it passes.
                    log.error("handoff.accept_failed", error=str(error))
                    await asyncio.sleep(0.5)
                    continue
                connections.create_task(self._serve(end))

    async def _serve(self, take_end: socket.socket) -> None:
        channel = SeqpacketChannel(take_end)
        try:
            with self._counted(channel.peer):
                lease = await self._admit(channel)
            if lease is not None:
                await self._hold(lease)
        except (PeerError, DriverError, NotPermitted) as error:
            log.warning("handoff.ended", pid=channel.peer.pid, uid=channel.peer.uid, error=error.message)
        finally:
            channel.close()

    @contextmanager
    def _counted(self, peer: PeerCredentials) -> Iterator[None]:
        """Count a connection of someone who may not attach; raises NotPermitted if there are too many."""
        if self._may_attach(peer):
            yield
            return
        if self._strangers >= STRANGERS_AT_ONCE:
            raise NotPermitted(f"uid {peer.uid} may not attach, and {self._strangers} like it are connected")
        self._strangers += 1
        try:
            yield
        finally:
            self._strangers -= 1

    async def _admit(self, channel: SeqpacketChannel) -> Lease | None:
        """Hello and welcome; None if the peer was refused."""
        try:
            async with asyncio.timeout(HELLO_WITHIN_S):
                frame, fds = await channel.receive()
        except TimeoutError:
            raise ProtocolError(f"no hello within {HELLO_WITHIN_S:g} s") from None
        fds.close()
        hello = decode(frame, FROM_INFERD, HANDOFF_FRAME_BYTES)
        if not isinstance(hello, Hello):
            raise ProtocolError(f"expected a hello, got {hello.kind}")
        try:
            self._check(channel, hello)
        except ChangeoverError as error:
            self._tell_refusal(channel.peer, hello, error)
            await channel.send(encode(Refused(error=WireError.of(error)), HANDOFF_FRAME_BYTES))
            return None
        lease = Lease(LeaseId(next(self._lease_ids)), channel, hello)
        self._refusals.pop(hello.name, None)
        welcome = Welcome(protocol=PROTOCOL_VERSION, generation=self._generation, lease=lease.id)
        await channel.send(encode(welcome, HANDOFF_FRAME_BYTES))
        return lease

    def _tell_refusal(self, peer: PeerCredentials, hello: Hello, error: ChangeoverError) -> None:
        """Journal a refusal once, not each time that the inferd tries again; those of strangers, who can
        try with any name as often as they like, go to the log alone."""
        log.warning("lease.refused", inferd=hello.name, pid=peer.pid, uid=peer.uid, error=error.message)
        if self._may_attach(peer) and self._refusals.get(hello.name) != error.message:
            self._refusals[hello.name] = error.message
            self._chronicle.record("lease.refused", error.message, model=hello.model, inferd=hello.name)

    def _may_attach(self, peer: PeerCredentials) -> bool:
        try:
            self._check_permitted(peer)
        except NotPermitted:
            return False
        return True

    def _check_permitted(self, peer: PeerCredentials) -> None:
        self._policy.check("attach", Caller(peer.uid, peer.gid, peer.pid, groups_of(peer.uid, peer.gid)))

    def _check(self, channel: SeqpacketChannel, hello: Hello) -> None:
        """Raise NotPermitted, ProtocolError or InvalidRequest unless this peer may attach."""
        peer = channel.peer
        self._check_permitted(peer)
        if hello.protocol != PROTOCOL_VERSION:
            raise ProtocolError(f"inferd speaks protocol {hello.protocol}, loaderd {PROTOCOL_VERSION}")
        if hello.backend != self._backend.name:
            raise InvalidRequest(f"inferd maps {hello.backend!r} memory, loaderd has {self._backend.name!r}")
        devices = self._devices.of(hello.model)
        if hello.device not in devices:
            raise InvalidRequest(
                f"inferd is on device {hello.device}, versions of {hello.model} are on {', '.join(devices)}"
            )
        for lease in self.leases.values():
            if lease.name == hello.name:
                if _is_alive(lease.peer.pid) and lease.peer.pid != peer.pid:
                    raise NotPermitted(
                        f"an inferd named {hello.name} is attached already (pid {lease.peer.pid})"
                    )
                lease.close()  # its process is gone or came back on a new connection

    async def _hold(self, lease: Lease) -> None:
        self.leases[lease.id] = lease
        self._chronicle.record(
            "lease.opened",
            f"inferd {lease.name} attached",
            model=lease.model,
            inferd=lease.name,
            lease=lease.id,
            pid=lease.peer.pid,
        )
        self._holder.attached(lease)
        cause = "closed"
        try:
            await lease.converse(self._holder.reported)
        except (PeerError, DriverError) as error:
            cause = error.message
        finally:
            del self.leases[lease.id]
            self._holder.detached(lease)
            self._chronicle.record(
                "lease.closed",
                cause,
                model=lease.model,
                inferd=lease.name,
                lease=lease.id,
                pid=lease.peer.pid,
            )


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
