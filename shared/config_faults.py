"""What is wrong with a configuration, in its operator's words: the key, what is expected, what was found."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pydantic import ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from shared.messages import NAME_PATTERN

_SHOWN_CHARS = 60
_SHOWN_FAULTS = 10

_KINDS = {
    "bool_type": "true or false",
    "dict_type": "a table",
    "float_type": "a number",
    "int_from_float": "a whole number",
    "int_type": "a whole number",
    "list_type": "a list",
    "model_type": "a table",
    "path_type": "text",
    "string_type": "text",
    "tuple_type": "a list",
}
"""What is expected where a value is of the wrong kind, by the error's type."""

_VALUES: dict[str, Callable[[Mapping[str, object]], str]] = {
    "greater_than": lambda bound: f"more than {_number(bound['gt'])}",
    "greater_than_equal": lambda bound: f"at least {_number(bound['ge'])}",
    "less_than": lambda bound: f"less than {_number(bound['lt'])}",
    "less_than_equal": lambda bound: f"at most {_number(bound['le'])}",
    "too_short": lambda bound: f"a list of at least {bound['min_length']}",
    "string_too_long": lambda bound: f"at most {bound['max_length']} characters",
    "literal_error": lambda bound: str(bound["expected"]),
    "enum": lambda bound: str(bound["expected"]),
    "string_pattern_mismatch": lambda bound: (
        "a name of letters, digits, '.', '_' and '-' that begins with a letter or digit"
        if bound["pattern"] == NAME_PATTERN
        else f"what matches {bound['pattern']}"
    ),
}
"""What is expected of a value of the right kind."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One key at fault and what is wrong with it."""

    key: str
    reason: str

    def __str__(self) -> str:
        return f"{self.key}: {self.reason}"


def refusal(expected: str, value: object) -> PydanticCustomError:
    """What a check of our own raises for `value`, which is told as that of any other key: it is no secret."""
    said = {"expected": expected, "found": _found(value, is_shown=True)}
    return PydanticCustomError("refused", "expected {expected}, found {found}", said)


def faults_of(error: ValidationError, document: object) -> list[Fault]:
    """What is wrong with `document`, one fault for each key.

    Of the alternatives that a key has, those that the value comes nearest to are named.
    """
    places: dict[tuple[int | str, ...], list[ErrorDetails]] = {}
    for detail in error.errors(include_url=False):
        places.setdefault(_place(detail, document), []).append(detail)
    return [
        Fault(_key(place), _reason(details))
        for place, details in places.items()
        if not any(len(other) > len(place) and other[: len(place)] == place for other in places)
    ]


def dates_in(document: object, place: tuple[int | str, ...] = ()) -> list[Fault]:
    """A fault for every date or time, which no key takes: TOML reads 2026-01-02 as one, not as text."""
    match document:
        case dict():
            items: list[tuple[int | str, object]] = list(document.items())
        case list():
            items = list(enumerate(document))
        case datetime.date() | datetime.time():  # a datetime is a date
            found = f"{document.isoformat()} (text needs quotes)"
            return [Fault(_key(place), f"expected no date or time, found {found}")]
        case _:
            return []
    return [fault for part, value in items for fault in dates_in(value, (*place, part))]


def told(faults: list[Fault]) -> tuple[str, str]:
    """The first faults as a message, and their keys."""
    lines = [str(fault) for fault in faults[:_SHOWN_FAULTS]]
    if len(faults) > _SHOWN_FAULTS:
        lines.append(f"and {len(faults) - _SHOWN_FAULTS} more")
    return "; ".join(lines), ", ".join(fault.key for fault in faults[:_SHOWN_FAULTS])


def _key(place: tuple[int | str, ...]) -> str:
    return ".".join(map(str, place)) or "(top level)"


def _place(detail: ErrorDetails, document: object) -> tuple[int | str, ...]:
    """Where in the document the fault is: an error's own place also names the alternatives of a key."""
    place: list[int | str] = []
    value = document
    for part in detail["loc"]:
        if isinstance(value, list):
            value = dict(enumerate(value))
        if isinstance(value, dict) and part in value:
            value = value[part]
        elif detail["type"] != "missing":
            continue
        place.append(part)
    return tuple(place)


def _reason(details: list[ErrorDetails]) -> str:
    """What is wrong with one value, which may be none of several alternatives."""
    first = details[0]
    if first["type"] == "extra_forbidden":
        return "unknown key"
    if first["type"] == "missing":
        return "missing"
    own = [detail["msg"] for detail in details if detail["type"] not in _KINDS.keys() | _VALUES.keys()]
    if own:
        return "; ".join(own)  # a check of our own, which the value came to because its kind is right
    expected = [
        _VALUES[detail["type"]](detail["ctx"]) if detail["type"] in _VALUES else _KINDS[detail["type"]]
        for detail in details
    ]
    what = "the key itself: expected" if first["loc"][-1] == "[key]" else "expected"
    is_text_expected = any(detail["type"] in _VALUES for detail in details)
    return f"{what} {' or '.join(expected)}, found {_found(first['input'], is_shown=is_text_expected)}"


def _found(value: object, *, is_shown: bool) -> str:
    """The value, or what kind it is of: text in the place of something else may be a secret."""
    match value:
        case bool():
            return str(value).lower()
        case int() | float():
            return _number(value)
        case str():
            if not is_shown:
                return "text"
            return repr(value) if len(value) <= _SHOWN_CHARS else f"{value[:_SHOWN_CHARS]!r}…"
        case list():
            return f"a list of {len(value)}" if value else "an empty list"
        case _:
            return "a table"


def _number(value: object) -> str:
    """A bound is a float where the key's type is: 86400.0 is told as 86400."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() and value < 1e15 else str(value)
