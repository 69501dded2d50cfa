"""Clients of an inferd's API that stream, note what each answer says of its version, and never stop
on their own."""

from __future__ import annotations

import json
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx


@dataclass(frozen=True, slots=True)
class Answer:
    """One complete answer: its text and the version its header and its chunks name."""

    prompt: str
    version: str
    text: str
    fingerprints: frozenset[str] = frozenset()


class AnswerError(Exception):
    """An answer that is not one: status, error body or cut stream."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(f"{status}: {detail}")
        self.status = status


class Stream:
    """A streamed answer that is read piece by piece."""

    def __init__(self, response: httpx.Response, prompt: str) -> None:
        self.response = response
        self.prompt = prompt
        self.version = response.headers.get("x-model-version", "")
        self.text = ""
        self.fingerprints: set[str] = set()
        self.is_complete = False
        self._lines = response.iter_lines()

    def read(self, characters: int | None = None) -> str:
        """Read until the text has `characters`, or to the end; returns the text so far."""
        while characters is None or len(self.text) < characters:
            line = next(self._lines, None)
            if line is None:
                break
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                self.is_complete = True
                continue
            chunk: dict[str, Any] = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                raise AnswerError(200, json.dumps(chunk))
            self.fingerprints.add(chunk["system_fingerprint"])
            for choice in chunk["choices"]:
                self.text += choice["text"]
        return self.text

    def answer(self) -> Answer:
        """The whole answer; raises AnswerError if the stream was cut."""
        self.read()
        if not self.is_complete:
            raise AnswerError(200, f"the stream of {self.prompt!r} ended after {self.text!r}")
        return Answer(self.prompt, self.version, self.text, frozenset(self.fingerprints))


class Client:
    """One connection pool to one inferd."""

    def __init__(self, socket: Path, model: str) -> None:
        self._model = model
        self._http = httpx.Client(
            transport=httpx.HTTPTransport(uds=str(socket)), base_url="http://localhost", timeout=60
        )

    @contextmanager
    def stream(
        self, prompt: str, max_tokens: int, session_id: str | None = None, *, is_endless: bool = False
    ) -> Iterator[Stream]:
        """Ask for a streamed completion; leaving the block early hangs up."""
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
        }
        if is_endless:
            body["ignore_eos"] = True
        headers = {} if session_id is None else {"x-session-id": session_id}
        with self._http.stream("POST", "/v1/completions", json=body, headers=headers) as response:
            if response.status_code != 200:
                raise AnswerError(response.status_code, response.read().decode())
            yield Stream(response, prompt)

    def ask(self, prompt: str, max_tokens: int, session_id: str | None = None) -> Answer:
        """A complete answer; raises AnswerError."""
        with self.stream(prompt, max_tokens, session_id) as stream:
            return stream.answer()

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class ClientThreads(ABC):
    """Clients of one socket for as long as a block lasts, each on a thread of its own."""

    def __init__(self, socket: Path, clients: int) -> None:
        self.socket = socket
        self.failures: list[str] = []
        self._is_ending = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(number,), name=f"client-{number}")
            for number in range(clients)
        ]

    @abstractmethod
    def _run(self, number: int) -> None:
        """Ask again and again on one connection, until `_is_ending`; what fails goes to `failures`."""

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_ending.set()
        for thread in self._threads:
            thread.join()


class Traffic(ClientThreads):
    """Clients that ask the same prompts again and again."""

    def __init__(
        self, socket: Path, model: str, prompts: Sequence[str], max_tokens: int, clients: int = 4
    ) -> None:
        super().__init__(socket, clients)
        self.answers: list[Answer] = []
        self._model = model
        self._prompts = prompts
        self._max_tokens = max_tokens
        self._changed = threading.Condition()

    def await_answers(self, version: str, count: int, within_s: float = 60.0) -> None:
        """Wait until `count` more answers came from `version` (the whole tag)."""
        with self._changed:
            goal = self._count(version) + count
            if not self._changed.wait_for(lambda: self.failures or self._count(version) >= goal, within_s):
                raise AssertionError(f"{self._count(version)} of {goal} answers from {version}")

    def _count(self, version: str) -> int:
        return sum(answer.version == version for answer in self.answers)

    def _run(self, number: int) -> None:
        with Client(self.socket, self._model) as client:
            turn = number
            while not self._is_ending.is_set():
                prompt = self._prompts[turn % len(self._prompts)]
                turn += 1
                try:
                    answer = client.ask(prompt, self._max_tokens)
                except (AnswerError, httpx.HTTPError) as error:
                    with self._changed:
                        self.failures.append(f"{type(error).__name__}: {error}")
                        self._changed.notify_all()
                else:
                    with self._changed:
                        self.answers.append(answer)
                        self._changed.notify_all()
