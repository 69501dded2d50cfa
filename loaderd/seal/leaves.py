"""Taking the leaves out of a seal's text before it is parsed.

They are nearly all of it: 64 characters for 256 KiB of weights, hundreds of megabytes for the largest
models.  Parsed with the rest they would be held three times.
"""

from __future__ import annotations

import binascii
import re
from bisect import bisect_right
from dataclasses import dataclass

from loaderd.checkpoint.names import SEAL_FILE
from shared.errors import CheckpointError
from shared.tensor_size import MAX_TENSORS

REST_LIMIT_BYTES = 256 * MAX_TENSORS
"""Cap of what a seal says beside the leaves; a quarter for text that is not ASCII, of which each character
takes up to four bytes once it is decoded."""

_LEAVES = re.compile(rb'"leaves"[ \t\n\r]*+:[ \t\n\r]*+"')


@dataclass(slots=True)
class CutText:
    """A seal's text with a mark in each place where leaves were; what was no JSON is none now."""

    rest: bytes
    leaves: dict[str, bytes]  # by mark
    places: list[tuple[int, int]]  # where in `rest` a mark ends, and how far back that is

    def place(self, byte: int) -> int:
        """Where in the whole text a byte of `rest` lies."""
        index = bisect_right(self.places, byte, key=lambda place: place[0])
        return byte + self.places[index - 1][1] if index else byte


def cut_leaves(raw: bytes) -> CutText:
    """Take out every text of hex digits that a member called `leaves` has.

    Raises CheckpointError where too much text is left.  Marks are no hex, and each is to be used once: a text
    that looks like one gets nobody's leaves in the end.
    """
    parts: list[bytes] = []
    cut = CutText(b"", {}, [])
    done = rest_bytes = 0
    look_from = 0
    while (found := _LEAVES.search(raw, look_from)) is not None:
        look_from = found.end()
        if raw[found.start() - 1 : found.start()] == b"\\":
            continue  # the end of another name: x"leaves
        start, end = found.end(), raw.find(b'"', found.end())
        leaves = _leaves(raw, start, end) if end >= 0 else None
        if leaves is None:
            continue  # refused with the tensor's name, where it is one's
        mark = f"#{len(cut.leaves)}"
        cut.leaves[mark] = leaves
        if len(cut.leaves) > MAX_TENSORS:
            raise CheckpointError(
                f"has leaves of more than {MAX_TENSORS} tensors", file=SEAL_FILE, byte=start
            )
        parts += (raw[done:start], mark.encode("ascii"))
        rest_bytes += start - done + len(mark)
        look_from = done = end
        cut.places.append((rest_bytes, done - rest_bytes))
    rest_bytes += len(raw) - done
    limit_bytes = REST_LIMIT_BYTES if raw.isascii() else REST_LIMIT_BYTES // 4
    if rest_bytes > limit_bytes:
        raise CheckpointError(
            f"has {rest_bytes} bytes beside the leaves, {limit_bytes} are allowed", file=SEAL_FILE
        )
    parts.append(raw[done:])
    cut.rest = b"".join(parts)
    return cut


def _leaves(raw: bytes, start: int, end: int) -> bytes | None:
    """What lower-case hex digits in `raw` say.  Many times as fast as a pattern for them."""
    if any(raw.find(capital, start, end) >= 0 for capital in b"ABCDEF"):
        return None
    try:
        return binascii.unhexlify(memoryview(raw)[start:end])
    except binascii.Error:
        return None
