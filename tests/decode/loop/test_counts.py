"""Law 4.4: what the loop counts is what drafter, models and cache saw."""

from dataclasses import replace

import pytest

import decode.loop.rounds
from decode import InnerRounds, ModelDrafter, PreVerifiedDrafter, SpeculativeDecoder
from decode.policies import AdaEDL, Entropy, FixedLength, Policy
from tests.toys.enumeration import ToyModel, seeded
from tests.toys.loop import POLICIES, PROMPT, decoder_of
from tests.toys.observed import observed
from tests.toys.random_pairs import random_pair


def assert_counts(decoder: SpeculativeDecoder, max_new_tokens: int, *, seed: int) -> set[str | None]:
    """The counts of one generation are what was seen of it; returns the kinds of its rounds."""
    with observed(decoder, decoder.drafter.model) as seen:
        generation = decoder.generate(PROMPT, max_new_tokens, generator=seeded(seed))
    seen.check(generation, len(PROMPT))
    assert generation.counts.num_draft_forwards == seen.num_draft_forwards
    return {played.next_kind for played in generation.rounds}


def test_counts_are_what_drafter_target_and_cache_saw():
    kinds = set()
    for seed in range(6):
        for eos_ids in ((), (2,)):
            for policy in (FixedLength(3), POLICIES["ada_edl"], POLICIES["never_draft"]):
                kinds |= assert_counts(decoder_of(policy, eos_ids=eos_ids), 12, seed=seed)
    assert kinds == {"residual", "bonus", None}


@pytest.mark.parametrize("eos_ids", [frozenset(), frozenset(range(0, 40, 6))])
@pytest.mark.parametrize("is_unread", [False, True])
def test_counts_are_what_real_models_saw_read_or_unread(eos_ids, is_unread):
    target, draft = random_pair("llama")
    decoder = SpeculativeDecoder(target, ModelDrafter(draft, FixedLength(5)), eos_ids=eos_ids)
    # as on an accelerator: what lies beyond an EOS was drafted for nothing, and counts
    decoder.drafter.reads_at_end = lambda: is_unread
    for seed in range(8):
        assert_counts(decoder, 24, seed=seed)


def test_unused_forwards_and_those_of_a_hierarchys_draft_are_counted():
    target, draft = random_pair("llama")
    for policy in (AdaEDL(initial_lambda=0.65), Entropy(0.6)):  # a stop between a forward and its draw has no token
        assert_counts(SpeculativeDecoder(target, ModelDrafter(draft, policy), eos_ids=frozenset()), 24, seed=0)
    micro = ModelDrafter(ToyModel(3), FixedLength(2))
    drafter = PreVerifiedDrafter(micro, ToyModel(2), Policy(), rounds=InnerRounds(window=2))
    for seed in range(4):
        decoder = SpeculativeDecoder(ToyModel(1), drafter, eos_ids=frozenset({2}), max_draft_length=5)
        assert_counts(decoder, 12, seed=seed)


def test_a_round_that_is_cut_discards_what_was_cut():
    for played in decoder_of(FixedLength(3), eos_ids=()).generate(PROMPT, 30, generator=seeded()).rounds:
        for num_emitted in range(1, len(played.emitted) + 1):
            cut = played.truncated(num_emitted)
            assert cut.emitted == played.emitted[:num_emitted]
            assert cut.counts.num_discarded == len(played.drafted) + 1 - num_emitted
            pairs = zip(cut.emitted, played.drafted, strict=False)
            assert cut.counts.num_accepted == sum(one == other for one, other in pairs)


def test_the_loop_itself_notices_a_miscount(monkeypatch):
    """Every generation asserts law 4.4, with N_discarded as the target's cache has it."""
    count = decode.loop.rounds._counts_of

    def one_too_many(proposal, num_accepted, num_emitted):
        counts = count(proposal, num_accepted, num_emitted)
        return replace(counts, num_drafted=counts.num_drafted + 1)

    monkeypatch.setattr(decode.loop.rounds, "_counts_of", one_too_many)
    with pytest.raises(AssertionError, match="3 discarded, 2 dropped"):
        decoder_of(FixedLength(2)).generate(PROMPT, 8)
