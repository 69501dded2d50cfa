"""The clients against a server that speaks just enough of the API."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

from demo.evidence import Endpoint, Prompt
from demo.probe import probe
from demo.traffic import ClientPlan, Traffic, client_plans

CHAT = Prompt("hello", Endpoint.CHAT, "Hello")
TEXT = Prompt("sun", Endpoint.COMPLETIONS, "The sun")


def chunk(path: str, text: str, fingerprint: str, finish: str | None = None) -> str:
    choice: dict[str, object] = {"index": 0, "finish_reason": finish}
    choice |= {"delta": {"content": text}} if "chat" in path else {"text": text}
    kind = "chat.completion.chunk" if "chat" in path else "text_completion"
    body = {"id": "1", "created": 1, "model": "m", "object": kind, "choices": [choice]}
    return "data: " + json.dumps({**body, "system_fingerprint": fingerprint}) + "\n\n"


class Server:
    """Answers every request with two chunks; keeps the heads of the requests it got."""

    def __init__(self, *, second_fingerprint: str = "v1@x", status: str = "200 OK") -> None:
        self.heads: list[str] = []
        self._second = second_fingerprint
        self._status = status

    @contextlib.asynccontextmanager
    async def listen(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        async with server:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.heads.append(head)
        length = next(
            int(line.split(":")[1]) for line in head.lower().split("\r\n") if "content-length" in line
        )
        await reader.readexactly(length)
        path = head.split()[1]
        body = chunk(path, "Bon", "v1@x") + chunk(path, "jour", self._second, "stop") + "data: [DONE]\n\n"
        writer.write(
            f"HTTP/1.1 {self._status}\r\ncontent-type: text/event-stream\r\nx-model-version: v1@x\r\n"
            f"connection: close\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode()
        )
        await writer.drain()
        writer.close()


async def one_round(server: Server, *plans: ClientPlan) -> Traffic:
    async with server.listen() as api:
        traffic = Traffic(api, plans)
        clients = asyncio.create_task(traffic.run())
        await traffic.wait_for_rounds(1)
        traffic.end()
        await clients
    return traffic


def test_each_answer_is_recorded_with_every_version_that_its_stream_named() -> None:
    server = Server(second_fingerprint="v2@y")
    plans = (ClientPlan("a", (CHAT,), session="s1"), ClientPlan("b", (TEXT,)))
    traffic = asyncio.run(one_round(server, *plans))
    assert {answer.session for answer in traffic.answers} == {"s1", None}
    for answer in traffic.answers:
        assert (answer.text, answer.finish, answer.error) == ("Bonjour", "stop", "")
        assert answer.header == "v1@x"
        assert answer.fingerprints == ("v1@x", "v2@y")
        assert len(answer.chunk_ns) == 2
        assert answer.started_ns <= answer.chunk_ns[0] <= answer.chunk_ns[1] <= answer.ended_ns
    by_path = {head.split()[1]: head.lower() for head in server.heads}
    assert "x-session-id: s1" in by_path["/v1/chat/completions"]
    assert "x-session-id" not in by_path["/v1/completions"]


def test_an_error_is_part_of_the_record_and_is_not_retried() -> None:
    server = Server(status="503 Service Unavailable")
    traffic = asyncio.run(one_round(server, ClientPlan("a", (CHAT,))))
    assert traffic.answers
    assert all("InternalServerError" in answer.error for answer in traffic.answers)
    assert len(server.heads) == len(traffic.answers)


def test_at_least_four_clients_use_both_endpoints_and_a_session() -> None:
    plans = client_plans()
    assert len(plans) >= 4
    assert {prompt.endpoint for plan in plans for prompt in plan.prompts} == set(Endpoint)
    assert sum(plan.session is not None for plan in plans) == 1


def test_a_probe_reads_the_status_code_and_a_missing_socket_is_zero(tmp_path: Path) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    async def scenario() -> tuple[int, int]:
        path = tmp_path / "health.sock"
        async with await asyncio.start_unix_server(answer, str(path)):
            found = await probe(path, "/readyz")
        return found, await probe(tmp_path / "missing.sock", "/readyz")

    assert asyncio.run(scenario()) == (503, 0)
