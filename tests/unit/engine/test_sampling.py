"""The next token: what each parameter allows, and that a seeded sequence is its own."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from inferd.engine.protocol import SamplingParams
from inferd.engine.sampling import Sampler, logprobs_of

LOGITS = torch.log(torch.tensor([0.05, 0.4, 0.3, 0.15, 0.1]))


def draws(params: SamplingParams, count: int = 4000, logits: torch.Tensor = LOGITS) -> Counter[int]:
    sampler = Sampler(params, [])
    return Counter(sampler.choose(logits) for _ in range(count))


def test_greedy_takes_the_largest() -> None:
    sampler = Sampler(SamplingParams(1, temperature=0), [])
    assert sampler.is_argmax
    assert sampler.choose(LOGITS) == 1


def test_frequencies_follow_the_distribution() -> None:
    counts = draws(SamplingParams(1, seed=1))
    for token, share in enumerate(LOGITS.exp().tolist()):
        assert counts[token] / 4000 == pytest.approx(share, abs=0.03)


def test_temperature_sharpens_and_flattens() -> None:
    counts = draws(SamplingParams(1, seed=1, temperature=2.0))
    wanted = torch.softmax(LOGITS / 2, -1).tolist()
    for token, share in enumerate(wanted):
        assert counts[token] / 4000 == pytest.approx(share, abs=0.03)
    assert set(draws(SamplingParams(1, seed=1, temperature=1e-6), 50)) == {1}


@pytest.mark.parametrize(
    ("params", "allowed"),
    [
        (SamplingParams(1, seed=2, top_k=2), {1, 2}),
        (SamplingParams(1, seed=2, top_k=1), {1}),
        (SamplingParams(1, seed=2, top_k=99), {0, 1, 2, 3, 4}),
        (SamplingParams(1, seed=2, top_p=0.69), {1, 2}),
        (SamplingParams(1, seed=2, top_p=0.71), {1, 2, 3}),
        (SamplingParams(1, seed=2, top_p=1e-9), {1}),
        (SamplingParams(1, seed=2, min_p=0.3), {1, 2, 3}),
        (SamplingParams(1, seed=2, min_p=1.0), {1}),
        (SamplingParams(1, seed=2, top_k=3, top_p=0.8), {1, 2}),
        (SamplingParams(1, seed=2, logit_bias={1: -100.0, 2: -100.0}), {0, 3, 4}),
    ],
)
def test_what_may_be_drawn(params: SamplingParams, allowed: set[int]) -> None:
    assert set(draws(params, 1000)) == allowed


def test_nothing_of_weight_zero_is_ever_drawn() -> None:
    logits = torch.full((1000,), float("-inf"))
    logits[[7, 999]] = 0.0
    assert set(draws(SamplingParams(1, seed=3), 500, logits)) == {7, 999}


def test_a_seed_gives_the_same_draws_whatever_others_draw_between() -> None:
    params = SamplingParams(1, seed=11)
    alone, other = Sampler(params, []), Sampler(SamplingParams(1, seed=12), [])
    first = [alone.choose(LOGITS) for _ in range(50)]
    again = Sampler(params, [])
    second = []
    for _ in range(50):
        other.choose(LOGITS)
        torch.rand(3)
        second.append(again.choose(LOGITS))
    assert first == second
    assert first != [other.choose(LOGITS) for _ in range(50)]


def test_without_a_seed_two_sequences_differ() -> None:
    logits = torch.zeros(100_000)
    one, other = Sampler(SamplingParams(1), []), Sampler(SamplingParams(1), [])
    assert [one.choose(logits) for _ in range(4)] != [other.choose(logits) for _ in range(4)]


def test_penalties_count_what_was_said() -> None:
    logits = torch.tensor([1.0, 0.9, -1.0, 0.0])
    presence = Sampler(SamplingParams(1, temperature=0, presence_penalty=0.5), [0])
    assert not presence.is_argmax
    assert presence.choose(logits) == 0  # the prompt does not count
    presence.note(0)
    assert presence.choose(logits) == 1
    frequency = Sampler(SamplingParams(1, temperature=0, frequency_penalty=0.06), [])
    frequency.note(0)
    assert frequency.choose(logits) == 0
    frequency.note(0)
    assert frequency.choose(logits) == 1
    repetition = Sampler(SamplingParams(1, temperature=0, repetition_penalty=1.2), [0])
    assert repetition.choose(logits) == 1  # the prompt does count
    repetition.note(1)
    assert repetition.choose(logits) == 0


def test_a_repetition_penalty_makes_negative_logits_smaller() -> None:
    sampler = Sampler(SamplingParams(1, temperature=0, repetition_penalty=2.0), [0])
    assert sampler.choose(torch.tensor([-1.0, -1.5])) == 1


def test_the_logits_stay_as_they_are() -> None:
    before = LOGITS.clone()
    sampler = Sampler(SamplingParams(1, temperature=0, logit_bias={0: 100.0}), [])
    assert sampler.choose(LOGITS) == 0
    assert torch.equal(LOGITS, before)


def test_logprobs_are_of_the_unadjusted_logits() -> None:
    chosen, best = logprobs_of(LOGITS + 3, 3, 2)
    assert (chosen.token_id, chosen.logprob) == (3, pytest.approx(float(LOGITS[3]), abs=1e-5))
    assert [item.token_id for item in best] == [1, 2]
    assert [item.logprob for item in best] == pytest.approx(LOGITS[[1, 2]].tolist(), abs=1e-5)
    assert logprobs_of(LOGITS, 0, 0)[1] == ()
    assert len(logprobs_of(LOGITS, 0, 20)[1]) == 5
