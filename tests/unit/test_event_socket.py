"""The events socket under subscribers that mean no good: bounded, and there for the others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import structlog.testing
import zmq

from loaderd.event_socket import FRAME_BYTES, TOPICS, EventSocket

WITHIN_MS = 20_000


@pytest.fixture
def path(short_path: Path) -> Path:
    return short_path / "events.sock"


@contextmanager
def subscriber(context: zmq.Context[zmq.Socket[bytes]], path: Path) -> Iterator[zmq.Socket[bytes]]:
    with closing(context.socket(zmq.SUB)) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RECONNECT_IVL, 10)
        socket.connect(f"ipc://{path}")
        yield socket


def send_until_heard(events: EventSocket, listener: zmq.Socket[bytes], kind: bytes = b"kind") -> None:
    """Publish until the listener's connection and subscription have come through."""
    for _ in range(WITHIN_MS // 10):
        events.send_multipart([kind, b"event"], zmq.DONTWAIT)
        if listener.poll(10):
            assert listener.recv_multipart() == [kind, b"event"]
            return
    raise AssertionError("nothing was heard")


def test_whoever_subscribes_hears_what_they_asked_for(path: Path) -> None:
    with zmq.Context() as context, EventSocket(context, path, 0o600) as events:
        assert path.stat().st_mode & 0o777 == 0o600
        with subscriber(context, path) as listener:
            listener.subscribe("kind.of")
            send_until_heard(events, listener, b"kind.of.event")
    assert not path.exists()


def test_too_many_topics_end_all_connections_and_good_clients_come_back(path: Path) -> None:
    with (
        structlog.testing.capture_logs() as logs,
        zmq.Context() as context,
        EventSocket(context, path, 0o600) as events,
        subscriber(context, path) as listener,
    ):
        listener.subscribe("")
        send_until_heard(events, listener)
        with subscriber(context, path) as greedy:
            for number in range(4 * TOPICS):
                greedy.subscribe(f"topic-{number}")
            for _ in range(WITHIN_MS // 10):
                events.send_multipart([b"kind", b"event"], zmq.DONTWAIT)
                if logs:
                    break
                greedy.poll(10)  # never true: the time that a round takes
            assert logs[0]["event"] == "events.reset"
        while listener.poll(0):
            listener.recv_multipart()
        send_until_heard(events, listener)


def test_topics_that_are_given_up_do_not_count(path: Path) -> None:
    with (
        structlog.testing.capture_logs() as logs,
        zmq.Context() as context,
        EventSocket(context, path, 0o600) as events,
        subscriber(context, path) as listener,
    ):
        for number in range(3 * TOPICS):
            topic = f"topic-{number}"
            listener.subscribe(topic)
            if number % 50 == 0:
                send_until_heard(events, listener, topic.encode())
            listener.unsubscribe(topic)
        listener.subscribe("kind")
        send_until_heard(events, listener)
    assert logs == []


def test_a_long_topic_ends_its_connection_alone(path: Path) -> None:
    with (
        zmq.Context() as context,
        EventSocket(context, path, 0o600) as events,
        subscriber(context, path) as listener,
        subscriber(context, path) as greedy,
    ):
        greedy.subscribe("x" * FRAME_BYTES)
        listener.subscribe("")
        send_until_heard(events, listener)
        events.send_multipart([b"x" * FRAME_BYTES, b"event"], zmq.DONTWAIT)
        assert listener.poll(WITHIN_MS)
        assert not greedy.poll(0)
