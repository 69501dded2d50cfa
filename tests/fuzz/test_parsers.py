"""The fuzzer in CI: many cases of each parser, and planted faults that it must find.

`CHANGEOVER_FUZZ_CASES` and `CHANGEOVER_FUZZ_START` run more cases, or others; a failure says how to run
its case again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pytest

from loaderd.checkpoint import header, index
from loaderd.seal import document
from loaderd.signature import bundle, statement
from shared.errors import CheckpointError
from tests.fuzz import fuzzer
from tests.fuzz.fuzzer import FuzzFailure, make_case, run
from tests.fuzz.targets import TARGETS

CASES = int(os.environ.get("CHANGEOVER_FUZZ_CASES", "300000"))
START = int(os.environ.get("CHANGEOVER_FUZZ_START", "0"))

PLANTED_WITHIN = 20_000
"""Cases in which a planted fault must be found: far fewer than CI runs."""


@pytest.mark.parametrize("name", TARGETS)
def test_parsers_accept_or_refuse_and_nothing_else(name: str) -> None:
    target = TARGETS[name]
    cases = round(CASES * target.share)
    tally = run(target, range(START, START + cases))
    assert tally.cases == cases
    assert tally.accepted >= cases * target.least_accepted


def test_shares_make_a_whole() -> None:
    assert sum(target.share for target in TARGETS.values()) == pytest.approx(1)


@pytest.mark.parametrize("name", TARGETS)
def test_a_seed_is_a_case(name: str) -> None:
    cases = [make_case(TARGETS[name], seed) for seed in range(200)]
    assert cases == [make_case(TARGETS[name], seed) for seed in range(200)]
    assert len(set(cases)) > 150


# --- planted faults ------------------------------------------------------------------------------


def found(name: str) -> str:
    """What the fuzzer says of a target with a fault in it."""
    with pytest.raises(FuzzFailure) as caught:
        run(TARGETS[name], range(PLANTED_WITHIN))
    message = str(caught.value)
    seed = int(message.partition(f"python -m tests.fuzz {name} --seed ")[2].split()[0])
    with pytest.raises(FuzzFailure) as again:
        run(TARGETS[name], (seed,))
    # The reference reader names any one of the tensors at fault, so its words may differ.
    assert str(again.value).partition("\n")[2] == message.partition("\n")[2]
    assert str(again.value).partition(":")[0] == message.partition(":")[0]
    return message


@pytest.mark.parametrize(
    ("name", "module", "check", "passes", "finding"),
    [
        ("header", header, "_check_coverage", None, "SafetensorError: "),  # holes, overlaps, no data
        ("header", header, "duplicate_key", None, "AssertionError: read as "),  # the last of two wins
        ("index", index, "is_shard_name", True, "Error: "),
        ("seal", document, "_check_references", None, "AssertionError: read as "),
        ("seal", document, "is_digest", True, "Error: "),
        ("statement", statement, "is_digest", True, "Error: "),
        ("bundle", bundle, "members", {}, "Error: "),
    ],
)
def test_a_check_that_is_gone(
    monkeypatch: pytest.MonkeyPatch, name: str, module: Any, check: str, passes: object, finding: str
) -> None:
    monkeypatch.setattr(module, check, lambda *_, **__: passes)
    assert finding in found(name)


@pytest.mark.parametrize(
    ("name", "module", "reader"),
    [
        ("header", header, "parse_pairs"),
        ("index", index, "parse_object"),
        ("seal", document, "parse_object"),
        ("statement", statement, "json_object"),
        ("bundle", bundle, "parse_object"),
    ],
)
def test_an_error_of_another_type(
    monkeypatch: pytest.MonkeyPatch, name: str, module: Any, reader: str
) -> None:
    """A reader of JSON that lets the decoder's own errors out, as a plain `json.loads` does."""
    honest = getattr(module, reader)

    def careless(*arguments: Any, **keywords: Any) -> object:
        try:
            return honest(*arguments, **keywords)
        except CheckpointError as error:
            if error.__cause__ is not None:
                raise error.__cause__ from None
            raise

    monkeypatch.setattr(module, reader, careless)
    assert "Error: " in found(name)


def planted(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Have the header's reader do something for one length in a hundred."""
    honest = header.header_length

    def faulty(prefix: bytes, *, file: str, file_bytes: int) -> int:
        length = honest(prefix, file=file, file_bytes=file_bytes)
        if length % 100 == 42:
            act()
        return length

    monkeypatch.setattr(header, "header_length", faulty)


def test_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    def spin() -> None:
        while True:
            pass

    planted(monkeypatch, spin)
    monkeypatch.setattr(fuzzer, "CPU_LIMIT_S", 0.2)
    assert "_TooSlowError: took more than 0.2 s of CPU time" in found("header")


def test_an_allocation_that_no_case_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch, lambda: bytes(8 << 20))
    assert "AssertionError: allocated 83" in found("header")


def test_time_is_that_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is busy with other things is no finding."""
    slept: list[None] = []
    planted(monkeypatch, lambda: slept.append(time.sleep(0.01)))
    monkeypatch.setattr(fuzzer, "CPU_LIMIT_S", 0.005)
    run(TARGETS["header"], range(100))
    assert slept
