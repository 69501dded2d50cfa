"""Chat completions, as OpenAI's own client sees them."""

from __future__ import annotations

import asyncio
import json

import openai

from .serving import MODEL, V1, Served

HI = [{"role": "user", "content": "hi"}]
PROMPT = "user: hi\nassistant:"
ANSWER = f"v1 heard {PROMPT}"


def test_an_answer_has_text_usage_and_the_version_that_gave_it(served: Served) -> None:
    raw = served.openai().chat.completions.with_raw_response.create(model=MODEL, messages=HI)
    assert raw.headers["x-model-version"] == str(V1)
    assert raw.headers["x-request-id"].startswith("req-")
    answer = raw.parse()
    assert (answer.object, answer.model, answer.system_fingerprint) == ("chat.completion", MODEL, str(V1))
    assert answer.id.startswith("chatcmpl-")
    (choice,) = answer.choices
    assert (choice.index, choice.message.role, choice.message.content) == (0, "assistant", ANSWER)
    assert (choice.finish_reason, choice.logprobs) == ("stop", None)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(PROMPT)
    assert answer.usage.completion_tokens == len(ANSWER)
    assert answer.usage.total_tokens == len(PROMPT) + len(ANSWER)
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


def test_a_stream_starts_with_the_role_and_ends_with_reason_usage_and_done(served: Served) -> None:
    body = {"model": MODEL, "messages": HI, "stream": True, "stream_options": {"include_usage": True}}
    with served.http().stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["x-model-version"] == str(V1)
        text = response.read().decode()
    events = text.split("\n\n")
    assert events.pop() == ""
    assert events.pop() == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert len({(chunk["id"], chunk["created"], chunk["object"], chunk["model"]) for chunk in chunks}) == 1
    assert {chunk["system_fingerprint"] for chunk in chunks} == {str(V1)}
    role, *deltas, last, usage = chunks
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all("role" not in chunk["choices"][0]["delta"] for chunk in deltas)
    told = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in [*deltas, last])
    assert told == ANSWER
    assert [chunk["choices"][0]["finish_reason"] for chunk in [role, *deltas]] == [None] * (1 + len(deltas))
    assert last["choices"][0]["finish_reason"] == "stop"
    assert last["model_version"] == str(V1)
    assert all(chunk["usage"] is None for chunk in [role, *deltas, last])
    assert usage["choices"] == []
    assert usage["usage"]["total_tokens"] == len(PROMPT) + len(ANSWER)


def test_a_stream_without_the_option_has_no_usage(served: Served) -> None:
    stream = served.openai().chat.completions.create(model=MODEL, messages=HI, stream=True)
    chunks = list(stream)
    assert all("usage" not in chunk.model_dump(exclude_unset=True) for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_each_of_n_choices_is_whole_and_the_prompt_counts_once(served: Served) -> None:
    client = served.openai()
    answer = client.chat.completions.create(model=MODEL, messages=HI, n=3)
    assert [(choice.index, choice.message.content) for choice in answer.choices] == [
        (index, ANSWER) for index in range(3)
    ]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(PROMPT)
    assert answer.usage.completion_tokens == 3 * len(ANSWER)
    told = dict.fromkeys(range(3), "")
    reasons = {}
    for chunk in client.chat.completions.create(model=MODEL, messages=HI, n=3, stream=True):
        (choice,) = chunk.choices
        told[choice.index] += choice.delta.content or ""
        if choice.finish_reason:
            reasons[choice.index] = choice.finish_reason
    assert told == dict.fromkeys(range(3), ANSWER)
    assert reasons == dict.fromkeys(range(3), "stop")


def test_limits_and_stop_strings_reach_the_engine(served: Served) -> None:
    client = served.openai()
    for limit in ({"max_tokens": 4}, {"max_completion_tokens": 4}):
        answer = client.chat.completions.create(model=MODEL, messages=HI, **limit)
        assert answer.choices[0].message.content == ANSWER[:4]
        assert answer.choices[0].finish_reason == "length"
    for stop in (" heard", [" heard", "hi"]):
        answer = client.chat.completions.create(model=MODEL, messages=HI, stop=stop)
        assert answer.choices[0].message.content == "v1"
        assert answer.choices[0].finish_reason == "stop"


def test_every_token_has_its_logprobs_also_in_a_stream(served: Served) -> None:
    client = served.openai()
    options = {"model": MODEL, "messages": HI, "logprobs": True, "top_logprobs": 2}
    choice = client.chat.completions.create(**options).choices[0]
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert "".join(token.token for token in choice.logprobs.content) == ANSWER
    first = choice.logprobs.content[0]
    assert (first.token, first.logprob, first.bytes) == ("v", -0.25, [ord("v")])
    assert [(one.token, one.logprob) for one in first.top_logprobs] == [("v", -0.25), ("w", -1.25)]
    streamed = [
        token.token
        for chunk in client.chat.completions.create(**options, stream=True)
        for token in (chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else None) or ()
    ]
    assert "".join(streamed) == ANSWER


def test_messages_may_have_parts_older_roles_and_what_an_answer_had(served: Served) -> None:
    client = served.openai()
    answer = client.chat.completions.create(model=MODEL, messages=HI)
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        answer.choices[0].message,
        {"role": "user", "content": "more", "name": "ann"},
    ]
    again = client.chat.completions.create(model=MODEL, messages=messages)
    heard = f"system: be brief\nuser: a\nb\nassistant: {ANSWER}\nuser: more\nassistant:"
    assert again.choices[0].message.content == f"v1 heard {heard}"


def test_neutral_values_of_what_is_not_supported_pass(served: Served) -> None:
    answer = served.openai().chat.completions.create(
        model=MODEL,
        messages=HI,
        tools=[],
        tool_choice="none",
        response_format={"type": "text"},
        modalities=["text"],
        store=False,
        service_tier="auto",
        user="ann",
        metadata={"run": "7"},
        parallel_tool_calls=False,
        extra_body={
            "top_k": -1,
            "min_p": 0.1,
            "repetition_penalty": 1.1,
            "ignore_eos": False,
            "stop_token_ids": [3],
        },
    )
    assert answer.choices[0].message.content == ANSWER


def test_a_session_is_named_in_the_body_or_in_a_header(served: Served) -> None:
    create = served.openai().chat.completions.create
    create(model=MODEL, messages=HI, extra_body={"session_id": "talk-1"})
    create(model=MODEL, messages=HI, extra_headers={"x-session-id": "talk-2"})
    create(model=MODEL, messages=HI, extra_body={"session_id": "s"}, extra_headers={"x-session-id": "s"})
    create(model=MODEL, messages=HI)
    assert served.admission.sessions[-4:] == ["talk-1", "talk-2", "s", None]


def test_the_asynchronous_client_works_too(served: Served) -> None:
    async def talk() -> list[str]:
        async with openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="-", max_retries=0) as client:
            whole = client.chat.completions.create(model=MODEL, messages=HI)
            stream = await client.chat.completions.create(model=MODEL, messages=HI, stream=True)
            told = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
            return [told, (await whole).choices[0].message.content or ""]

    assert asyncio.run(talk()) == [ANSWER, ANSWER]


def test_models_are_listed_with_their_versions(served: Served) -> None:
    client = served.openai()
    (model,) = client.models.list().data
    assert (model.id, model.object, model.owned_by) == (MODEL, "model", "changeover")
    assert client.models.retrieve(MODEL).model_dump()["version"] == str(V1)
