"""Plain completions, as OpenAI's own client sees them."""

from __future__ import annotations

import pytest

from .serving import MODEL, V1, Served


@pytest.mark.parametrize(
    ("prompt", "heard"),
    [
        ("ab", ["ab"]),
        (["ab", "c"], ["ab", "c"]),
        ([97, 98], ["ab"]),
        ([[97], [98, 99]], ["a", "bc"]),
    ],
)
def test_every_form_of_prompt_is_continued(served: Served, prompt: object, heard: list[str]) -> None:
    raw = served.openai().completions.with_raw_response.create(model=MODEL, prompt=prompt)  # type: ignore[arg-type]
    assert raw.headers["x-model-version"] == str(V1)
    answer = raw.parse()
    assert (answer.object, answer.system_fingerprint) == ("text_completion", str(V1))
    assert [choice.text for choice in answer.choices] == [f"v1 heard {one}" for one in heard]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(map(len, heard))


def test_without_a_limit_there_are_sixteen_tokens(served: Served) -> None:
    answer = served.openai().completions.create(model=MODEL, prompt="a long enough prompt")
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("v1 heard a long ", "length")


def test_choices_are_numbered_prompt_by_prompt(served: Served) -> None:
    answer = served.openai().completions.create(model=MODEL, prompt=["a", "b"], n=2, best_of=2)
    assert [(one.index, one.text[-1]) for one in answer.choices] == [(0, "a"), (1, "a"), (2, "b"), (3, "b")]


@pytest.mark.parametrize("prompt", [["ab", "c"], [[97, 98], [99]]])
def test_echo_gives_the_prompt_back_first(served: Served, prompt: object) -> None:
    client = served.openai()
    answer = client.completions.create(model=MODEL, prompt=prompt, echo=True)  # type: ignore[arg-type]
    assert [choice.text for choice in answer.choices] == ["abv1 heard ab", "cv1 heard c"]
    told = ["", ""]
    for chunk in client.completions.create(model=MODEL, prompt=prompt, echo=True, stream=True):  # type: ignore[arg-type]
        told[chunk.choices[0].index] += chunk.choices[0].text
    assert told == ["abv1 heard ab", "cv1 heard c"]


def test_logprobs_say_where_each_token_starts(served: Served) -> None:
    client = served.openai()
    logprobs = (
        client.completions.create(model=MODEL, prompt="a", logprobs=2, max_tokens=3).choices[0].logprobs
    )
    assert logprobs is not None
    assert logprobs.tokens == ["v", "1", " "]
    assert logprobs.token_logprobs == [-0.25] * 3
    assert logprobs.text_offset == [0, 1, 2]
    assert logprobs.top_logprobs is not None
    assert logprobs.top_logprobs[0] == {"v": -0.25, "w": -1.25}
    offsets: list[int] = []
    for chunk in client.completions.create(model=MODEL, prompt="a", logprobs=0, max_tokens=3, stream=True):
        if chunk.choices[0].logprobs is not None:
            offsets += chunk.choices[0].logprobs.text_offset or []
    assert offsets == [0, 1, 2]


def test_a_stream_tells_text_reason_and_usage(served: Served) -> None:
    stream = served.openai().completions.create(
        model=MODEL, prompt="ab", stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == "v1 heard ab"
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert chunks[-1].model_dump()["model_version"] == str(V1)
    assert last.choices == []
    assert last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (2, 11)
