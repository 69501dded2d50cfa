"""The next token: what each parameter allows, and that a seeded sequence is its own."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from inferd.engine.protocol import SamplingParams
from inferd.engine.sampling import Draft, Pick, Sampler, pick

LOGITS = torch.log(torch.tensor([0.05, 0.4, 0.3, 0.15, 0.1]))


def choose(sampler: Sampler, logits: torch.Tensor) -> int:
    """The next token of a sequence that is alone."""
    return pick(logits[None], [sampler.draft(logits.shape[0])])[0].token


def draws(params: SamplingParams, count: int = 4000, logits: torch.Tensor = LOGITS) -> Counter[int]:
    sampler = Sampler(params, [])
    return Counter(choose(sampler, logits) for _ in range(count))


def test_greedy_takes_the_largest() -> None:
    sampler = Sampler(SamplingParams(1, temperature=0), [])
    assert sampler.draft(5).is_argmax
    assert choose(sampler, LOGITS) == 1


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
    first = [choose(alone, LOGITS) for _ in range(50)]
    again = Sampler(params, [])
    second = []
    for _ in range(50):
        choose(other, LOGITS)
        torch.rand(3)
        second.append(choose(again, LOGITS))
    assert first == second
    assert first != [choose(other, LOGITS) for _ in range(50)]


def test_without_a_seed_two_sequences_differ() -> None:
    logits = torch.zeros(100_000)
    one, other = Sampler(SamplingParams(1), []), Sampler(SamplingParams(1), [])
    assert [choose(one, logits) for _ in range(4)] != [choose(other, logits) for _ in range(4)]


def test_penalties_count_what_was_said() -> None:
    logits = torch.tensor([1.0, 0.9, -1.0, 0.0])
    presence = Sampler(SamplingParams(1, temperature=0, presence_penalty=0.5), [0])
    assert choose(presence, logits) == 0  # the prompt does not count
    presence.note(0)
    assert not presence.draft(4).is_argmax
    assert choose(presence, logits) == 1
    frequency = Sampler(SamplingParams(1, temperature=0, frequency_penalty=0.06), [])
    frequency.note(0)
    assert choose(frequency, logits) == 0
    frequency.note(0)
    assert choose(frequency, logits) == 1
    repetition = Sampler(SamplingParams(1, temperature=0, repetition_penalty=1.2), [0])
    assert choose(repetition, logits) == 1  # the prompt does count
    repetition.note(1)
    assert choose(repetition, logits) == 0


def test_a_repetition_penalty_makes_negative_logits_smaller() -> None:
    sampler = Sampler(SamplingParams(1, temperature=0, repetition_penalty=2.0), [0])
    assert choose(sampler, torch.tensor([-1.0, -1.5])) == 1


def test_the_logits_stay_as_they_are() -> None:
    before = LOGITS.clone()
    sampler = Sampler(SamplingParams(1, temperature=0, logit_bias={0: 100.0}), [])
    assert choose(sampler, LOGITS) == 0
    assert torch.equal(LOGITS, before)


def test_logprobs_are_of_the_unadjusted_logits() -> None:
    def said(best: int, bias: float = 0.0) -> Pick:
        params = SamplingParams(1, temperature=0, logprobs=best, logit_bias={3: bias})
        return pick(LOGITS[None] + 3, [Draft(params)])[0]

    ((chosen, best),) = said(2, bias=100.0).logprobs
    assert (chosen.token_id, chosen.logprob) == (3, pytest.approx(float(LOGITS[3]), abs=1e-5))
    assert [item.token_id for item in best] == [1, 2]
    assert [item.logprob for item in best] == pytest.approx(LOGITS[[1, 2]].tolist(), abs=1e-5)
    assert said(0).logprobs[0][1] == ()
    assert len(said(20).logprobs[0][1]) == 5
    assert pick(LOGITS[None], [Draft(SamplingParams(1))])[0].logprobs == ()


MIXED = (
    SamplingParams(1, temperature=0),
    SamplingParams(1, temperature=0, logprobs=3),
    SamplingParams(1, temperature=0, logit_bias={7: 2.0}),
    SamplingParams(1, seed=3),
    SamplingParams(1, seed=4, temperature=0.7, top_k=5),
    SamplingParams(1, seed=5, top_p=0.8, logprobs=1),
    SamplingParams(1, seed=6, top_k=9, top_p=0.5, min_p=0.01),
    SamplingParams(1, seed=7, min_p=0.2, frequency_penalty=0.3),
    SamplingParams(1, seed=8, repetition_penalty=1.3, presence_penalty=0.1, logit_bias={2: 1.0}),
)


def test_a_row_does_not_see_its_neighbours() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(len(MIXED), 300, generator=generator).mul_(2).round_(decimals=1)  # with ties
    together = [Sampler(params, [1, 2, 3]) for params in MIXED]
    alone = [Sampler(params, [1, 2, 3]) for params in MIXED]
    for _ in range(20):
        picks = pick(logits, [sampler.draft(300) for sampler in together])
        for row, (sampler, mine) in enumerate(zip(alone, picks, strict=True)):
            assert pick(logits[row : row + 1], [sampler.draft(300)])[0] == mine
            for sampled in (sampler, together[row]):
                sampled.note(mine.token)


@pytest.mark.parametrize("params", MIXED)
def test_a_row_that_is_not_finite_is_said_and_harms_none(params: SamplingParams) -> None:
    logits = torch.stack([LOGITS.repeat(4)] * 3)
    logits[1, 4] = float("nan")
    sound = [Sampler(params, []) for _ in range(3)]
    drafts = [sampler.draft(20) for sampler in sound]
    first, second, third = pick(logits, drafts)
    assert (first.is_sound, second.is_sound, third.is_sound) == (True, False, True)
    assert 0 <= second.token < 20
    assert first == pick(logits[:1], drafts[:1])[0]


@pytest.mark.parametrize("params", MIXED)
def test_narrow_logits_are_chosen_from_as_if_they_were_wide(params: SamplingParams) -> None:
    logits = torch.randn(3, 300, generator=torch.Generator().manual_seed(1)).mul_(3).to(torch.bfloat16)
    before = logits.clone()
    samplers = [Sampler(params, [1, 2, 3]) for _ in range(6)]
    narrow = pick(logits, [sampler.draft(300) for sampler in samplers[:3]])
    wide = pick(logits.float(), [sampler.draft(300) for sampler in samplers[3:]])
    assert narrow == wide
    assert torch.equal(logits, before)


def test_no_rows_no_picks() -> None:
    assert pick(torch.empty(0, 5), []) == []
