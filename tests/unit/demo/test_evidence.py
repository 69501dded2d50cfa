from __future__ import annotations

import pytest

from demo.evidence import Outcome, judge, telling_prompts
from tests.unit.demo.recorded import REFERENCES, V1, V2, answer


def test_an_answer_that_is_what_its_version_says_is_good() -> None:
    for tag, texts in REFERENCES.items():
        for prompt, text in texts.items():
            seen = answer(header=tag, fingerprints=(tag,), prompt=prompt, text=text)
            assert judge(seen, REFERENCES).outcome is Outcome.GOOD


def test_a_chunk_of_another_version_than_the_header_is_mixed() -> None:
    judgement = judge(answer(fingerprints=(V1, V2)), REFERENCES)
    assert judgement.outcome is Outcome.MIXED
    assert V2 in judgement.reason


def test_text_of_the_other_version_under_this_versions_name_is_mixed() -> None:
    judgement = judge(answer(text=REFERENCES[V2]["sun"]), REFERENCES)
    assert judgement.outcome is Outcome.MIXED
    assert f"the text is that of {V2}" in judgement.reason


def test_text_spliced_from_two_versions_is_mixed_although_every_label_agrees() -> None:
    spliced = REFERENCES[V1]["sun"][:5] + REFERENCES[V2]["sun"][5:]
    judgement = judge(answer(text=spliced), REFERENCES)
    assert judgement.outcome is Outcome.MIXED
    assert "differs from character 5" in judgement.reason


def test_an_answer_cut_short_is_mixed_even_with_a_finish_reason() -> None:
    judgement = judge(answer(text=REFERENCES[V1]["sun"][:-3]), REFERENCES)
    assert judgement.outcome is Outcome.MIXED


def test_a_version_that_was_never_committed_is_mixed() -> None:
    tag = "v3@sha256:" + "3" * 64
    judgement = judge(answer(header=tag, fingerprints=(tag,)), REFERENCES)
    assert judgement.outcome is Outcome.MIXED
    assert "never committed" in judgement.reason


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"error": "APIConnectionError: gone"}, "gone"),
        ({"header": ""}, "x-model-version"),
        ({"finish": ""}, "finish_reason"),
        ({"fingerprints": ()}, "system_fingerprint"),
    ],
)
def test_errors_and_unlabelled_or_unfinished_answers_are_failures(
    changes: dict[str, object], reason: str
) -> None:
    judgement = judge(answer(**changes), REFERENCES)
    assert judgement.outcome is Outcome.FAILED
    assert reason in judgement.reason


def test_only_prompts_with_different_texts_tell_versions_apart() -> None:
    assert telling_prompts(REFERENCES) == 1
