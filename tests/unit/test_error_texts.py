"""Texts of errors: whatever a file or a library put into them, they can be sent, journaled and shown."""

from __future__ import annotations

import pytest

from loaderd.checkpoint.strict_json import parse_object
from loaderd.compatibility import compare_configs
from shared.codec import HANDOFF_FRAME_BYTES, decode, encode
from shared.errors import CheckpointError, WarmupFailed
from shared.handoff import FROM_INFERD, Failed
from shared.messages import FACT_CHARACTERS, MESSAGE_CHARACTERS, WireError


def test_what_is_no_unicode_is_escaped() -> None:
    error = CheckpointError("holds \ud800", file="we\udcffird", tensor="a\ud801")
    assert error.message == r"we\udcffird: tensor 'a\ud801': holds \ud800"
    assert (error.file, error.tensor) == (r"we\udcffird", r"a\ud801")
    assert WireError.of(error).message == error.message
    assert CheckpointError("é", file="数").message == "数: é"


def test_an_error_of_any_length_fits_a_handoff_frame() -> None:
    """A library may list every tensor of a model; the answer must still arrive."""
    error = WarmupFailed("数" * 1_000_000, where="数" * 1_000_000)
    failed = Failed(request_id=1, error=WireError.of(error))
    received = decode(encode(failed, HANDOFF_FRAME_BYTES), FROM_INFERD, HANDOFF_FRAME_BYTES)
    assert isinstance(received, Failed)
    assert len(received.error.message) <= MESSAGE_CHARACTERS
    assert received.error.message.endswith("… (1000000 characters)")
    assert len(str(received.error.facts["where"])) <= FACT_CHARACTERS


@pytest.mark.parametrize(
    ("text", "byte"),
    [(r'{"a": "\ud800"}', 7), (r'{"a": {"\uDC00b": 1}}', 8), (r'{"a": ["x", "\ud83d "]}', 13)],
)
def test_a_lone_surrogate_in_json_is_refused(text: str, byte: int) -> None:
    with pytest.raises(CheckpointError, match="holds a lone surrogate") as refused:
        parse_object(text.encode(), file="config.json")
    assert refused.value.byte == byte


def test_a_pair_of_surrogates_is_one_character() -> None:
    assert parse_object(rb'{"a": "\ud83d\ude00"}', file="config.json") == {"a": "😀"}


def test_a_key_of_any_length_makes_a_short_line() -> None:
    """The lines are kept with the operation, and so are part of every status."""
    (change,) = compare_configs({"k" * 1_000_000: 1}, {})
    assert len(str(change)) < 200
