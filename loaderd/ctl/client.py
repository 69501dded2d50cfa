"""Requests to loaderd over `control.sock`, one at a time, each with a deadline."""

from __future__ import annotations

import os
import secrets
import socket
import time
from pathlib import Path
from typing import TypeVar

import zmq

from loaderd.ctl.event_stream import EventStream
from shared.accounts import group_text, user_text
from shared.closing import Closing
from shared.codec import CONTROL_FRAME_BYTES, PROTOCOL_VERSION, decode, encode
from shared.control import REPLY, Push, Reply, Request, Result, Rollback, Verb
from shared.errors import DaemonUnreachable, NotPermitted, ProtocolError
from shared.run_dir import RunDir

REPLY_DEADLINE_S = 5.0
"""For verbs that loaderd answers from memory."""

PLAN_DEADLINE_S = 60.0
"""For a push: its reply carries the plan, for which headers are read from a disk that may be cold."""

HASH_DEADLINE_S = 600.0
"""For verify and diff, which hash or compare every byte of a version."""

_PROBE_S = 1.0
_GRACE_S = 0.25  # for a daemon that answers, at the deadline, that it has passed
_HELP = "try: systemctl status loaderd"

R = TypeVar("R", bound=Result)


class ControlClient(Closing):
    """A connection to loaderd's control socket; blocking, one request outstanding.  Owns its ZeroMQ
    context, which the event streams it opens share: close those first."""

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None

    def close(self) -> None:
        """Drop the connection and what was not sent."""
        self._disconnect()
        self._context.term()

    def events(self, *, must_listen: bool) -> EventStream:
        """Subscribe to loaderd's events; the caller closes the stream.

        Raises DaemonUnreachable if nothing listens and `must_listen`; otherwise the subscription
        begins whenever somebody does.
        """
        if must_listen:
            _probe(self._run_dir.events)
        return EventStream(self._context, self._run_dir.events)

    def ask(self, body: Verb, expected: type[R], deadline_s: float = REPLY_DEADLINE_S) -> R:
        """The daemon's answer to `body`, waiting at most `deadline_s`.

        Raises DaemonUnreachable, NotPermitted, ProtocolError, or what the daemon answered.
        """
        end_ns = time.monotonic_ns() + round(deadline_s * 1e9)
        request = Request(
            protocol=PROTOCOL_VERSION, request_id=secrets.token_hex(8), deadline_ns=end_ns, body=body
        )
        try:
            reply = self._exchange(request, end_ns, deadline_s)
        except BaseException:
            # A late answer must find no socket on which it could be taken for the next one's.
            self._disconnect()
            raise
        if reply.error is not None:
            raise reply.error.to_error()
        if not isinstance(reply.result, expected):
            raise ProtocolError(
                f"loaderd answered {body.verb} with {type(reply.result).__name__}, "
                f"expected {expected.__name__}"
            )
        return reply.result

    def _exchange(self, request: Request, end_ns: int, deadline_s: float) -> Reply:
        connection = self._connect()
        if not connection.poll(_left_ms(end_ns), zmq.POLLOUT):
            _probe(self._run_dir.control)  # it may have gone away since
            raise DaemonUnreachable(
                f"{self._run_dir.control} accepts connections, but nobody speaks ZeroMQ there; {_HELP}"
            )
        try:
            connection.send(encode(request, CONTROL_FRAME_BYTES), zmq.NOBLOCK)
        except zmq.Again as error:
            # It was there a moment ago; with IMMEDIATE a request is never queued for who comes next.
            raise DaemonUnreachable(
                f"{self._run_dir.control} hung up before it was asked; {_HELP}"
            ) from error
        while connection.poll(_left_ms(end_ns + round(_GRACE_S * 1e9)), zmq.POLLIN):
            frames = connection.recv_multipart(zmq.NOBLOCK)
            if len(frames) != 1:
                raise ProtocolError(f"reply of {len(frames)} frames on {self._run_dir.control}, expected 1")
            reply = decode(frames[0], REPLY, CONTROL_FRAME_BYTES)
            if reply.protocol != PROTOCOL_VERSION:
                raise ProtocolError(
                    f"loaderd speaks protocol {reply.protocol}, this loaderctl {PROTOCOL_VERSION}"
                )
            # A daemon that could not read the request cannot know its id.
            if reply.request_id == request.request_id or (not reply.request_id and reply.error is not None):
                return reply
        unanswered = _unanswered(request.body)
        try:
            _probe(self._run_dir.control)
        except DaemonUnreachable as error:
            raise DaemonUnreachable(f"{error.message}{unanswered}") from error
        raise DaemonUnreachable(
            f"no answer on {self._run_dir.control} within {deadline_s:g} s; {_HELP}{unanswered}"
        )

    def _connect(self) -> zmq.Socket[bytes]:
        if self._socket is not None:
            return self._socket
        # ZeroMQ connects in the background and never says that nobody is there.
        _probe(self._run_dir.control)
        connection: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        connection.setsockopt(zmq.LINGER, 0)
        # Without a peer, a request is not queued: it would be carried out whenever loaderd comes back.
        connection.setsockopt(zmq.IMMEDIATE, 1)
        connection.setsockopt(zmq.MAXMSGSIZE, CONTROL_FRAME_BYTES)
        connection.connect(f"ipc://{self._run_dir.control}")
        self._socket = connection
        return connection

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._socket.close(linger=0)
            self._socket = None


def _unanswered(body: Verb) -> str:
    """What is to be said of a request that may be carried out although nobody answered; nothing of one
    that only asks."""
    if not isinstance(body, Push | Rollback):
        return ""
    return (
        f"; the {body.verb} was sent and not answered, and may be carried out: see loaderctl status when "
        "loaderd answers"
    )


def _left_ms(end_ns: int) -> int:
    return max(0, -(-(end_ns - time.monotonic_ns()) // 1_000_000))


def _probe(path: Path) -> None:
    """Return if something accepts connections on `path`; raises DaemonUnreachable or NotPermitted."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(_PROBE_S)
            probe.connect(str(path))
    except FileNotFoundError as error:
        raise DaemonUnreachable(f"loaderd is not there: {path} does not exist; {_HELP}") from error
    except ConnectionRefusedError as error:
        raise DaemonUnreachable(
            f"loaderd is not there: {path} was left behind and nobody listens; {_HELP}"
        ) from error
    except PermissionError as error:
        raise NotPermitted(f"{user_text(os.geteuid())} may not open {path}; {_owners(path)} may") from error
    except OSError as error:
        raise DaemonUnreachable(f"cannot connect to {path}: {error}; {_HELP}") from error


def _owners(path: Path) -> str:
    """Whom the mode of a socket file lets in, as far as it can be told from outside."""
    try:
        status = path.stat()
    except OSError:
        return "root, the user that runs loaderd and its group"
    return f"root, {user_text(status.st_uid)} and group {group_text(status.st_gid)}"
