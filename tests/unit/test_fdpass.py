"""Frames with fds between two real sockets: whole, in order, and without a leak on any path."""

from __future__ import annotations

import asyncio
import fcntl
import os
import resource
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest
import uvloop

from shared.codec import HANDOFF_FRAME_BYTES
from shared.errors import DriverError, InvariantError, PeerGone, ProtocolError
from shared.fdpass import ReceivedFds, SeqpacketChannel
from shared.handoff import FDS_PER_FRAME
from tests.support.procfs import open_fds

Scene = Callable[[SeqpacketChannel, SeqpacketChannel], Awaitable[None]]


def play(scene: Scene) -> None:
    """Run a scene with two connected channels; afterwards every fd that was opened is closed."""

    async def run() -> None:
        before = open_fds()
        left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with closing(SeqpacketChannel(left)) as one, closing(SeqpacketChannel(right)) as other:
            await scene(one, other)
        assert open_fds() == before

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(run(), 30))


@contextmanager
def memfds(count: int) -> Iterator[list[int]]:
    """Fds that can be told apart by what is in them."""
    fds = [os.memfd_create(f"fd-{number}") for number in range(count)]
    try:
        for number, fd in enumerate(fds):
            os.write(fd, str(number).encode())
        yield fds
    finally:
        for fd in fds:
            os.close(fd)


@contextmanager
def room_for(more: int) -> Iterator[None]:
    """Let this process open only so many fds more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    fillers: list[int] = []
    highest = max(int(fd.name) for fd in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + more + 1, hard))
    try:
        with suppress(OSError):
            while True:
                fillers.append(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))
        for _ in range(more):
            os.close(fillers.pop())
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in fillers:
            os.close(fd)


async def until_waiting(channel: SeqpacketChannel, tasks: int = 1) -> None:
    """Let other tasks run until so many of them wait on the channel."""
    while len(channel._waiters) < tasks:  # noqa: ASYNC110  a turn of the loop is the event
        await asyncio.sleep(0)


def test_full_batches_arrive_whole_and_in_order() -> None:
    async def scene(one: SeqpacketChannel, other: SeqpacketChannel) -> None:
        with memfds(FDS_PER_FRAME) as fds:
            for turn in range(3):
                await one.send(b"frame %d" % turn, fds)
                frame, received = await other.receive()
                with received:
                    assert frame == b"frame %d" % turn
                    assert len(received) == FDS_PER_FRAME
                    for number in range(FDS_PER_FRAME):
                        fd = received.take(number)
                        assert os.pread(fd, 8, 0) == str(number).encode()
                        os.close(fd)

    play(scene)


def test_received_fds_are_closed_on_exec() -> None:
    async def scene(one: SeqpacketChannel, other: SeqpacketChannel) -> None:
        with memfds(1) as (fd,):
            fcntl.fcntl(fd, fcntl.F_SETFD, 0)
            await one.send(b"x", [fd])
            _, received = await other.receive()
            with received:
                mine = received.take(0)
                assert fcntl.fcntl(mine, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
                os.close(mine)

    play(scene)


def test_what_is_not_taken_is_closed() -> None:
    async def scene(one: SeqpacketChannel, other: SeqpacketChannel) -> None:
        with memfds(5) as fds:
            before = open_fds()
            await one.send(b"x", fds)
            _, received = await other.receive()
            with received:
                os.close(received.take(2))
                with pytest.raises(InvariantError, match="already taken"):
                    received.take(2)
            assert open_fds() == before
            received.close()

    play(scene)


def test_fds_that_the_kernel_had_to_drop() -> None:
    async def scene(one: SeqpacketChannel, other: SeqpacketChannel) -> None:
        with memfds(10) as fds:
            await one.send(b"x", fds)
            await one.send(b"next")
            before = open_fds()
            with room_for(4), pytest.raises(ProtocolError, match="the fds of a handoff frame"):
                await other.receive()
            assert open_fds() == before
            frame, received = await other.receive()
            assert (frame, len(received)) == (b"next", 0)

    play(scene)


def test_a_frame_that_is_too_long() -> None:
    async def scene(one: SeqpacketChannel, other: SeqpacketChannel) -> None:
        with memfds(2) as fds:
            await one.send(b"x" * (HANDOFF_FRAME_BYTES + 1), fds)
            before = open_fds()
            with pytest.raises(ProtocolError, match="the data of a handoff frame"):
                await other.receive()
            assert open_fds() == before

    play(scene)


def test_more_fds_than_a_frame_may_carry() -> None:
    async def scene(one: SeqpacketChannel, other: SeqpacketChannel) -> None:
        with memfds(1) as (fd,), pytest.raises(ProtocolError, match="are allowed"):
            await one.send(b"x", [fd] * (FDS_PER_FRAME + 1))

    play(scene)


def test_a_peer_that_sends_more_fds_than_that() -> None:
    async def scene(one: SeqpacketChannel, other: SeqpacketChannel) -> None:
        with memfds(1) as (fd,):
            socket.send_fds(one._socket, [b"x"], [fd] * (FDS_PER_FRAME + 20))
            before = open_fds()
            with pytest.raises(ProtocolError, match="the fds of a handoff frame"):
                await other.receive()
            assert open_fds() == before

    play(scene)


def test_an_fd_that_is_not_open() -> None:
    async def scene(one: SeqpacketChannel, other: SeqpacketChannel) -> None:
        with pytest.raises(DriverError, match="sendmsg"):
            await one.send(b"x", [999_999])

    play(scene)


def test_full_buffers_make_the_sender_wait_and_lose_nothing() -> None:
    async def scene(one: SeqpacketChannel, other: SeqpacketChannel) -> None:
        total = 400
        sent = 0

        async def sender(first: int) -> None:
            nonlocal sent
            for number in range(first, total, 2):
                await one.send(number.to_bytes(4, "big") * 4_000)
                sent += 1

        senders = [asyncio.ensure_future(sender(first)) for first in range(2)]
        await until_waiting(one)
        assert sent < total
        numbers = []
        for _ in range(total):
            frame, received = await other.receive()
            received.close()
            assert len(frame) == 16_000
            numbers.append(int.from_bytes(frame[:4], "big"))
        await asyncio.gather(*senders)
        assert sorted(numbers) == list(range(total))
        for first in range(2):
            assert [n for n in numbers if n % 2 == first] == list(range(first, total, 2))

    play(scene)


def test_closing_wakes_whoever_waits() -> None:
    async def scene(one: SeqpacketChannel, other: SeqpacketChannel) -> None:
        receiving = asyncio.ensure_future(one.receive())

        async def fill() -> None:
            while True:
                await one.send(b"x" * 10_000)

        sending = asyncio.ensure_future(fill())
        await until_waiting(one, 2)
        one.close()
        for task in (receiving, sending):
            with pytest.raises(PeerGone, match="was closed"):
                await task
        for late in (one.receive(), one.send(b"x")):
            with pytest.raises(PeerGone):
                await late
        one.close()

    play(scene)


def test_a_closed_number_that_is_used_again_belongs_to_its_new_owner() -> None:
    async def scene(one: SeqpacketChannel, other: SeqpacketChannel) -> None:
        receiving = asyncio.ensure_future(one.receive())
        await until_waiting(one)
        number = one._socket.fileno()
        one.close()
        left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        assert number in (left.fileno(), right.fileno())
        with closing(SeqpacketChannel(left)) as again, closing(SeqpacketChannel(right)) as peer:
            await peer.send(b"new")
            assert (await again.receive())[0] == b"new"
        with pytest.raises(PeerGone):
            await receiving

    play(scene)


def test_a_peer_that_goes_away() -> None:
    async def scene(one: SeqpacketChannel, other: SeqpacketChannel) -> None:
        receiving = asyncio.ensure_future(one.receive())
        with memfds(3) as fds:
            await other.send(b"last", fds)
            other.close()
            frame, received = await receiving
            received.close()
        assert frame == b"last"
        with pytest.raises(PeerGone, match="the peer"):
            await one.receive()
        with pytest.raises(PeerGone, match="the peer"):
            await one.send(b"x")

    play(scene)


def test_the_last_frames_of_a_peer_that_had_not_read_everything_arrive() -> None:
    async def scene(one: SeqpacketChannel, other: SeqpacketChannel) -> None:
        await other.send(b"nobody reads this")
        with memfds(1) as fds:
            await one.send(b"first", fds)
        await one.send(b"last")
        one.close()
        frame, received = await other.receive()
        received.close()
        assert (frame, len(received)) == (b"first", 1)
        frame, received = await other.receive()
        received.close()
        assert frame == b"last"
        with pytest.raises(PeerGone):
            await other.receive()

    play(scene)


def test_fds_of_frames_that_nobody_reads_go_with_the_socket() -> None:
    async def scene(one: SeqpacketChannel, other: SeqpacketChannel) -> None:
        read, write = os.pipe()
        await one.send(b"x", [write])
        os.close(write)
        one.close()
        other.close()
        # The end of the pipe comes only once the kernel has dropped the fd in flight.
        assert os.read(read, 1) == b""
        os.close(read)

    play(scene)


def test_a_wait_that_is_cancelled_can_begin_again() -> None:
    async def scene(one: SeqpacketChannel, other: SeqpacketChannel) -> None:
        receiving = asyncio.ensure_future(one.receive())
        await until_waiting(one)
        receiving.cancel()
        await asyncio.wait((receiving,))
        assert not one._waiters
        await other.send(b"x")
        assert (await one.receive())[0] == b"x"

    play(scene)


def test_credentials_are_those_of_the_process(tmp_path: Path) -> None:
    async def scene(one: SeqpacketChannel, other: SeqpacketChannel) -> None:
        assert (one.peer.pid, one.peer.uid, one.peer.gid) == (os.getpid(), os.getuid(), os.getgid())

    play(scene)


def test_connecting_to_nobody_leaves_nothing(tmp_path: Path) -> None:
    async def run() -> None:
        before = open_fds()
        with pytest.raises(FileNotFoundError):
            await SeqpacketChannel.connect(str(tmp_path / "none.sock"))
        assert open_fds() == before

    asyncio.run(run())


def test_nothing_received_is_nothing_to_close() -> None:
    with ReceivedFds() as received:
        assert len(received) == 0
