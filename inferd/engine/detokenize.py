"""`TextStream`: tokens to text, piece by piece, as it can be shown.

Text is held back while it may be half a character or the start of a stop string, so what was emitted
never has to be taken back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

_BROKEN = "\ufffd"
_CHARACTER_TOKENS = 4  # a character has at most four bytes, and a token at least one


class Detokenizer:
    """Decodes a growing list of tokens; decoding a token needs those before it (spaces, half characters)."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []  # tokens already emitted that the next ones need, then the new ones
        self._emitted = 0  # tokens of the window whose text has been returned

    def feed(self, token: int) -> str:
        """Text that is complete now; empty while a character lacks bytes."""
        self._window.append(token)
        before, text = self._decode(self._window[: self._emitted]), self._decode(self._window)
        pending = len(self._window) - self._emitted
        # Bytes that stay broken for longer than any character are no character: U+FFFD is the text.
        if len(text) <= len(before) or (text.endswith(_BROKEN) and pending <= _CHARACTER_TOKENS):
            return ""
        self._window = self._window[self._emitted :]
        self._emitted = len(self._window)
        return text[len(before) :]

    def flush(self) -> str:
        """The rest; of a character that was cut off in the middle, nothing."""
        before, text = self._decode(self._window[: self._emitted]), self._decode(self._window)
        self._emitted = len(self._window)
        return text[len(before) :].rstrip(_BROKEN)


class StopFilter:
    """Finds the first stop string in a stream of text and cuts the stream exactly before it."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""

    def feed(self, text: str) -> tuple[str, bool]:
        """Text that cannot be part of a stop string any more, and whether one was found."""
        if not self._stops:
            return text, False
        text = self._held + text
        # The first to be complete, whatever pieces the text comes in; of two, the one that starts first.
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self._held = ""
            return text[: min(found)[1]], True
        held = max(_overlap(text, stop) for stop in self._stops)
        cut = len(text) - held
        self._held = text[cut:]
        return text[:cut], False

    def flush(self) -> str:
        """What was held back, now that the stream ended without a stop string."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that a stop string starts with."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


class TextStream:
    """The text of one sequence: decoded, then cut at its stop strings."""

    def __init__(self, decode: Callable[[list[int]], str], stops: Sequence[str]) -> None:
        self._detokenizer = Detokenizer(decode)
        self._filter = StopFilter(stops)

    def feed(self, token: int) -> tuple[str, bool]:
        """Text that `token` made showable, and whether a stop string was completed."""
        return self._filter.feed(self._detokenizer.feed(token))

    def finish(self) -> tuple[str, bool]:
        """The rest of the text, and whether it completed a stop string after all."""
        text, is_stopped = self._filter.feed(self._detokenizer.flush())
        return (text, True) if is_stopped else (text + self._filter.flush(), False)
