"""Frames with file descriptors over AF_UNIX SOCK_SEQPACKET, without leaking one on any path.

uvloop's transports refuse `sendmsg`, so the channel keeps its own non-blocking socket and waits for
readiness with `loop.add_reader` and `loop.add_writer`.
"""

from __future__ import annotations

import array
import asyncio
import os
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

from shared.closing import Closing
from shared.codec import HANDOFF_FRAME_BYTES
from shared.errors import DriverError, InvariantError, PeerGone, ProtocolError
from shared.handoff import FDS_PER_FRAME

_FD_BYTES = array.array("i").itemsize
_UCRED = struct.Struct("iII")  # pid, uid, gid; unix(7)


@dataclass(frozen=True, slots=True)
class PeerCredentials:
    """Who is at the other end, as the kernel recorded it when the connection was made."""

    pid: int
    uid: int
    gid: int

    @classmethod
    def of(cls, connected: socket.socket) -> Self:
        """Read SO_PEERCRED of a connected AF_UNIX socket."""
        raw = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
        return cls(*_UCRED.unpack(raw))


class ReceivedFds(Closing):
    """The fds of one frame; those not taken are closed with it."""

    def __init__(self, take_fds: Sequence[int] = ()) -> None:
        self._fds: list[int | None] = list(take_fds)

    def __len__(self) -> int:
        return len(self._fds)

    def take(self, index: int) -> int:
        """Hand over the fd at `index`; the caller owns it.  Raises InvariantError the second time."""
        fd = self._fds[index]
        if fd is None:
            raise InvariantError(f"fd {index} of the frame was already taken")
        self._fds[index] = None
        return fd

    def close(self) -> None:
        """Close every fd that nobody took."""
        for index, fd in enumerate(self._fds):
            if fd is not None:
                self._fds[index] = None
                os.close(fd)


class SeqpacketChannel:
    """One connected SEQPACKET socket: whole frames in order, each with up to FDS_PER_FRAME fds.

    Any number of tasks may send; one task receives.
    """

    def __init__(self, take_socket: socket.socket) -> None:
        self._socket = take_socket
        self._socket.setblocking(False)
        self._sending = asyncio.Lock()
        self._waiters: set[asyncio.Future[None]] = set()
        self.peer = PeerCredentials.of(take_socket)

    @classmethod
    async def connect(cls, path: str) -> Self:
        """Connect to a listening socket; raises OSError as `connect(2)` does."""
        end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            end.setblocking(False)
            end.connect(path)  # AF_UNIX connects at once or fails, it never is in progress
            return cls(end)
        except BaseException:
            end.close()
            raise

    async def send(self, frame: bytes, borrow_fds: Sequence[int] = ()) -> None:
        """Send one frame with its fds, waiting for buffer space.  Raises PeerGone if nobody reads
        any more, ProtocolError if there are too many fds."""
        if len(borrow_fds) > FDS_PER_FRAME:
            raise ProtocolError(f"{len(borrow_fds)} fds in one frame, {FDS_PER_FRAME} are allowed")
        ancillary = []
        if borrow_fds:
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", borrow_fds))]
        async with self._sending:
            while True:
                self._check_open()
                try:
                    self._socket.sendmsg([frame], ancillary, socket.MSG_NOSIGNAL)
                    return
                except BlockingIOError:
                    loop = asyncio.get_running_loop()
                    await self._ready(loop.add_writer, loop.remove_writer)
                except (BrokenPipeError, ConnectionResetError) as error:
                    raise PeerGone("the peer closed the handoff connection") from error
                except OSError as error:
                    # ETOOMANYREFS: too many fds in flight; EMSGSIZE: the frame exceeds the buffer.
                    raise DriverError("sendmsg", error.errno or 0, error.strerror or "") from error

    async def receive(self) -> tuple[bytes, ReceivedFds]:
        """The next frame and its fds, which the caller must close.  Raises PeerGone at the end of the
        connection, ProtocolError if the kernel had to cut the frame or its fds."""
        loop = asyncio.get_running_loop()
        was_reset = False
        while True:
            self._check_open()
            try:
                frame, ancillary, flags, _ = self._socket.recvmsg(
                    HANDOFF_FRAME_BYTES,
                    socket.CMSG_SPACE(FDS_PER_FRAME * _FD_BYTES),
                    socket.MSG_CMSG_CLOEXEC,
                )
            except BlockingIOError:
                await self._ready(loop.add_reader, loop.remove_reader)
                continue
            except ConnectionResetError as error:
                # The peer closed before it had read everything; the kernel says so once, ahead of the
                # frames that the peer had sent.
                if was_reset:
                    raise PeerGone("the peer reset the handoff connection") from error
                was_reset = True
                continue
            except OSError as error:
                raise DriverError("recvmsg", error.errno or 0, error.strerror or "") from error
            fds = ReceivedFds(_fds_in(ancillary))
            if flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC):
                fds.close()
                what = "fds" if flags & socket.MSG_CTRUNC else "data"
                raise ProtocolError(f"the {what} of a handoff frame did not fit and were cut")
            if not frame:
                fds.close()
                raise PeerGone("the peer closed the handoff connection")
            return frame, fds

    def close(self) -> None:
        """End the connection; tasks that wait on it get PeerGone.  Closing twice is allowed: both
        ends of a lease may notice its end."""
        if self._socket.fileno() < 0:
            return
        if self._waiters:
            # The loop must forget the fd before its number can be given to another file.
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._socket)
            loop.remove_writer(self._socket)
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_exception(PeerGone("the handoff connection was closed"))
        self._socket.close()

    def _check_open(self) -> None:
        if self._socket.fileno() < 0:
            raise PeerGone("the handoff connection was closed")

    async def _ready(self, add: Callable[..., None], remove: Callable[[socket.socket], bool]) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        add(self._socket, _wake, waiter)
        try:
            await waiter
        finally:
            self._waiters.discard(waiter)
            if self._socket.fileno() >= 0:
                remove(self._socket)


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def _fds_in(ancillary: Sequence[tuple[int, int, bytes]]) -> list[int]:
    fds: list[int] = []
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            whole = array.array("i")
            # MSG_CTRUNC can leave a partial number at the end; it is no fd.
            whole.frombytes(data[: len(data) - len(data) % _FD_BYTES])
            fds.extend(whole)
    return fds
