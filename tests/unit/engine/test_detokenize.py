"""Text as it can be shown: whole characters, and nothing that may become a stop string."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from inferd.engine.detokenize import Detokenizer, StopFilter, TextStream

from .checkpoints import make_tokenizer

BACKEND = make_tokenizer().backend_tokenizer


def decode(tokens: list[int]) -> str:
    text: str = BACKEND.decode(tokens, skip_special_tokens=True)
    return text


def encode(text: str) -> list[int]:
    ids: list[int] = BACKEND.encode(text).ids
    return ids


@settings(deadline=None)
@given(st.text(max_size=40))
def test_pieces_add_up_to_the_text_and_no_character_is_broken(text: str) -> None:
    stream = Detokenizer(decode)
    pieces = [stream.feed(token) for token in encode(text)]
    assert "".join(pieces) + stream.flush() == text.rstrip("\ufffd") or "\ufffd" in text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


def test_a_character_waits_for_its_bytes() -> None:
    stream = Detokenizer(decode)
    assert [stream.feed(token) for token in encode("a🎬b")] == ["a", "", "", "", "🎬", "b"]


def test_a_character_cut_off_at_the_end_is_not_shown() -> None:
    stream = Detokenizer(decode)
    shown = "".join(stream.feed(token) for token in encode("ok🎬")[:-1])
    assert shown + stream.flush() == "ok"


def test_bytes_that_never_become_a_character_do_not_hold_the_text_up() -> None:
    stray = encode("🎬")[1]
    stream = Detokenizer(decode)
    text = "".join(stream.feed(token) for token in [stray] * 12 + encode("go on"))
    assert text.endswith("go on")
    assert text.startswith("\ufffd")


def test_special_tokens_show_nothing() -> None:
    stream = Detokenizer(decode)
    assert [stream.feed(token) for token in [*encode("a"), 0, *encode("b")]] == ["a", "", "b"]


@given(
    st.text("abc", max_size=30),
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(1, 5), max_size=30),
)
def test_the_stream_is_cut_exactly_where_the_whole_text_would_be(
    text: str, stops: list[str], sizes: list[int]
) -> None:
    stream, shown, is_stopped, at = StopFilter(stops), "", False, 0
    for size in [*sizes, len(text) + 1]:
        piece, is_stopped = stream.feed(text[at : at + size])
        at += size
        shown += piece
        # What may still become a stop string is not shown.
        assert not any(stop in shown for stop in stops)
        if is_stopped or at >= len(text):
            break
    seen = text[:at]
    ends = [(found + len(stop), found) for stop in stops if (found := seen.find(stop)) >= 0]
    assert is_stopped == bool(ends)
    if ends:
        assert shown == seen[: min(ends)[1]]
    else:
        assert shown + stream.flush() == seen


def test_a_stop_string_over_several_tokens_is_not_shown_in_part() -> None:
    stream = TextStream(decode, ("END", "\n\n"))
    shown, is_stopped = "", False
    for token in encode("the ENd the END of it"):
        text, is_stopped = stream.feed(token)
        shown += text
        if is_stopped:
            break
    assert is_stopped
    assert shown == "the ENd the "


def test_what_was_held_back_comes_at_the_end() -> None:
    stream = TextStream(decode, ("END",))
    shown = "".join(stream.feed(token)[0] for token in encode("the EN"))
    assert shown == "the "
    assert stream.finish() == ("EN", False)
