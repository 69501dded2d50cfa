"""Concurrent clients that never pause: the official OpenAI client, streaming, one task each."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from openai import AsyncOpenAI, OpenAIError

from demo.evidence import Answer, Endpoint, Prompt
from demo.models import MODEL

MAX_TOKENS = 20
PROMPTS = (
    Prompt("colors", Endpoint.CHAT, "Name three primary colors."),
    Prompt("bees", Endpoint.CHAT, "What do bees make?"),
    Prompt("morning", Endpoint.CHAT, "Translate 'good morning' to Spanish."),
    Prompt("france", Endpoint.CHAT, "What is the capital of France?"),
    Prompt("sun", Endpoint.COMPLETIONS, "The sun rises in the"),
    Prompt("once", Endpoint.COMPLETIONS, "Once upon a time, there was a"),
    Prompt("water", Endpoint.COMPLETIONS, "Water boils at"),
    Prompt("planet", Endpoint.COMPLETIONS, "The largest planet in our solar system is"),
)
_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class ClientPlan:
    """One client: its name, what it asks in turn, and the session it belongs to."""

    name: str
    prompts: tuple[Prompt, ...]
    session: str | None = None


def client_plans() -> tuple[ClientPlan, ...]:
    """Four clients: two that chat (one of them in a session), one that completes, one that does both."""
    chat = tuple(prompt for prompt in PROMPTS if prompt.endpoint is Endpoint.CHAT)
    completions = tuple(prompt for prompt in PROMPTS if prompt.endpoint is Endpoint.COMPLETIONS)
    return (
        ClientPlan("chat", chat),
        ClientPlan("session", chat[::-1], session="demo-conversation"),
        ClientPlan("completions", completions),
        ClientPlan("both", PROMPTS[::-1]),
    )


@dataclass(slots=True)
class Traffic:
    """Answers so far, and a way to wait for more of them."""

    api: str
    plans: Sequence[ClientPlan]
    answers: list[Answer] = field(default_factory=list)
    _news: asyncio.Condition = field(default_factory=asyncio.Condition)
    _is_ending: bool = False

    async def run(self) -> None:
        """Keep every client busy until `end`, then let the requests in flight finish."""
        # No retries: a request that had to be repeated is a request that failed.
        async with (
            AsyncOpenAI(base_url=self.api, api_key="none", max_retries=0, timeout=_TIMEOUT_S) as openai,
            asyncio.TaskGroup() as group,
        ):
            for plan in self.plans:
                group.create_task(self._client(openai, plan))

    def end(self) -> None:
        """Start no further request."""
        self._is_ending = True

    async def wait_for_rounds(self, rounds: int) -> None:
        """Wait until every client has finished `rounds` more requests."""
        before = {plan.name: self._count(plan.name) for plan in self.plans}
        async with self._news:
            await self._news.wait_for(
                lambda: all(self._count(name) >= count + rounds for name, count in before.items())
            )

    def _count(self, client: str) -> int:
        return sum(answer.client == client for answer in self.answers)

    async def _client(self, openai: AsyncOpenAI, plan: ClientPlan) -> None:
        turn = 0
        while not self._is_ending:
            prompt = plan.prompts[turn % len(plan.prompts)]
            turn += 1
            answer = await ask(openai, plan, prompt)
            async with self._news:
                self.answers.append(answer)
                self._news.notify_all()
            if answer.error:
                # A daemon that is gone would be asked thousands of times in a second.
                await asyncio.sleep(0.2)


async def ask(openai: AsyncOpenAI, plan: ClientPlan, prompt: Prompt) -> Answer:
    """One streamed request, greedy, recorded chunk by chunk; an error is part of the record."""
    seen = _Seen()
    error = ""
    started_ns = time.monotonic_ns()
    try:
        async for chunk in _stream(openai, plan, prompt, seen):
            seen.add(chunk, time.monotonic_ns())
    except OpenAIError as failure:
        error = f"{type(failure).__name__}: {failure}"
    return Answer(
        client=plan.name,
        prompt=prompt.key,
        session=plan.session,
        started_ns=started_ns,
        ended_ns=time.monotonic_ns(),
        chunk_ns=tuple(seen.chunk_ns),
        header=seen.header,
        fingerprints=tuple(seen.fingerprints),
        text="".join(seen.text),
        finish=seen.finish,
        error=error,
    )


@dataclass(slots=True)
class _Seen:
    header: str = ""
    finish: str = ""
    text: list[str] = field(default_factory=list)
    chunk_ns: list[int] = field(default_factory=list)
    fingerprints: dict[str, None] = field(default_factory=dict)

    def add(self, chunk: Any, now_ns: int) -> None:
        if chunk.system_fingerprint:
            self.fingerprints[chunk.system_fingerprint] = None
        for choice in chunk.choices:
            piece = choice.text if hasattr(choice, "text") else choice.delta.content
            if piece:
                self.text.append(piece)
                self.chunk_ns.append(now_ns)
            if choice.finish_reason:
                self.finish = choice.finish_reason


async def _stream(openai: AsyncOpenAI, plan: ClientPlan, prompt: Prompt, seen: _Seen) -> AsyncIterator[Any]:
    headers = {"x-session-id": plan.session} if plan.session else {}
    options: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "stream": True,
        "extra_headers": headers,
    }
    response: Any
    if prompt.endpoint is Endpoint.CHAT:
        messages: Any = [{"role": "user", "content": prompt.text}]
        response = await openai.chat.completions.with_raw_response.create(messages=messages, **options)
    else:
        response = await openai.completions.with_raw_response.create(prompt=prompt.text, **options)
    seen.header = response.headers.get("x-model-version", "")
    async for chunk in response.parse():
        yield chunk
