"""A health probe over a Unix socket, as `curl --unix-socket` makes it."""

from __future__ import annotations

import asyncio
from pathlib import Path

_TIMEOUT_S = 5.0


async def probe(socket: Path, path: str) -> int:
    """The HTTP status code of `GET path` on `socket`; 0 if there is no answer in five seconds."""
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            reader, writer = await asyncio.open_unix_connection(str(socket))
            try:
                writer.write(f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode())
                await writer.drain()
                status = (await reader.readline()).split()
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return 0
    return int(status[1]) if len(status) > 1 and status[1].isdigit() else 0
