"""The client's side of a request: its body, and whether it is still there."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine

from starlette.datastructures import Headers
from starlette.types import Receive, Scope

from inferd.api.errors import BodyTooLarge


class ClientGone(Exception):
    """The client closed the connection before its request was complete."""


async def read_body(scope: Scope, receive: Receive, limit_bytes: int) -> bytes:
    """The request's body.  Raises BodyTooLarge as soon as it is known to exceed `limit_bytes` (from its
    announced length before any of it is read) and ClientGone."""
    announced = Headers(scope=scope).get("content-length", "0")
    if not announced.isdecimal() or int(announced[:20]) > limit_bytes:
        raise BodyTooLarge(limit_bytes)
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        body += message.get("body", b"")
        if len(body) > limit_bytes:
            raise BodyTooLarge(limit_bytes)
        if not message.get("more_body", False):
            return bytes(body)


async def while_connected(receive: Receive, work: Coroutine[None, None, None]) -> None:
    """Run `work`, which is cancelled when the client goes away; its body must have been read.  Returns
    when `work` has ended and cleaned up; raises what it raised, or ClientGone."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.wait((task, watch))
    if task.cancelled():
        raise ClientGone
    task.result()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
