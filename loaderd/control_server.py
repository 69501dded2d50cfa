"""The control socket: one request frame in, one reply frame out, each verb authorised by the peer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import structlog
import zmq
import zmq.asyncio

from loaderd.authorisation import Caller, Policy, parse_peer_address
from loaderd.peer_groups import groups_of
from shared.codec import CONTROL_FRAME_BYTES, PROTOCOL_VERSION, decode, encode
from shared.control import REQUEST, Reply, Request, Result, Verb
from shared.errors import ChangeoverError, DeadlineExceeded, ProtocolError, ResourceError
from shared.messages import WireError

log = structlog.get_logger(__name__)

REQUESTS_AT_ONCE = 64

Handler = Callable[[Any], Awaitable[Result]]


class ControlServer:
    """Answers requests until cancelled; a request that takes long does not hold up others."""

    def __init__(
        self, borrow_router: zmq.asyncio.Socket, policy: Policy, handlers: Mapping[type[Verb], Handler]
    ) -> None:
        self._router = borrow_router
        self._policy = policy
        self._handlers = handlers
        self._under_way = 0

    async def run(self) -> None:
        """Receive and answer."""
        async with asyncio.TaskGroup() as requests:
            while True:
                # Receiving does not wait while frames are there: a flood of them would leave no turn to
                # the answers, to the leases or to the sign of life for systemd.
                await asyncio.sleep(0)
                parts = await self._router.recv_multipart(copy=False)
                if len(parts) != 2:
                    continue  # no client of this protocol: there is no frame to answer to
                identity, frame = parts
                requests.create_task(self._serve(bytes(identity.buffer), frame))

    async def _serve(self, identity: bytes, frame: zmq.Frame) -> None:
        request_id = verb = ""
        try:
            request = decode(frame.buffer, REQUEST, CONTROL_FRAME_BYTES)
            request_id, verb = request.request_id, request.body.verb
            reply = Reply(
                protocol=PROTOCOL_VERSION, request_id=request_id, result=await self._answer(request, frame)
            )
        except ChangeoverError as error:
            log.info("request.refused", request=request_id, verb=verb, code=error.code, error=error.message)
            reply = Reply(protocol=PROTOCOL_VERSION, request_id=request_id, error=WireError.of(error))
        try:
            raw = encode(reply, CONTROL_FRAME_BYTES)
        except ProtocolError as error:
            raw = encode(
                Reply(protocol=PROTOCOL_VERSION, request_id=request_id, error=WireError.of(error)),
                CONTROL_FRAME_BYTES,
            )
        await self._router.send_multipart([identity, raw])

    async def _answer(self, request: Request, frame: zmq.Frame) -> Result:
        if request.protocol != PROTOCOL_VERSION:
            raise ProtocolError(
                f"client speaks protocol {request.protocol}, loaderd {PROTOCOL_VERSION}; "
                "use the loaderctl that came with it"
            )
        self._policy.check(request.body.verb, _caller(frame))
        left_s = (request.deadline_ns - time.monotonic_ns()) / 1e9
        if left_s <= 0:
            raise DeadlineExceeded("the request's deadline has passed")
        if self._under_way >= REQUESTS_AT_ONCE:
            raise ResourceError(f"{REQUESTS_AT_ONCE} requests are under way; try again")
        self._under_way += 1
        try:
            async with asyncio.timeout(left_s):
                return await self._handlers[type(request.body)](request.body)
        except TimeoutError as error:
            raise DeadlineExceeded(f"{request.body.verb} did not end before its deadline") from error
        finally:
            self._under_way -= 1


def _caller(frame: zmq.Frame) -> Caller:
    """The peer's credentials as the kernel gave them to libzmq when it connected."""
    try:
        address = frame.get("Peer-Address")
    except zmq.ZMQError as error:
        raise ProtocolError("the connection carries no peer address") from error
    uid, gid, pid = parse_peer_address(str(address))
    return Caller(uid, gid, pid, groups_of(uid, gid))
