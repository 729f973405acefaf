"""The output of the real loop has exactly the target's law (laws 4.2, 4.3), for every policy, sampling and ending.

Nothing is sampled: `enumeration.law_of` walks every branch of the loop's draws on toy models over 3 tokens, in float64.
"""

from collections.abc import Callable, Sequence

import pytest
import torch

from decode import Generation, ModelDrafter, SpeculativeDecoder
from decode.policies import FixedLength, Heuristic, Policy
from decode.policies.base import AfterDraw, Outcome, State
from lm import Sampler, Sampling
from tests.toys.enumeration import ToyModel, assert_same_law, law_of
from tests.toys.loop import POLICIES, PROMPT, SAMPLINGS, decoder_of, law


def assert_lossless(decoder: SpeculativeDecoder, max_new_tokens: int, prompt: Sequence[int] = PROMPT) -> None:
    """The loop's law is the target's, to 1e-12."""
    expected = ToyModel(1).law(prompt, max_new_tokens, sampling=decoder.sampling, eos_ids=decoder.eos_ids)
    assert_same_law(law(decoder, max_new_tokens, prompt), expected)


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_preserves_the_target_law_under_every_sampling(policy, sampling):
    assert_lossless(decoder_of(POLICIES[policy], sampling=SAMPLINGS[sampling]), 3)


@pytest.mark.parametrize("eos_ids", [(), (0, 2), (0, 1, 2)])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_preserves_the_target_law_with_no_eos_and_with_several(policy, eos_ids):
    assert_lossless(decoder_of(POLICIES[policy], eos_ids=eos_ids), 3)


@pytest.mark.parametrize("max_new_tokens", [0, 1, 2, 4])
@pytest.mark.parametrize("length", [0, 1, 3])
def test_the_length_limit_and_the_draft_length_never_change_the_law(max_new_tokens, length):
    assert_lossless(
        decoder_of(FixedLength(20), length=length, eos_ids=(0, 2) if max_new_tokens == 4 else (2,)), max_new_tokens
    )


@pytest.mark.parametrize("policy", ["heuristic", "self_verify", "ada_edl", "fed_head", "learning_head"])
def test_policies_that_remember_preserve_the_target_law_over_longer_drafts_and_more_rounds(policy):
    assert_lossless(decoder_of(POLICIES[policy], sampling=SAMPLINGS["top_k"]), 4)
    assert_lossless(decoder_of(POLICIES[policy]), 3, prompt=[1])


class Heeds(Policy):
    """Drafts one token after a round with large feedback, else three: feedback decides the next draft, not this one."""

    zero_feedback = (0.0,)

    def start(self) -> State:
        return (0.0,)

    def limit(self, state: State) -> float:
        return 1 if state[0] > 1 else 3

    def feedback(self, state: State, drawn: AfterDraw, acceptance_prob: float) -> State:
        return (acceptance_prob,)

    def end(self, state: State, outcome: Outcome) -> State:
        return outcome.feedback


@pytest.mark.parametrize("max_new_tokens", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_a_policy_that_heeds_its_lessons_preserves_the_target_law(max_new_tokens):
    decoder = decoder_of(Heeds(), eos_ids=())
    rounds = decoder.generate(PROMPT, 60, generator=torch.Generator().manual_seed(0)).rounds[:-3]
    assert {len(played.drafted) for played in rounds} == {1, 3}
    assert_lossless(decoder, max_new_tokens)


@pytest.mark.parametrize("policy", [FixedLength(3), Heuristic(2)])
def test_a_draft_that_is_read_at_its_end_only_preserves_the_target_law(policy):
    decoder = decoder_of(policy, eos_ids=(2,))
    usual = law(decoder, 4)
    decoder.drafter.reads_at_end = True  # as on an accelerator
    assert_same_law(law(decoder, 4), usual)


@pytest.mark.parametrize("draft_width", [4, 5])
def test_a_padded_vocabulary_never_leaks(draft_width):
    drafter = ModelDrafter(ToyModel(2, 3, width=draft_width), FixedLength(2))
    decoder = SpeculativeDecoder(ToyModel(1, 3, width=5), drafter, eos_ids=frozenset({2}))
    expected = ToyModel(1, 3, width=5).law(PROMPT, 2, sampling=Sampling(), eos_ids=frozenset({2}))
    assert_same_law(law(decoder, 2), expected)
    assert all(token < 3 for tokens in expected for token in tokens)


def test_temperature_zero_emits_the_most_probable_token_each_time():
    decoder = decoder_of(FixedLength(2), sampling=SAMPLINGS["greedy"], eos_ids=())
    output = law(decoder, 4)
    assert len(output) == 1
    ((tokens, probability),) = output.items()
    assert probability == 1.0
    for i, token in enumerate(tokens):
        assert token == ToyModel(1).feed([*PROMPT, *tokens[:i]])[-1].argmax()


def test_a_vocabulary_of_five_preserves_the_target_law():
    decoder = SpeculativeDecoder(ToyModel(1, 5), ModelDrafter(ToyModel(2, 5), FixedLength(2)), eos_ids=frozenset({4}))
    assert_same_law(law(decoder, 3), ToyModel(1, 5).law(PROMPT, 3, sampling=Sampling(), eos_ids=frozenset({4})))


def test_drafts_from_tokens_that_the_target_never_says_are_all_rejected():
    draft, target = ToyModel(2, sharpness=40.0), ToyModel(1, sharpness=40.0)
    sampling = Sampling(top_k=1)
    decoder = SpeculativeDecoder(target, ModelDrafter(draft, FixedLength(2)), sampling=sampling, eos_ids=frozenset())
    assert_same_law(law(decoder, 4), ToyModel(1, sharpness=40.0).law(PROMPT, 4, sampling=sampling, eos_ids=frozenset()))


@pytest.mark.parametrize("temperature", [0.0, 0.5, 0.7, 1.0])
@pytest.mark.parametrize("top_k", [None, 2])
@pytest.mark.parametrize("top_p", [None, 0.8])
def test_a_draft_that_is_the_target_is_always_accepted(temperature, top_k, top_p):
    sampling = Sampling(temperature, top_k, top_p)
    decoder = SpeculativeDecoder(
        ToyModel(1), ModelDrafter(ToyModel(1), FixedLength(2)), sampling=sampling, eos_ids=frozenset({2})
    )

    def num_rejected(draws: Sampler) -> int:
        return sum(played.next_kind == "residual" for played in decoder.generate(PROMPT, 4, generator=draws).rounds)

    assert law_of(num_rejected)[0] == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("policy", sorted(set(POLICIES) - {"never_draft", "fixed_length"}))
def test_these_tests_see_every_policy_stop_early_and_late(policy):
    decoder = decoder_of(POLICIES[policy], eos_ids=(), length=3)
    rounds = decoder.generate(PROMPT, 60, generator=torch.Generator().manual_seed(0)).rounds[:-3]
    assert len({len(played.drafted) for played in rounds}) > 1


def every_branch(decoder: SpeculativeDecoder, check: Callable[[Generation], None]) -> None:
    """Check a generation of four tokens on every branch of its draws."""
    law_of(lambda draws: check(decoder.generate(PROMPT, 4, generator=draws)))


def test_every_round_emits_one_token_more_than_it_accepts_unless_the_drafts_eos_ends_it():
    def check(generation: Generation) -> None:
        for played in generation.rounds:
            is_ended = played.emitted[-1] == 2 and len(played.emitted) == played.num_accepted
            assert len(played.emitted) == played.num_accepted + (not is_ended)

    every_branch(decoder_of(FixedLength(2)), check)


def test_nothing_is_drafted_or_emitted_after_eos():
    def check(generation: Generation) -> None:
        for tokens in (generation.token_ids, *(played.drafted for played in generation.rounds)):
            assert not set(tokens[:-1]) & {0, 2}

    every_branch(decoder_of(FixedLength(3), eos_ids=(0, 2)), check)


def test_every_forward_feeds_the_tokens_that_the_cache_lacks_and_no_others():
    decoder = decoder_of(FixedLength(2), eos_ids=())

    def check(draws: Sampler) -> bool:
        target, draft = decoder.target, decoder.drafter.model
        target.forwards, draft.forwards = [], []
        rounds = decoder.generate(PROMPT, 4, generator=draws).rounds
        assert target.forwards == [
            len(PROMPT) + len(rounds[0].drafted),
            *(1 + len(played.drafted) for played in rounds[1:]),
        ]
        expected = []
        fed = len(PROMPT)
        for played in rounds:
            expected += [fed if i == 0 else 1 for i in range(len(played.drafted))]
            fed = (2 if played.next_kind == "bonus" else 1) if played.drafted else fed + 1
        assert draft.forwards == expected
        return True

    law_of(check)


def test_mixed_dtypes_of_draft_and_target_are_lossless_up_to_rounding():
    class Narrow(ToyModel):
        def feed(self, new_tokens: Sequence[int], num_rows: int = 1) -> torch.Tensor:
            return super().feed(new_tokens, num_rows).to(torch.bfloat16)

    decoder = SpeculativeDecoder(ToyModel(1), ModelDrafter(Narrow(2), FixedLength(2)), eos_ids=frozenset({2}))
    assert_same_law(
        law(decoder, 3), ToyModel(1).law(PROMPT, 3, sampling=Sampling(), eos_ids=frozenset({2})), tolerance=1e-6
    )
