"""A daemon that says what a test tells it to, over real sockets, and minds what it is asked."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

import zmq

from shared.codec import CONTROL_FRAME_BYTES, PROTOCOL_VERSION, decode, encode
from shared.control import REQUEST, Event, OperationReport, Reply, Request, Result, Verb
from shared.errors import ChangeoverError
from shared.messages import WireError

WAIT_S = 30.0

Answer = Result | ChangeoverError | bytes | None
Handler = Callable[[Verb], Answer]


class ScriptedDaemon:
    """ROUTER and XPUB on a run directory.  Asked for a verb without a handler, it fails the test.

    A handler's answer is a result, an error, raw bytes for the frame, or None for silence.  Where a client
    waits for it already, handlers come before it starts.
    """

    def __init__(self, run_dir: Path, generation: str = "generation-1") -> None:
        self.run_dir = run_dir
        self.generation = generation
        self.asked: list[Request] = []
        self.unexpected: list[str] = []
        self._handlers: dict[str, Handler] = {}
        self._chatty: set[str] = set()
        self._numbers = itertools.count(1)
        self._changed = threading.Condition()
        self._subscribers = 0
        self._outbox: queue.SimpleQueue[list[bytes] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    # --- what the test says ----------------------------------------------------------------------

    def on(self, verb: str, answer: Answer | Handler) -> Self:
        """Answer `verb` with a value or by calling a handler with the request's body."""
        self._handlers[verb] = answer if callable(answer) else lambda _: answer
        return self

    def play(self, reports: Iterable[OperationReport | ChangeoverError]) -> Self:
        """Answer `operation` with one report after the other, the last one forever; each answer is
        followed by an event, so that the client asks again at once."""
        script = list(reports)
        position = itertools.count()
        self._chatty.add("operation")
        return self.on("operation", lambda _: script[min(next(position), len(script) - 1)])

    def publish(self, kind: str, *, skip: int = 0, **fields: object) -> None:
        """Publish an event; `skip` numbers are left out before it.  From any thread."""
        for _ in range(skip):
            next(self._numbers)
        event = Event(
            protocol=PROTOCOL_VERSION,
            generation=self.generation,
            sequence=next(self._numbers),
            time_ns=1_750_000_000_000_000_000,
            kind=kind,
            **fields,  # type: ignore[arg-type]
        )
        self.publish_raw([kind.encode(), encode(event, CONTROL_FRAME_BYTES)])

    def publish_raw(self, frames: list[bytes]) -> None:
        """Publish frames as they are."""
        self._outbox.put(frames)
        self._ring()

    # --- what the test waits for -----------------------------------------------------------------

    def wait_asked(self, verb: str, times: int = 1) -> None:
        """Return once `verb` has been asked `times` times."""
        self._wait(lambda: self.count(verb) >= times, f"{verb} {times} times")

    def wait_subscribed(self) -> None:
        """Return once a client's subscription has arrived."""
        self._wait(lambda: self._subscribers > 0, "a subscriber")

    def count(self, verb: str) -> int:
        """How often `verb` has been asked."""
        return sum(request.body.verb == verb for request in self.asked)

    def _wait(self, is_so: Callable[[], bool], what: str) -> None:
        with self._changed:
            if not self._changed.wait_for(is_so, WAIT_S):
                raise AssertionError(
                    f"waited {WAIT_S} s for {what}; asked {[r.body.verb for r in self.asked]}"
                )

    # --- its life --------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        if error is None:
            assert not self.unexpected, f"loaderctl asked what it should not: {self.unexpected}"

    def start(self) -> None:
        """Bind both sockets and serve from a thread."""
        self._context = zmq.Context()
        router = self._context.socket(zmq.ROUTER)
        router.bind(f"ipc://{self.run_dir}/control.sock")
        publisher = self._context.socket(zmq.XPUB)
        publisher.bind(f"ipc://{self.run_dir}/events.sock")
        bell = self._context.socket(zmq.PAIR)
        bell.bind("inproc://bell")
        self._bell = self._context.socket(zmq.PAIR)
        self._bell.connect("inproc://bell")
        self._bell_lock = threading.Lock()
        self._thread = threading.Thread(target=self._serve, args=(router, publisher, bell))
        self._thread.start()

    def stop(self) -> None:
        """Close everything, as a daemon that exits; once stopped, stopping does nothing."""
        if self._thread is None:
            return
        self._outbox.put(None)
        self._ring()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()
        self._thread = None
        self._bell.close(linger=0)
        self._context.term()

    def _ring(self) -> None:
        with self._bell_lock:
            self._bell.send(b"")

    def _serve(
        self, router: zmq.Socket[bytes], publisher: zmq.Socket[bytes], bell: zmq.Socket[bytes]
    ) -> None:
        poller = zmq.Poller()
        for served in (router, publisher, bell):
            poller.register(served, zmq.POLLIN)
        try:
            while True:
                for ready, _ in poller.poll():
                    if ready is router:
                        self._answer(router)
                    elif ready is publisher:
                        self._note(publisher.recv())
                    else:
                        ready.recv()
                        frames = self._outbox.get()
                        if frames is None:
                            return
                        publisher.send_multipart(frames)
        finally:
            for served in (router, publisher, bell):
                served.close(linger=0)

    def _note(self, subscription: bytes) -> None:
        with self._changed:
            self._subscribers += 1 if subscription[:1] == b"\x01" else -1
            self._changed.notify_all()

    def _answer(self, router: zmq.Socket[bytes]) -> None:
        identity, frame = router.recv_multipart()
        request = decode(frame, REQUEST, CONTROL_FRAME_BYTES)
        self.asked.append(request)  # before the answer, after which the test may look
        handler = self._handlers.get(request.body.verb)
        if handler is None:
            self.unexpected.append(request.body.verb)
            answer: Answer = ChangeoverError(f"the test expected no {request.body.verb}")
        else:
            answer = handler(request.body)
        if answer is not None:
            router.send_multipart([identity, _frame(request, answer)])
        with self._changed:
            self._changed.notify_all()
        if request.body.verb in self._chatty:
            self.publish("operation.progress", operation=getattr(request.body, "operation", ""))


def _frame(request: Request, answer: Result | ChangeoverError | bytes) -> bytes:
    if isinstance(answer, bytes):
        return answer
    reply = Reply(
        protocol=PROTOCOL_VERSION,
        request_id=request.request_id,
        result=None if isinstance(answer, ChangeoverError) else answer,
        error=WireError.of(answer) if isinstance(answer, ChangeoverError) else None,
    )
    return encode(reply, CONTROL_FRAME_BYTES)
