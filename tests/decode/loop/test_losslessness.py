"""The output of the real loop has exactly the target's law (laws 4.2, 4.3), for every policy, sampling and ending.

`enumeration.law_of` walks every branch of the loop's draws on toy models over 3 tokens, in float64. That proves the
loop given independent draws; a chi-square test of sampled sequences sees the draws themselves.
"""

from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from scipy.stats import chi2, chisquare

from decode import ModelDrafter, SpeculativeDecoder
from decode.policies import Entropy, FixedLength, Heuristic
from lm import RandomSampler, Sampler, Sampling
from tests.toys.enumeration import ToyModel, assert_same_law, law_of, seeded
from tests.toys.loop import AUTOS, POLICIES, PROMPT, SAMPLINGS, assert_lossless, decoder_of, law

SETTINGS = {name: {"sampling": sampling} for name, sampling in SAMPLINGS.items()}
SETTINGS |= {f"EOS {ids}": {"eos_ids": ids} for ids in ((), (0, 2), (0, 1, 2))}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("policy", [*POLICIES, "auto_token_prob"])
def test_every_policy_preserves_the_target_law_under_every_sampling(policy, setting):
    """And with no EOS, and with several."""
    assert_lossless(decoder_of((POLICIES | AUTOS)[policy], **SETTINGS[setting]), 3)


@pytest.mark.parametrize("max_new_tokens", [0, 1, 2, 4])
@pytest.mark.parametrize("length", [0, 1, 3])
def test_the_length_limit_and_the_draft_length_never_change_the_law(max_new_tokens, length):
    eos_ids = (0, 2) if max_new_tokens == 4 else (2,)
    assert_lossless(decoder_of(FixedLength(20), length=length, eos_ids=eos_ids), max_new_tokens)


@pytest.mark.parametrize("policy", ["heuristic", "self_verify", "ada_edl", "fed_head", "learning_head"])
def test_policies_that_remember_preserve_the_target_law_over_longer_drafts_and_more_rounds(policy):
    assert_lossless(decoder_of(POLICIES[policy], sampling=SAMPLINGS["top_k"]), 4)
    assert_lossless(decoder_of(POLICIES[policy]), 3, prompt=[1])


@pytest.mark.parametrize("max_new_tokens", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_a_policy_that_heeds_its_lessons_preserves_the_target_law(max_new_tokens):
    """Feedback decides the next draft, not this one."""
    decoder = decoder_of(POLICIES["recalling"], eos_ids=())
    rounds = decoder.generate(PROMPT, 60, generator=seeded()).rounds[:-3]
    assert {len(played.drafted) for played in rounds} == {1, 2}
    assert_lossless(decoder, max_new_tokens)


@pytest.mark.parametrize("policy", [FixedLength(3), Heuristic(2)])
def test_a_draft_that_is_read_at_its_end_only_preserves_the_target_law(policy):
    decoder = decoder_of(policy, eos_ids=(2,))
    usual = law(decoder, 4)
    decoder.drafter.reads_at_end = lambda: True  # as on an accelerator
    assert_same_law(law(decoder, 4), usual)


class Narrow(ToyModel):
    """In bfloat16, unlike its target."""

    def feed(self, new_tokens: Sequence[int], num_rows: int = 1) -> torch.Tensor:
        return super().feed(new_tokens, num_rows).to(torch.bfloat16)


TOYS = {
    # name: target, draft, sampling, EOS, number of tokens, tolerance
    "padded draft": (ToyModel(1, width=5), ToyModel(2, width=4), Sampling(), 2, 2, 1e-12),
    "padded alike": (ToyModel(1, width=5), ToyModel(2, width=5), Sampling(), 2, 2, 1e-12),
    "five tokens": (ToyModel(1, 5), ToyModel(2, 5), Sampling(), 4, 3, 1e-12),
    "never right": (ToyModel(1, sharpness=40.0), ToyModel(2, sharpness=40.0), Sampling(top_k=1), 9, 4, 1e-12),
    "two dtypes": (ToyModel(1), Narrow(2), Sampling(), 2, 3, 1e-6),
}


@pytest.mark.parametrize("name", TOYS)
def test_vocabularies_padding_and_dtypes_of_every_kind_preserve_the_target_law(name):
    target, draft, sampling, eos, num_tokens, tolerance = TOYS[name]
    drafter = ModelDrafter(draft, FixedLength(2))
    decoder = SpeculativeDecoder(target, drafter, sampling=sampling, eos_ids=frozenset({eos}))
    assert_lossless(decoder, num_tokens, tolerance=tolerance)


@pytest.mark.parametrize("temperature", [0.0, 0.5, 0.7, 1.0])
@pytest.mark.parametrize("top_k", [None, 2])
@pytest.mark.parametrize("top_p", [None, 0.8])
def test_a_draft_that_is_the_target_is_always_accepted(temperature, top_k, top_p):
    how = {"sampling": Sampling(temperature, top_k, top_p), "eos_ids": frozenset({2})}
    decoder = SpeculativeDecoder(ToyModel(1), ModelDrafter(ToyModel(1), FixedLength(2)), **how)

    def num_rejected(draws: Sampler) -> int:
        return sum(played.next_kind == "residual" for played in decoder.generate(PROMPT, 4, generator=draws).rounds)

    assert law_of(num_rejected)[0] == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("policy", sorted(set(POLICIES) - {"never_draft", "fixed_length"}))
def test_these_tests_see_every_policy_stop_early_and_late(policy):
    rounds = decoder_of(POLICIES[policy], eos_ids=(), length=3).generate(PROMPT, 60, generator=seeded()).rounds[:-3]
    assert len({len(played.drafted) for played in rounds}) > 1


@pytest.mark.parametrize(("length", "eos_ids"), [(2, {2}), (3, {0, 2})])
def test_a_round_emits_one_token_more_than_it_accepts_and_nothing_is_drafted_or_emitted_after_eos(length, eos_ids):
    decoder = decoder_of(FixedLength(length), eos_ids=tuple(eos_ids))

    def check(draws: Sampler) -> None:
        generation = decoder.generate(PROMPT, 4, generator=draws)
        for played in generation.rounds:
            is_ended = played.emitted[-1] in eos_ids and len(played.emitted) == played.num_accepted
            assert len(played.emitted) == played.num_accepted + (not is_ended)
        for tokens in (generation.token_ids, *(played.drafted for played in generation.rounds)):
            assert not set(tokens[:-1]) & eos_ids

    law_of(check)


def test_every_forward_feeds_the_tokens_that_the_cache_lacks_and_no_others():
    decoder = decoder_of(FixedLength(2), eos_ids=())

    def check(draws: Sampler) -> None:
        target, draft = decoder.target, decoder.drafter.model
        target.forwards, draft.forwards = [], []
        rounds = decoder.generate(PROMPT, 4, generator=draws).rounds
        lengths = [len(played.drafted) for played in rounds]
        assert target.forwards == [len(PROMPT) + lengths[0], *(1 + length for length in lengths[1:])]
        expected, fed = [], len(PROMPT)
        for played in rounds:
            expected += [fed if i == 0 else 1 for i in range(len(played.drafted))]
            fed = (2 if played.next_kind == "bonus" else 1) if played.drafted else fed + 1
        assert draft.forwards == expected

    law_of(check)


NUM_SAMPLES = 2000
FALSE_ALARM = 1e-6
"""A lossless loop fails with this probability per seed; seeds are fixed, so a pass stays a pass."""


def assert_sampled_law(sampling: Sampling, policy=FixedLength(2)) -> None:  # noqa: B008
    """No sequence is impossible, and no alarm; outcomes that are expected under 5 times are pooled."""
    decoder, generator = decoder_of(policy, sampling=sampling), seeded()
    observed = Counter(decoder.generate(PROMPT, 3, generator=generator).token_ids for _ in range(NUM_SAMPLES))
    expected = ToyModel(1).law(PROMPT, 3, sampling=sampling, eos_ids=frozenset({2}))
    assert observed.keys() <= expected.keys()
    rare = [tokens for tokens, prob in expected.items() if prob * NUM_SAMPLES < 5]
    cells = [[tokens] for tokens in expected if tokens not in rare] + [rare] * bool(rare)
    aims = [NUM_SAMPLES * sum(expected[tokens] for tokens in cell) for cell in cells]
    nums = [sum(observed[tokens] for tokens in cell) for cell in cells]
    assert chisquare(nums, aims).pvalue > FALSE_ALARM


def test_sampled_sequences_follow_the_target_law():
    assert_sampled_law(SAMPLINGS["plain"], Entropy(0.3))


def test_both_streams_of_random_draws_are_uniform_and_independent_and_never_the_impossible():
    draws, probs, table = RandomSampler(seeded()), torch.full((10,), 0.1), torch.zeros(10, 2)
    for _ in range(20000):
        table[draws.token(probs), draws.num_accepted([0.5])] += 1
    assert chi2.sf(((table - 1000) ** 2 / 1000).sum().item(), 19) > FALSE_ALARM
    probs = torch.tensor([0.0, 0.5, 0.0, 0.5, 0.0])
    assert {draws.token(probs) for _ in range(500)} == {1, 3}
    assert {draws.num_accepted([1.0, 0.0]) for _ in range(500)} == {1}
