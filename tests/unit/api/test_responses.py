"""The parts of an answer that depend on how it arrived."""

from __future__ import annotations

import json

from inferd.api.completions import CompletionAnswer
from inferd.api.generation import Piece
from inferd.api.responses import Envelope, Usage, chat_logprobs
from inferd.api.schemas import CompletionRequest, parse_request
from inferd.engine.protocol import FinishReason, TokenLogprob

from ..engine.fake_engine import CharTokenizer
from .serving import V1


class PartTokenizer(CharTokenizer):
    """Token 9 is a part of a character."""

    def decode(self, token_ids: list[int]) -> str:
        return "\ufffd" if token_ids == [9] else super().decode(token_ids)


def piece(index: int, text: str, **more: object) -> Piece:
    logprobs = tuple((TokenLogprob(ord(char), -0.5), ()) for char in text)
    return Piece(index, text, tuple(map(ord, text)), logprobs, **more)  # type: ignore[arg-type]


def test_offsets_go_on_from_chunk_to_chunk_for_each_choice() -> None:
    body = {"model": "m", "prompt": "x", "n": 2, "logprobs": 0, "stream": True}
    request = parse_request(CompletionRequest, json.dumps(body).encode())
    answer = CompletionAnswer(Envelope("cmpl", "m", [V1]), request, CharTokenizer(), ["", ""])
    told = [answer.chunk(one) for one in (piece(0, "ab"), piece(1, "c"), piece(0, "d"), piece(1, "e"))]
    assert [one["choices"][0]["logprobs"]["text_offset"] for one in told if one] == [[0, 1], [0], [2], [1]]


def test_a_step_that_adds_no_text_is_no_chunk() -> None:
    request = parse_request(CompletionRequest, b'{"model": "m", "prompt": "x", "stream": true}')
    answer = CompletionAnswer(Envelope("cmpl", "m", [V1]), request, CharTokenizer(), [""])
    assert answer.chunk(Piece(0, "", (5,))) is None
    last = answer.chunk(Piece(0, "", (), finish=FinishReason.LENGTH))
    assert last is not None
    assert last["choices"][0]["finish_reason"] == "length"


def test_cached_tokens_count_once_per_prompt() -> None:
    usage = Usage(prompt_tokens=20)
    for index in range(4):  # two prompts, two choices each
        usage.add(piece(index, "abc", cached_tokens=8), choices_per_prompt=2)
    assert usage.as_json() == {
        "prompt_tokens": 20,
        "completion_tokens": 12,
        "total_tokens": 32,
        "prompt_tokens_details": {"cached_tokens": 16},
    }


def test_logprobs_fit_into_json() -> None:
    logprobs = ((TokenLogprob(9, float("-inf")), (TokenLogprob(233, -0.5),)),)
    (token,) = chat_logprobs(logprobs, PartTokenizer())["content"]
    assert (token["token"], token["logprob"], token["bytes"]) == ("\ufffd", -9999.0, None)
    assert token["top_logprobs"] == [{"token": "é", "logprob": -0.5, "bytes": [0xC3, 0xA9]}]


def test_pieces_of_a_choice_join_in_order() -> None:
    joined = Piece.joined(1, [piece(1, "ab"), piece(1, "c", finish=FinishReason.STOP, cached_tokens=3)])
    assert joined == piece(1, "abc", finish=FinishReason.STOP, cached_tokens=3)
