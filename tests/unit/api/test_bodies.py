"""A body is bounded before it is read, however it is sent."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from inferd.api.settings import ApiSettings

from .serving import MODEL, V1, CountedAdmission, Served, fake_engine, serve

LIMIT = 200_000


@pytest.fixture(scope="module")
def small() -> Iterator[Served]:
    with serve(fake_engine(V1), CountedAdmission(V1), ApiSettings(max_body_bytes=LIMIT)) as served:
        yield served


def reply(connection: socket.socket) -> bytes:
    seen = b""
    while more := connection.recv(65536):
        seen += more
    return seen


def test_an_announced_length_over_the_limit_is_refused_unread(small: Served) -> None:
    with small.connect() as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {LIMIT + 1}\r\n\r\n"
        connection.sendall(head.encode())  # and not one byte of the body
        seen = reply(connection)
    assert seen.startswith(b"HTTP/1.1 413")
    assert b'"code":"request_too_large"' in seen
    assert f"x-model-version: {V1}".encode() in seen
    assert b"connection: close" in seen


def test_a_chunked_body_is_cut_at_the_limit(small: Served) -> None:
    with small.connect() as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        connection.sendall(b"%x\r\n%s\r\n" % (LIMIT + 1, b" " * (LIMIT + 1)))  # the last chunk never comes
        seen = reply(connection)
    assert seen.startswith(b"HTTP/1.1 413")


def test_a_body_at_the_limit_is_read(small: Served) -> None:
    body = f'{{"model": "{MODEL}", "prompt": "hi"}}'.encode().ljust(LIMIT)
    whole = small.http().post("/v1/completions", content=body)
    assert whole.json()["choices"][0]["text"] == "v1 heard hi"
    chunked = small.http().post("/v1/completions", content=iter([body[:1000], body[1000:]]))
    assert chunked.json()["choices"][0]["text"] == "v1 heard hi"


def test_an_endless_body_is_not_kept(small: Served) -> None:
    response = small.http().post("/v1/completions", content=b" " * (LIMIT * 4))
    assert response.status_code == 413
    assert small.admission.out == 0
