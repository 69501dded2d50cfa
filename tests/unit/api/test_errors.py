"""Every refusal has the status, the shape and the class that OpenAI's clients expect."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from inferd.api.metrics import version_label
from inferd.api.settings import ApiSettings

from .serving import MODEL, V1, CountedAdmission, Served, fake_engine, serve

HI = [{"role": "user", "content": "hi"}]
CHAT = {"model": MODEL, "messages": HI}
TEXT = {"model": MODEL, "prompt": "hi"}


@pytest.mark.parametrize(
    ("path", "change", "param", "code"),
    [
        ("chat", {"temperature": 3}, "temperature", "invalid_value"),
        ("chat", {"temperature": "1"}, "temperature", "invalid_type"),
        ("chat", {"temperature": True}, "temperature", "invalid_type"),
        ("chat", {"n": True}, "n", "invalid_type"),
        ("chat", {"n": 0}, "n", "invalid_value"),
        ("chat", {"max_tokens": 1.0}, "max_tokens", "invalid_type"),
        ("chat", {"max_tokens": 4, "max_completion_tokens": 5}, "max_tokens", "invalid_value"),
        ("chat", {"top_p": 1.1}, "top_p", "invalid_value"),
        ("chat", {"seed": 2**63}, "seed", "invalid_value"),
        ("chat", {"stop": list("abcde")}, "stop", "invalid_value"),
        ("chat", {"stop": [""]}, "stop[0]", "invalid_value"),
        ("chat", {"logit_bias": {"the": 1}}, "logit_bias", "invalid_value"),
        ("chat", {"logit_bias": {"5": 101}}, "logit_bias.5", "invalid_value"),
        ("chat", {"top_logprobs": 2}, "top_logprobs", "invalid_value"),
        ("chat", {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
        ("chat", {"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
        ("chat", {"stream": "yes"}, "stream", "invalid_type"),
        ("chat", {"session_id": "two words"}, "session_id", "invalid_value"),
        ("chat", {"messages": []}, "messages", "invalid_value"),
        ("chat", {"messages": [{"role": "user"}]}, "messages[0].content", "missing_parameter"),
        (
            "chat",
            {"messages": [{"role": "user", "content": 5}]},
            "messages[0].content",
            "invalid_type",
        ),
        (
            "chat",
            {"messages": [*HI, {"role": "tool", "content": "x"}]},
            "messages[1].role",
            "invalid_value",
        ),
        (
            "chat",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "text": ""}]}]},
            "messages[0].content[0].type",
            "invalid_value",
        ),
        ("chat", {"tools": [{"type": "function"}]}, "tools", "unsupported_parameter"),
        ("chat", {"tool_choice": "required"}, "tool_choice", "unsupported_parameter"),
        (
            "chat",
            {"response_format": {"type": "json_object"}},
            "response_format",
            "unsupported_parameter",
        ),
        ("chat", {"audio": {}}, "audio", "unsupported_parameter"),
        ("chat", {"temprature": 1}, "temprature", "unknown_parameter"),
        ("completions", {"prompt": ""}, "prompt", "invalid_value"),
        ("completions", {"prompt": []}, "prompt", "invalid_value"),
        ("completions", {"prompt": [[]]}, "prompt", "invalid_value"),
        ("completions", {"prompt": [True]}, "prompt", "invalid_type"),
        ("completions", {"prompt": ["a", 1]}, "prompt", "invalid_type"),
        ("completions", {"prompt": [-1]}, "prompt", "invalid_type"),
        ("completions", {"suffix": "end"}, "suffix", "unsupported_parameter"),
        ("completions", {"best_of": 3}, "best_of", "unsupported_parameter"),
        ("completions", {"echo": True, "logprobs": 1}, "echo", "unsupported_parameter"),
        ("completions", {"prompt": ["a"] * 5, "n": 26}, "n", "invalid_value"),
    ],
)
def test_a_bad_value_is_a_400_that_names_its_parameter(
    served: Served, path: str, change: dict[str, object], param: str, code: str
) -> None:
    base, path = (CHAT, "chat/completions") if path == "chat" else (TEXT, path)
    before = served.admission.taken
    response = served.http().post(f"/v1/{path}", json=base | change)
    error = response.json()["error"]
    assert response.status_code == 400
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, code)
    assert param.split("[")[0].split(".")[0] in error["message"] or param == "prompt"
    assert response.headers["x-model-version"] == str(V1)
    assert response.headers["x-request-id"]
    assert served.admission.taken == before or change == {"prompt": ""}


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_are_finite(served: Served, number: str) -> None:
    body = json.dumps(CHAT)[:-1] + f', "temperature": {number}}}'
    response = served.http().post("/v1/chat/completions", content=body)
    assert response.status_code == 400


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'"x"', b"null", b"\xff", b'{"model": "\\ud800"}', b"[" * 200_000]
)
def test_a_body_that_is_no_json_object_is_a_400(served: Served, body: bytes) -> None:
    response = served.http().post("/v1/chat/completions", content=body)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "invalid_json"


def test_clients_see_their_own_classes(served: Served) -> None:
    client = served.openai()
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-5", messages=HI)  # type: ignore[arg-type]
    assert missing.value.code == "model_not_found"
    assert missing.value.response.headers["x-model-version"] == str(V1)
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-5")
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=MODEL, messages=HI, temperature=9)  # type: ignore[arg-type]
    assert bad.value.param == "temperature"


@pytest.mark.parametrize(("prompt", "limit"), [("x" * 4096, None), ("x" * 5000, 1), ("x" * 4000, 97)])
def test_what_exceeds_the_context_is_refused(served: Served, prompt: str, limit: int | None) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        served.openai().completions.create(model=MODEL, prompt=prompt, max_tokens=limit)
    assert (error.value.code, error.value.param) == ("context_length_exceeded", "prompt")
    assert "4096" in error.value.message


def test_the_context_may_be_filled(served: Served) -> None:
    answer = served.openai().completions.create(model=MODEL, prompt="x" * 4090, max_tokens=6)
    assert answer.choices[0].text == "v1 hea"
    shorter = served.openai().completions.create(model=MODEL, prompt="x" * 4090)
    assert shorter.choices[0].text == "v1 hea"  # the default limit gives way


def test_routes_and_methods_have_the_same_shape(served: Served) -> None:
    client = served.http()
    missing = client.get("/v1/nothing")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "unknown_url")
    assert client.get("/v1/models/").status_code == 404
    wrong = client.get("/v1/chat/completions")
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")
    assert wrong.headers["allow"] == "POST"
    for response in (missing, wrong):
        assert response.headers["x-model-version"] == str(V1)
        assert response.headers["x-request-id"]


def test_a_request_id_is_kept_if_it_is_harmless(served: Served) -> None:
    client = served.http()
    kept = client.get("/v1/models", headers={"x-request-id": "trace-1.a_b"})
    assert kept.headers["x-request-id"] == "trace-1.a_b"
    for harmful in ("a b", "x" * 129, '"', "a;b"):
        replaced = client.get("/v1/models", headers={"x-request-id": harmful})
        assert replaced.headers["x-request-id"].startswith("req-")


def test_sessions_that_contradict_each_other_are_refused(served: Served) -> None:
    response = served.http().post(
        "/v1/chat/completions", json=CHAT | {"session_id": "a"}, headers={"x-session-id": "b"}
    )
    assert (response.status_code, response.json()["error"]["param"]) == (400, "session_id")
    response = served.http().post("/v1/chat/completions", json=CHAT, headers={"x-session-id": "a b"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "session_id")


def test_text_from_a_client_is_escaped_and_cut_in_messages(served: Served) -> None:
    model = "x\n\x1b[31m" + "y" * 240
    message = served.http().post("/v1/completions", json=TEXT | {"model": model}).json()["error"]["message"]
    assert "\n" not in message
    assert "\x1b" not in message
    assert len(message) < 300


def test_without_a_version_requests_may_come_again_later() -> None:
    admission = CountedAdmission(V1)
    with serve(fake_engine(V1), admission, ApiSettings(retry_after_s=3)) as served:
        admission.current = None
        with pytest.raises(openai.InternalServerError) as error:
            served.openai().chat.completions.create(model=MODEL, messages=HI)  # type: ignore[arg-type]
        assert (error.value.status_code, error.value.code) == (503, "not_ready")
        assert error.value.response.headers["retry-after"] == "3"
        assert "x-model-version" not in error.value.response.headers
        assert served.openai().models.list().data == []
        assert served.http().get(f"/v1/models/{MODEL}").status_code == 503


def test_a_full_queue_is_a_429_and_what_was_queued_is_cancelled() -> None:
    engine = fake_engine(V1, max_waiting=2)
    engine.hold("steps")
    with serve(engine, CountedAdmission(V1)) as served:
        with pytest.raises(openai.RateLimitError) as error:
            served.openai().chat.completions.create(model=MODEL, messages=HI, n=3)  # type: ignore[arg-type]
        assert error.value.code == "queue_full"
        assert error.value.response.headers["retry-after"] == "1"
        assert error.value.response.headers["x-model-version"] == str(V1)
        assert engine.wait_idle()
        assert served.admission.wait_none_out()


def test_an_engine_error_is_a_500_that_keeps_its_details() -> None:
    engine = fake_engine(V1)
    engine.hold("steps")
    with serve(engine, CountedAdmission(V1)) as served:
        with ThreadPoolExecutor(1) as pool:
            create = served.openai().chat.completions.create
            answer = pool.submit(create, model=MODEL, messages=HI, n=2)  # type: ignore[arg-type]
            assert engine.wait_submitted(2)
            engine.fail_sequence(engine.requests[0][0], "device-side assert at /secret/path")
            with pytest.raises(openai.InternalServerError) as error:
                answer.result(20)
        assert (error.value.status_code, error.value.code) == (500, "internal_error")
        assert "secret" not in error.value.response.text
        assert engine.wait_idle()  # the other choice was cancelled
        assert served.admission.wait_none_out()


def test_an_error_in_a_stream_ends_it_as_an_error_object() -> None:
    engine = fake_engine(V1)
    engine.hold("steps")
    with serve(engine, CountedAdmission(V1)) as served:
        body = CHAT | {"stream": True}
        with served.http().stream("POST", "/v1/chat/completions", json=body) as response:
            events = response.iter_lines()
            assert "role" in next(events)
            assert engine.wait_submitted(1)
            engine.step(2)
            engine.fail_sequence(engine.requests[0][0], "boom")
            rest = [line for line in events if line]
        assert json.loads(rest[-1].removeprefix("data: "))["error"]["code"] == "internal_error"
        assert "data: [DONE]" not in rest
        assert served.admission.wait_none_out()
        stream = served.openai().chat.completions.create(model=MODEL, messages=HI, stream=True)  # type: ignore[arg-type]
        assert engine.wait_submitted(2)
        engine.fail_sequence(engine.requests[1][0], "boom")
        with pytest.raises(openai.APIError):
            list(stream)
    outcome = {"endpoint": "chat", "outcome": "interrupted", "version": version_label(V1)}
    assert served.metric("inferd_api_requests_total", **outcome) == 2


def test_a_bug_is_a_500_of_the_same_shape() -> None:
    admission = CountedAdmission(V1)
    engine = fake_engine()  # admission promises a slot that is empty
    with serve(engine, admission) as served:
        response = served.http().post("/v1/chat/completions", json=CHAT)
        assert (response.status_code, response.json()["error"]["code"]) == (500, "internal_error")
        assert response.headers["x-request-id"]
        assert admission.wait_none_out()
        assert admission.taken == 1


def test_an_unexpected_exception_is_a_500_too(caplog: pytest.LogCaptureFixture) -> None:
    admission = CountedAdmission(V1)

    def broken(session_id: str | None) -> None:
        raise ZeroDivisionError(session_id)

    admission.acquire = broken  # type: ignore[method-assign, assignment]
    with serve(fake_engine(V1), admission) as served:
        response = served.http().post("/v1/chat/completions", json=CHAT)
        assert (response.status_code, response.json()["error"]["code"]) == (500, "internal_error")
        assert response.headers["x-request-id"]
    assert "ZeroDivisionError" in caplog.text
