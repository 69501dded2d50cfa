"""A drain refuses what is new, waits for what runs, and ends the rest at its deadline."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from .serving import MODEL, V1, CountedAdmission, Served, fake_engine, serve

HI = [{"role": "user", "content": "hi"}]


async def start_drain(served: Served, deadline_s: float) -> asyncio.Task[int]:
    task = asyncio.ensure_future(served.api.drain(deadline_s))
    await asyncio.sleep(0)  # let it run up to its wait
    return task


def test_running_requests_finish_and_new_ones_are_refused() -> None:
    engine = fake_engine(V1)
    engine.hold("steps")
    with serve(engine, CountedAdmission(V1)) as served, ThreadPoolExecutor(1) as pool:
        create = served.openai().chat.completions.create
        running = pool.submit(create, model=MODEL, messages=HI)  # type: ignore[arg-type]
        assert engine.wait_submitted(1)
        drain = served.call(start_drain(served, 20))
        with pytest.raises(openai.InternalServerError) as error:
            create(model=MODEL, messages=HI)  # type: ignore[arg-type]
        assert (error.value.status_code, error.value.code) == (503, "not_ready")
        assert error.value.response.headers["retry-after"] == "1"
        engine.release("steps")
        assert running.result(20).choices[0].finish_reason == "stop"
        assert served.call(asyncio.wait_for(drain, 20)) == 0
        assert served.admission.wait_none_out()


@pytest.mark.parametrize("stream", [False, True])
def test_what_runs_past_the_deadline_is_told_so(stream: bool) -> None:
    engine = fake_engine(V1)
    engine.hold("steps")
    with serve(engine, CountedAdmission(V1)) as served, ThreadPoolExecutor(1) as pool:
        client = served.openai()

        def talk() -> list[object]:
            return list(client.chat.completions.create(model=MODEL, messages=HI, stream=stream))  # type: ignore[arg-type, call-overload]

        running = pool.submit(talk)
        assert engine.wait_submitted(1)
        assert served.call(served.api.drain(0)) == 1
        with pytest.raises(openai.APIError) as error:
            running.result(20)
        assert error.value.code == "aborted"
        assert "shutting down" in error.value.message
        assert engine.wait_idle()
        assert served.admission.wait_none_out()


def test_an_idle_server_drains_at_once() -> None:
    with serve(fake_engine(V1), CountedAdmission(V1)) as served:
        assert served.call(served.api.drain(0)) == 0
