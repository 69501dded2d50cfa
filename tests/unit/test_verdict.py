"""Verdicts of several parts as one."""

from __future__ import annotations

from shared.verdict import OK, Verdict, combine


def test_a_combined_verdict_names_every_part_that_is_not_well() -> None:
    engine = Verdict(False, "no version serves", {"waiting": 3})
    verdict = combine(
        {"loop": Verdict(True, details={"age_s": 0.1}), "engine": engine, "link": Verdict(False)}
    )
    assert not verdict.is_ok
    assert verdict.reason == "engine: no version serves; link: not ok"
    assert verdict.details == {"loop.age_s": 0.1, "engine.waiting": 3}
    assert [name for name, _part in verdict.checks] == ["loop", "engine", "link"]
    assert combine({"loop": OK}).is_ok
