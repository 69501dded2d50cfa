"""What a client asks for is what the engine is told."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferd.api.errors import BadRequest
from inferd.api.sampling import sampling_params
from inferd.api.schemas import ChatRequest, CompletionRequest, parse_request
from inferd.engine.protocol import SamplingParams


def chat(**fields: object) -> ChatRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}]} | fields
    return parse_request(ChatRequest, json.dumps(body).encode())


def params(choice: int = 0, **fields: object) -> SamplingParams:
    return sampling_params(chat(**fields), choice, max_tokens=7, logprobs=None)


def test_without_wishes_the_engine_gets_its_defaults() -> None:
    assert params() == SamplingParams(max_tokens=7)
    nothing = dict.fromkeys(
        ("temperature", "top_p", "seed", "stop", "logit_bias", "n", "user", "tools", "top_k")
    )
    assert params(**nothing) == SamplingParams(max_tokens=7)


def test_every_wish_is_passed_on() -> None:
    assert params(
        temperature=0.5,
        top_p=0.25,
        top_k=3,
        min_p=0.125,
        presence_penalty=1,
        frequency_penalty=-1,
        repetition_penalty=1.5,
        seed=11,
        stop=["a", "b"],
        stop_token_ids=[2],
        ignore_eos=True,
        logit_bias={"5": -100},
    ) == SamplingParams(
        max_tokens=7,
        temperature=0.5,
        top_p=0.25,
        top_k=3,
        min_p=0.125,
        presence_penalty=1.0,
        frequency_penalty=-1.0,
        repetition_penalty=1.5,
        seed=11,
        stop=("a", "b"),
        stop_token_ids=(2,),
        ignore_eos=True,
        logit_bias={5: -100.0},
    )


def test_edges_are_told_so_that_an_engine_cannot_trip_over_them() -> None:
    assert params(top_k=-1).top_k == 0
    assert params(temperature=1e-9).temperature == 0
    assert 0 < params(top_p=0).top_p < 1e-6
    assert params(stop="x").stop == ("x",)


def test_choices_with_a_seed_differ_and_stay_in_range() -> None:
    seeds = [params(choice, seed=2**63 - 1).seed for choice in range(3)]
    assert seeds == [2**63 - 1, 0, 1]
    assert params(seed=-5).seed == 2**63 - 5


@settings(max_examples=200, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=6,
    ),
    st.sampled_from(sorted({*ChatRequest.model_fields, *CompletionRequest.model_fields, "other"})),
    st.sampled_from([ChatRequest, CompletionRequest]),
)
def test_any_value_of_any_parameter_is_taken_or_refused_by_name(
    value: object, name: str, kind: type[ChatRequest] | type[CompletionRequest]
) -> None:
    body: dict[str, object] = {"model": "m"}
    body |= {"messages": [{"role": "user", "content": "x"}]} if kind is ChatRequest else {"prompt": "x"}
    body[name] = value
    try:
        request = parse_request(kind, json.dumps(body).encode())
    except BadRequest as error:
        assert error.param is None or error.param.startswith(name)  # noqa: PT017 -- it may also succeed
    else:
        told = sampling_params(request, 0, max_tokens=1, logprobs=None)
        assert 0 <= told.temperature <= 2
        assert 0 < told.top_p <= 1


@pytest.mark.parametrize("text", ["a" * 513, ""])
def test_stop_strings_are_bounded(text: str) -> None:
    with pytest.raises(BadRequest):
        chat(stop=[text])
