"""One malformed (or still well-formed) document from a good one, as a pure function of a seed.

Half of the changes are made to the parsed document, so that most of it stays plausible and deep checks
are reached; the others to its bytes.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

INTEGERS = (
    0, 1, 2, 3, 4, 7, 8, 255, 1 << 16, (1 << 31) - 1, 1 << 31, 1 << 32, (1 << 53) + 1, 1 << 62,
    (1 << 63) - 1, 1 << 63, (1 << 64) - 1, 1 << 64, 10**19, 10**20, 10**40, -1, -(1 << 63),
)  # fmt: skip
TEXTS = (
    "", "a", "__metadata__", "w.0", "w.1", "\0", "\x1b[31m", "é", "😀", "\u2028", "x" * 300,
    "..", "../a", "/etc/passwd", "a/b", ".", "model.safetensors", "a.safetensors", ".safetensors",
    "seal.json", "config.json", "F32", "f32", "BF16", "F4", "F6_E2M3", "I64", "U8", "BOOL", "F8_E4M3",
    "C64", "0" * 64, "f" * 64, "sha256:" + "0" * 64, "sha256",
)  # fmt: skip
SCALARS: tuple[object, ...] = (
    *INTEGERS, *TEXTS, True, False, None, 0.5, 1e300, [], {}, [0], [1, 2], [[]], [0, 0, 0],
)  # fmt: skip
FRAGMENTS = (
    b"{", b"}", b"[", b"]", b",", b":", b'"', b"\\", b" ", b"\n", b"\t", b"\0", b"\xff", b"\xc3",
    b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\\u0061", b"\\ud800", b"\\u0000", b"-", b"-0", b"0", b"1", b"9",
    b"e", b"E9", b".", b".5", b"1e5", b"NaN", b"true", b"Infinity", b"null", b"/*", b"'", b"=", b"+",
    b"[0,1]", b"{}", b"18446744073709551615", b"18446744073709551616", b'"w.0":', b'"a":1,',
    b'"dtype":"U8",', b'"shape":[1],', b'"data_offsets":[0,1],', b'"__metadata__":{},',
)  # fmt: skip

_MARK = "\ue000"  # ends a name that a dict could not hold twice; taken away from the text

_STRUCTURED = 0.5
_MOST_CHANGES = 3


def mutate_json(document: Any, random: Random) -> bytes:
    """The text of a changed JSON document, or now and then of the same one."""
    if random.random() < _STRUCTURED:
        changed = document
        for _ in range(random.randrange(_MOST_CHANGES)):
            changed = _changed(changed, random)
        return _dump(changed, random)
    return mutate_bytes(_dump(document, random), random)


def mutate_bytes(raw: bytes, random: Random) -> bytes:
    """A few bytes replaced, removed, repeated or put in."""
    text = bytearray(raw)
    for _ in range(random.randrange(1, _MOST_CHANGES + 1)):
        at = random.randrange(len(text) + 1)
        match random.randrange(5):
            case 0:
                text[at : at + random.choice((0, 0, 1, 2))] = random.choice(FRAGMENTS)
            case 1:
                del text[at : at + random.choice((1, 1, 2, 8, 40))]
            case 2:
                end = at + random.choice((1, 4, 20, 80))
                text[at:at] = text[at:end]
            case 3 if at < len(text):
                text[at] ^= 1 << random.randrange(8)
            case _:
                text[at : at + 1] = random.randbytes(1)
    return bytes(text)


def mutate_safetensors(header: Any, data: bytes, random: Random) -> bytes:
    """A changed header with its length before it, mostly the true one, and data, mostly all of it."""
    text = mutate_json(header, random)
    length = len(text)
    match random.randrange(24):
        case 0:
            length = max(0, length + random.choice((-2, -1, 1, 2, 8)))
        case 1:
            length = random.choice(INTEGERS) % (1 << 64)
        case 2:
            data = data[: random.randrange(len(data) + 1)]
        case 3:
            data += b"\0" * random.choice((1, 2, 4096))
        case 4:
            return (struct.pack("<Q", length) + text)[: random.randrange(12)]
    return struct.pack("<Q", length) + text + data


def _changed(node: Any, random: Random) -> Any:
    """`node` with one thing in it another; shares what is the same."""
    children: Sequence[Any] = ()
    if isinstance(node, dict | list):
        children = list(node) if isinstance(node, dict) else range(len(node))
    if children and random.random() < 0.8:
        key = random.choice(children)
        if random.random() < 0.7:
            copy = node.copy()
            copy[key] = _changed(node[key], random)
            return copy
        return _EDITS[random.randrange(len(_EDITS))](node, key, random)
    if isinstance(node, int) and not isinstance(node, bool) and random.random() < 0.6:
        return node + random.choice((-8, -4, -1, 1, 2, 4, 8))
    if isinstance(node, str) and node and random.random() < 0.5:
        at = random.randrange(len(node))
        return node[:at] + random.choice("0aZ/.\0\n\ud800é") + node[at + random.randrange(2) :]
    return random.choice(SCALARS)


def _remove(node: Any, key: Any, random: Random) -> Any:
    copy = node.copy()
    del copy[key]
    return copy


def _rename(node: Any, key: Any, random: Random) -> Any:
    if isinstance(node, list):
        return [*node, node[key]]
    return {(random.choice(TEXTS) if name == key else name): value for name, value in node.items()}


def _swap(node: Any, key: Any, random: Random) -> Any:
    other = random.choice(list(node) if isinstance(node, dict) else range(len(node)))
    copy = node.copy()
    copy[key], copy[other] = node[other], node[key]
    return copy


def _add(node: Any, key: Any, random: Random) -> Any:
    if isinstance(node, list):
        return [*node, random.choice(SCALARS)]
    return {**node, random.choice(TEXTS): random.choice((node[key], random.choice(SCALARS)))}


def _repeat(node: Any, key: Any, random: Random) -> Any:
    """A second member of this name, which only the text can have."""
    if isinstance(node, list):
        return [*node, node[key]]
    return {**node, key + _MARK: random.choice((node[key], *node.values()))}


_EDITS: tuple[Callable[[Any, Any, Random], Any], ...] = (_remove, _rename, _swap, _add, _repeat)


def _dump(document: Any, random: Random) -> bytes:
    """One of several spellings."""
    spacing = (",", ":") if random.random() < 0.8 else (" ,\n", " : ")
    is_ascii = random.random() < 0.3
    text = json.dumps(document, separators=spacing, ensure_ascii=is_ascii)
    text = text.replace(_MARK, "").replace("\\ue000", "")
    if random.random() < 0.02:
        text += random.choice((" ", "\n", "x", " }"))
    return text.encode("utf-8", "surrogatepass")
