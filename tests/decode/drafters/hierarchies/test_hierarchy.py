"""Hierarchies emit exactly the target's law (law 4.12; laws 4.2, 4.3), at two to four levels, whatever stops each
level.

As in test_losslessness, nothing is sampled: every branch of the loop's draws is walked, in float64, on toys that
disagree.
"""

import pytest
import torch

from decode import Drafter, ModelDrafter, SpeculativeDecoder
from decode.drafters.hierarchies.interleaved import InterleavedDrafter
from decode.drafters.hierarchies.pre_verified import InnerRounds, PreVerifiedDrafter
from decode.policies import FixedLength, Policy
from lm import Sampling
from lm.verification import num_accepted
from tests.toys.enumeration import ToyModel, assert_same_law, law_of
from tests.toys.loop import POLICIES, PROMPT, SAMPLINGS
from tests.toys.observed import observed

TARGET, DRAFT, MICRO, NANO = 1, 2, 3, 4


def micro(policy: Policy | None = None) -> ModelDrafter:
    return ModelDrafter(ToyModel(MICRO), policy or FixedLength(2))


def hierarchy(
    draft_policy: Policy | None = None, micro_policy: Policy | None = None, **rounds: object
) -> PreVerifiedDrafter:
    """Micro drafts, draft pre-verifies, with inner rounds of two tokens."""
    settings = InnerRounds(**({"window": 2} | rounds))
    return PreVerifiedDrafter(micro(micro_policy), ToyModel(DRAFT), draft_policy or Policy(), rounds=settings)


def assert_lossless(
    drafter: Drafter,
    max_new_tokens: int = 3,
    *,
    sampling: Sampling | None = None,
    eos_ids: tuple[int, ...] = (2,),
    length: int = 20,
) -> None:
    """The law of the loop on this drafter is the target's, to 1e-12; law 4.4 holds on every branch."""
    assert_lossless_for(ToyModel(TARGET), drafter, max_new_tokens, sampling=sampling, eos_ids=eos_ids, length=length)


def assert_lossless_for(
    target: ToyModel, drafter: Drafter, max_new_tokens: int, *, sampling=None, eos_ids=(), length=20
) -> None:
    decoder = SpeculativeDecoder(
        target, drafter, sampling=sampling, eos_ids=frozenset(eos_ids), max_draft_length=length
    )

    def play(draws):
        with observed(decoder) as seen:
            generation = decoder.generate(PROMPT, max_new_tokens, generator=draws)
        seen.check(generation, len(PROMPT))
        return generation.token_ids

    expected = target.law(PROMPT, max_new_tokens, sampling=decoder.sampling, eos_ids=decoder.eos_ids)
    assert_same_law(law_of(play), expected)


@pytest.mark.parametrize("policy", POLICIES)
def test_three_levels_preserve_the_target_law_for_every_policy_of_the_draft(policy):
    assert_lossless(hierarchy(draft_policy=POLICIES[policy]))


@pytest.mark.parametrize("policy", POLICIES)
def test_three_levels_preserve_the_target_law_for_every_policy_of_the_micro(policy):
    assert_lossless(hierarchy(micro_policy=POLICIES[policy]))


@pytest.mark.parametrize("policy", ["self_verify", "ada_edl", "both_heads", "heuristic"])
def test_three_levels_preserve_the_target_law_when_both_levels_stop_themselves(policy):
    assert_lossless(hierarchy(POLICIES[policy], POLICIES[policy]))


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_three_levels_preserve_the_target_law_under_every_sampling(sampling):
    assert_lossless(hierarchy(POLICIES["entropy"]), sampling=SAMPLINGS[sampling])


@pytest.mark.parametrize("eos_ids", [(), (0, 2), (0, 1, 2)])
@pytest.mark.parametrize("max_new_tokens", [1, 2, 3])
def test_three_levels_preserve_the_target_law_at_every_ending(eos_ids, max_new_tokens):
    assert_lossless(hierarchy(), max_new_tokens, eos_ids=eos_ids)


@pytest.mark.parametrize("length", [0, 1, 2])
def test_three_levels_preserve_the_target_law_at_every_draft_limit(length):
    assert_lossless(hierarchy(), 3, length=length)


@pytest.mark.parametrize(
    "rounds",
    [
        {"max_rounds": 0},
        {"max_rounds": 1},
        {"max_rounds": 1, "num_alone": 2},
        {"max_rounds": 1, "num_alone": 1, "bonus": False},
        {"bonus": False},
        {"window": 0},
        {"window": 1, "bonus": False},
    ],
)
def test_every_schedule_of_inner_rounds_preserves_the_target_law(rounds):
    target, draft, small = (ToyModel(seed, 2) for seed in (TARGET, DRAFT, MICRO))
    inner = ModelDrafter(small, FixedLength(2))
    drafter = PreVerifiedDrafter(inner, draft, POLICIES["entropy"], rounds=InnerRounds(**({"window": 2} | rounds)))
    assert_lossless_for(target, drafter, 3)


@pytest.mark.parametrize("policy", ["never_draft", "fixed_length", "self_verify", "entropy"])
def test_several_inner_rounds_preserve_the_target_law(policy):
    """Four tokens, so that a second inner round drafts too; two words and no EOS keep the branches few."""
    target, draft, small = (ToyModel(seed, 2) for seed in (TARGET, DRAFT, MICRO))
    inner = ModelDrafter(small, FixedLength(2))
    assert_lossless_for(target, PreVerifiedDrafter(inner, draft, POLICIES[policy], rounds=InnerRounds(window=1)), 4)


def test_four_levels_preserve_the_target_law():
    nano = ModelDrafter(ToyModel(NANO), FixedLength(1))
    inner = PreVerifiedDrafter(nano, ToyModel(MICRO), POLICIES["self_verify"], rounds=InnerRounds(window=1))
    assert_lossless(PreVerifiedDrafter(inner, ToyModel(DRAFT), POLICIES["entropy"], rounds=InnerRounds(window=2)))


@pytest.mark.parametrize(("m", "n"), [(0, 1), (1, 0), (1, 1), (1, 2), (2, 1), (3, 0)])
@pytest.mark.parametrize("eos_ids", [(), (2,)])
def test_interleaved_models_preserve_the_target_law(m, n, eos_ids):
    assert_lossless(InterleavedDrafter(ToyModel(MICRO), ToyModel(DRAFT), m=m, n=n), eos_ids=eos_ids)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_interleaved_models_preserve_the_target_law_under_every_sampling(sampling):
    assert_lossless(InterleavedDrafter(ToyModel(MICRO), ToyModel(DRAFT), m=2, n=1), sampling=SAMPLINGS[sampling])


def test_interleaved_models_inside_a_hierarchy_preserve_the_target_law():
    inner = InterleavedDrafter(ToyModel(NANO), ToyModel(MICRO), m=1, n=1)
    assert_lossless(PreVerifiedDrafter(inner, ToyModel(DRAFT), POLICIES["self_verify"], rounds=InnerRounds(window=2)))


class PrintedDecoder(SpeculativeDecoder):
    """The loop of Chen's Algorithm 2 as printed: biased."""

    def _verify_chain(self, text, proposal, draws):
        fed = text + proposal.tokens
        p = self.sampling.laws_after(self.target.forward(fed, len(proposal.tokens) + 1), fed)
        proposal.accepted = range(num_accepted(proposal.tokens, proposal.dists, p, draws))
        return draws.token(p[len(proposal.accepted)])


@pytest.mark.parametrize(("m", "n"), [(1, 0), (1, 1), (2, 1)])
def test_a_replacement_drawn_from_plain_p_as_chen_prints_it_is_biased(m, n):
    """The walk that finds the lossless variant exact finds this one to be off."""
    drafter = InterleavedDrafter(ToyModel(MICRO), ToyModel(DRAFT), m=m, n=n)
    decoder = PrintedDecoder(ToyModel(TARGET), drafter, eos_ids=frozenset())
    law = law_of(lambda draws: decoder.generate(PROMPT, 3, generator=draws).token_ids)
    with pytest.raises(AssertionError, match="against"):
        assert_same_law(law, ToyModel(TARGET).law(PROMPT, 3, sampling=Sampling(), eos_ids=frozenset()))


@pytest.mark.parametrize(("n", "proposing"), [(0, DRAFT), (1, MICRO)])
def test_the_printed_variant_has_the_law_that_its_docstring_says(n, proposing):
    p, q = (_first_row(seed) for seed in (TARGET, proposing))
    drafter = InterleavedDrafter(ToyModel(MICRO), ToyModel(DRAFT), m=1, n=n)
    decoder = PrintedDecoder(ToyModel(TARGET), drafter, max_draft_length=1, eos_ids=frozenset())
    law = law_of(lambda draws: decoder.generate(PROMPT, 2, generator=draws).token_ids[0])
    overlap = torch.minimum(p, q)
    expected = overlap + (1 - overlap.sum()) * p
    assert_same_law(law, dict(enumerate(expected.tolist())))
    assert (expected - p).abs().max() > 0.01


def test_the_printed_variant_is_exact_where_nothing_is_left_to_chance():
    drafter = InterleavedDrafter(ToyModel(MICRO), ToyModel(DRAFT), m=2, n=1)
    greedy = {"sampling": Sampling(temperature=0.0), "eos_ids": frozenset()}
    decoders = [kind(ToyModel(TARGET), drafter, **greedy) for kind in (PrintedDecoder, SpeculativeDecoder)]
    printed, lossless = (decoder.generate(PROMPT, 12).token_ids for decoder in decoders)
    assert printed == lossless


class DropsByValue(PreVerifiedDrafter):
    """Illegal (law 4.3): looks at the emitted token, then throws it away."""

    def take(self, token, drawn, q):
        if token == 0:
            self.proposal.stop_reason = "policy"
            return False
        return super().take(token, drawn, q)


def test_dropping_an_inner_token_by_its_value_is_caught():
    with pytest.raises(AssertionError, match="against"):
        assert_lossless(DropsByValue(micro(), ToyModel(DRAFT), Policy(), rounds=InnerRounds(window=2)))


def _first_row(seed: int) -> torch.Tensor:
    return Sampling().probs(ToyModel(seed).forward(PROMPT)[-1])
