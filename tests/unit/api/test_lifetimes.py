"""However a request ends, its sequences end with it and its ticket is given back, once.

`CountedAdmission` raises on a second release, on whichever thread it happens."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path

import pytest

from inferd.api.metrics import NO_VERSION, version_label
from inferd.engine.protocol import Tokenizer
from shared.errors import InvalidRequest

from ..engine.fake_engine import CharTokenizer, FakeEngine
from .serving import MODEL, V1, V2, CountedAdmission, Served, fake_engine, serve

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}


def send_request(connection: socket.socket, **change: object) -> None:
    body = json.dumps(CHAT | change).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)


def read_until(connection: socket.socket, mark: bytes) -> bytes:
    seen = b""
    while mark not in seen:
        more = connection.recv(65536)
        assert more, seen
        seen += more
    return seen


class GatedTokenizer(CharTokenizer):
    """Waits at a gate in the middle of a template."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.gate = threading.Event()
        self.error: Exception | None = None

    def apply_chat_template(self, messages: list[dict[str, object]]) -> list[int]:
        self.reached.set()
        assert self.gate.wait(20)
        if self.error is not None:
            raise self.error
        return super().apply_chat_template(messages)


class GatedEngine(FakeEngine):
    """Its tokenizer can be held, and so can its answer to a cancel."""

    def __init__(self) -> None:
        super().__init__()
        self.gated = GatedTokenizer()
        self.holds_cancels = False
        self.cancels: list[int] = []
        self.is_cancelled = threading.Event()

    def tokenizer(self, slot: int) -> Tokenizer:
        super().tokenizer(slot)
        return self.gated

    def cancel(self, sequence_id: int) -> None:
        self.cancels.append(sequence_id)
        if not self.holds_cancels:
            super().cancel(sequence_id)
        self.is_cancelled.set()

    def let_cancels_go(self) -> None:
        for sequence_id in self.cancels:
            super().cancel(sequence_id)


@pytest.fixture
def engine() -> GatedEngine:
    engine = GatedEngine()
    engine.start()
    for slot, tag in enumerate((V1, V2)):
        engine.build(slot, tag, {}, Path())
    engine.hold("steps")
    return engine


async def abort(served: Served) -> tuple[int, int]:
    return served.api.abort(V2), served.api.abort(V1)


def disconnected(served: Served, endpoint: str = "chat", version: str = version_label(V1)) -> float:
    labels = {"endpoint": endpoint, "outcome": "disconnected", "version": version}
    return served.metric("inferd_api_requests_total", **labels)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_while_its_prompt_is_read(engine: GatedEngine, stream: bool) -> None:
    admission = CountedAdmission(V1)
    with serve(engine, admission) as served:
        with served.connect() as connection:
            send_request(connection, stream=stream)
            assert engine.gated.reached.wait(20)
            assert admission.out == 1
        assert admission.wait_none_out()
        engine.gated.gate.set()
    assert engine.requests == []
    assert disconnected(served) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_while_it_is_queued(engine: GatedEngine, stream: bool) -> None:
    engine.gated.gate.set()
    admission = CountedAdmission(V1)
    with serve(engine, admission) as served:
        with served.connect() as connection:
            send_request(connection, stream=stream, n=2)
            assert engine.wait_submitted(2)
            assert admission.out == 1
        assert engine.wait_idle()
        assert admission.wait_none_out()
        assert sorted(engine.cancels) == sorted(number for number, *_ in engine.requests)
    assert disconnected(served) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_in_the_middle_of_its_answer(engine: GatedEngine, stream: bool) -> None:
    engine.gated.gate.set()
    admission = CountedAdmission(V1)
    with serve(engine, admission) as served:
        with served.connect() as connection:
            send_request(connection, stream=stream)
            assert engine.wait_submitted(1)
            engine.step(3)
            if stream:
                read_until(connection, b'"content":"v')
            assert admission.out == 1
        assert engine.wait_idle()
        assert admission.wait_none_out()
        assert len(engine.cancels) == 1
    assert disconnected(served) == 1


def test_a_client_that_goes_before_its_body_is_complete_takes_no_ticket(engine: GatedEngine) -> None:
    admission = CountedAdmission(V1)
    with serve(engine, admission) as served:
        with served.connect() as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{")
        assert served.http().get("/v1/models").status_code == 200
    assert admission.taken == 0
    assert disconnected(served, "completions", NO_VERSION) == 1


def test_the_ticket_is_held_until_the_engine_has_let_go(engine: GatedEngine) -> None:
    engine.gated.gate.set()
    engine.holds_cancels = True
    admission = CountedAdmission(V1)
    with serve(engine, admission) as served:
        with served.connect() as connection:
            send_request(connection, stream=True)
            assert engine.wait_submitted(1)
        assert engine.is_cancelled.wait(20)
        assert served.http().get("/v1/models").status_code == 200
        assert admission.out == 1  # the client is gone, the sequence is still in the slot
        engine.let_cancels_go()
        assert admission.wait_none_out()


def test_a_refusal_by_the_tokenizer_gives_the_ticket_back(engine: GatedEngine) -> None:
    engine.gated.gate.set()
    engine.gated.error = InvalidRequest("the template knows no such thing")
    admission = CountedAdmission(V1)
    with serve(engine, admission) as served:
        response = served.http().post("/v1/chat/completions", json=CHAT)
        assert response.status_code == 400
        assert response.json()["error"]["message"] == "the template knows no such thing"
        assert (admission.taken, admission.out) == (1, 0)


def test_a_slow_reader_does_not_hold_the_version() -> None:
    answer = "x" * 3000
    engine = fake_engine(V1, reply=lambda tag, prompt: answer)
    admission = CountedAdmission(V1)
    with serve(engine, admission, send_buffer_bytes=4096) as served, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(20)
        connection.connect(("127.0.0.1", served.port))
        send_request(connection, stream=True, logprobs=True, top_logprobs=20)
        assert engine.wait_submitted(1)
        assert admission.wait_none_out()  # nothing was read yet, and it does not fit into the buffers
        assert served.api.running == 1
        seen = read_until(connection, b"data: [DONE]")
        assert seen.count(b'"token":"x","logprob":-0.25,"bytes":[120],"top_logprobs"') == 3000


def test_a_request_stays_on_its_version_when_another_one_takes_over(engine: GatedEngine) -> None:
    admission = CountedAdmission(V1, V2)
    with serve(engine, admission) as served, served.connect() as connection:
        send_request(connection, stream=True)
        assert engine.gated.reached.wait(20)
        admission.current = 1
        engine.gated.gate.set()
        assert engine.wait_submitted(1)
        assert engine.requests[0][1] == 0
        engine.release("steps")
        seen = read_until(connection, b"data: [DONE]")
        assert f"x-model-version: {V1}".encode() in seen
        assert str(V2).encode() not in seen
        assert served.openai().chat.completions.create(**CHAT).system_fingerprint == str(V2)  # type: ignore[call-overload]


def test_a_server_that_shuts_down_ends_what_runs(engine: GatedEngine) -> None:
    engine.gated.gate.set()
    admission = CountedAdmission(V1)
    with serve(engine, admission, grace_s=0) as served, served.connect() as connection:
        send_request(connection, stream=True)
        assert engine.wait_submitted(1)
        served.stop()
        assert engine.wait_idle()
        assert admission.wait_none_out()


def test_an_engine_that_outlives_the_event_loop_gives_the_ticket_back(engine: GatedEngine) -> None:
    engine.gated.gate.set()
    engine.holds_cancels = True
    admission = CountedAdmission(V1)
    with serve(engine, admission, grace_s=0) as served, served.connect() as connection:
        send_request(connection)
        assert engine.wait_submitted(1)
        served.stop()
        assert served.loop.is_closed()
        assert admission.out == 1
        engine.let_cancels_go()
        assert admission.wait_none_out()


def test_an_engine_that_ends_a_sequence_itself_is_a_503(engine: GatedEngine) -> None:
    engine.gated.gate.set()
    admission = CountedAdmission(V1)
    with serve(engine, admission) as served, served.connect() as connection:
        send_request(connection)
        assert engine.wait_submitted(1)
        FakeEngine.cancel(engine, engine.requests[0][0])
        seen = read_until(connection, b'"code":"aborted"')
        assert seen.startswith(b"HTTP/1.1 503")
        assert b"retry-after: 1" in seen
        assert admission.wait_none_out()


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_is_moved_names_and_holds_both_versions(engine: GatedEngine, stream: bool) -> None:
    engine.gated.gate.set()
    admission = CountedAdmission(V1, V2)
    moved: list[tuple[int, int]] = []

    async def flip() -> int:
        return served.api.move(V1, lambda sequence_id, slot: moved.append((sequence_id, slot)))

    with serve(engine, admission) as served, served.connect() as connection:
        send_request(connection, stream=stream, n=2)
        assert engine.wait_submitted(2)
        admission.current = 1
        assert served.call(flip()) == 1
        assert moved == [(number, 1) for number, *_ in engine.requests]
        assert admission.out == 2
        assert served.call(flip()) == 0
        engine.release("steps")
        seen = read_until(connection, b"data: [DONE]" if stream else b'"cached_tokens":0}}}').decode()
        assert admission.wait_none_out()
    if stream:
        assert f"x-model-version: {V1}\r\n" in seen  # the headers went out before
        assert f'"model_version":"{V1}, {V2}"' in seen
    else:
        assert f"x-model-version: {V1}, {V2}\r\n" in seen
    assert f'"system_fingerprint":"{V2}"' in seen


def test_requests_of_a_withdrawn_version_end_with_an_error(engine: GatedEngine) -> None:
    engine.gated.gate.set()
    engine.holds_cancels = True  # the client is told at once, the ticket waits for the engine
    admission = CountedAdmission(V1, V2)
    with serve(engine, admission) as served, served.connect() as connection:
        send_request(connection)
        assert engine.wait_submitted(1)
        assert served.call(abort(served)) == (0, 1)
        assert read_until(connection, b'"code":"aborted"').startswith(b"HTTP/1.1 503")
        assert admission.out == 1
        engine.let_cancels_go()
        assert admission.wait_none_out()


def test_a_request_that_is_ended_while_its_prompt_is_read_submits_nothing(engine: GatedEngine) -> None:
    admission = CountedAdmission(V1, V2)
    with serve(engine, admission) as served, served.connect() as connection:
        send_request(connection)
        assert engine.gated.reached.wait(20)
        assert served.call(abort(served)) == (0, 1)
        engine.gated.gate.set()
        assert read_until(connection, b'"code":"aborted"').startswith(b"HTTP/1.1 503")
        assert admission.wait_none_out()
    assert engine.requests == []
