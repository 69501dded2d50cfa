"""JSON without the ambiguities: duplicate keys, deep nesting and unbounded numbers are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import NoReturn

from shared.errors import CheckpointError
from shared.tensor_size import MAX_TENSORS

Pairs = tuple[tuple[str, object], ...]
"""A JSON object as its members in order; arrays are lists, so the two cannot be confused."""

_INTEGER_DIGITS = 20
_CONTAINERS_PER_ENTRY = 4
_MEMBERS_PER_ENTRY = 16


class _RefusedError(ValueError):
    """Raised inside the parser, where the position is not known."""


def parse_pairs(raw: bytes, *, file: str, start_byte: int = 0) -> object:
    """Parse JSON of strings, non-negative integers, objects (as Pairs), arrays, booleans and null.

    `start_byte` is where `raw` lies in `file`.  Raises CheckpointError; duplicate keys are left to
    the caller, who knows which object they are in.
    """
    return _parse(
        raw,
        file,
        start_byte,
        MAX_TENSORS,
        object_pairs_hook=tuple,
        parse_int=_unsigned,
        parse_float=_refuse_number,
        parse_constant=_refuse_number,
    )


def parse_object(raw: bytes, *, file: str, entries: int = MAX_TENSORS) -> dict[str, object]:
    """Parse a JSON object (floats allowed); raises CheckpointError, also on a duplicate key or a lone
    surrogate at any depth, and for more structure than so many entries could need."""
    value = _parse(raw, file, 0, entries, object_pairs_hook=_unique)
    if not isinstance(value, dict):
        raise CheckpointError("is not a JSON object", file=file, byte=0)
    escape = raw.lower().find(b"\\ud")  # the only way to a surrogate
    if escape >= 0:
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            raise CheckpointError("holds a lone surrogate", file=file, byte=escape) from None
    return value


def duplicate_key(pairs: Pairs) -> str | None:
    """The first key that comes twice, after unescaping."""
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            return key
        seen.add(key)
    return None


def _parse(
    raw: bytes,
    file: str,
    start_byte: int,
    entries: int,
    *,
    object_pairs_hook: Callable[..., object],
    **hooks: Callable[[str], object],
) -> object:
    # A parsed array or object takes up to thirty times its text: bound their number before parsing.
    containers, members = raw.count(b"[") + raw.count(b"{"), raw.count(b",")
    if containers > _CONTAINERS_PER_ENTRY * entries or members > _MEMBERS_PER_ENTRY * entries:
        raise CheckpointError(
            f"JSON has more structure than {entries} entries could need", file=file, byte=start_byte
        )
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError("is not UTF-8", file=file, byte=start_byte + error.start) from error
    try:
        # The stubs of `loads` know no mapping of hooks.
        return json.loads(text, object_pairs_hook=object_pairs_hook, **hooks)  # type: ignore[arg-type]
    except json.JSONDecodeError as error:
        byte = start_byte + len(text[: error.pos].encode("utf-8"))
        raise CheckpointError(f"is not valid JSON: {error.msg}", file=file, byte=byte) from error
    except RecursionError as error:
        raise CheckpointError("JSON is nested too deeply", file=file, byte=start_byte) from error
    except ValueError as error:
        raise CheckpointError(f"JSON refused: {error}", file=file, byte=start_byte) from error


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise _RefusedError(f"duplicate key {str(duplicate_key(tuple(pairs)))[:80]!r}")
    return members


def _unsigned(digits: str) -> int:
    # `-0` is refused too: it is not an unsigned integer to other readers.
    if len(digits) > _INTEGER_DIGITS or digits.startswith("-"):
        raise _RefusedError(f"{digits[:40]} is not an unsigned 64-bit integer")
    return int(digits)


def _refuse_number(text: str) -> NoReturn:
    raise _RefusedError(f"{text[:40]} is not an integer")
