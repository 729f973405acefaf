"""What the loop counts is what drafter, models and cache saw (law 4.4); caches equal their absence (law 4.5)."""

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config

import decode.loop.rounds
from decode import Counts, InnerRounds, ModelDrafter, PreVerifiedDrafter, SpeculativeDecoder
from decode.policies import AdaEDL, Entropy, FixedLength, Policy
from lm import CachedModel, Sampling
from tests.toys.enumeration import ToyModel, seeded
from tests.toys.loop import POLICIES, PROMPT, decoder_of
from tests.toys.observed import observed
from tests.toys.random_pairs import CONFIGS, IDS, greedy_of, random_pair


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
    count = decode.loop.rounds.counts_of
    monkeypatch.setattr(decode.loop.rounds, "counts_of", lambda *given: count(*given) + Counts(num_drafted=1))
    with pytest.raises(AssertionError, match="3 discarded, 2 dropped"):
        decoder_of(FixedLength(2)).generate(PROMPT, 8)


GREEDY = Sampling(temperature=0.0)


@pytest.mark.parametrize("architecture", CONFIGS)
def test_cached_logits_equal_uncached_ones_under_random_appends_and_roll_backs(architecture):
    model, _ = random_pair(architecture)
    cached = CachedModel(model)
    cached.keep_hidden()
    generator, tokens = seeded(), [1, 2, 3]
    for _ in range(25):
        num_new, num_dropped = (int(torch.randint(high, (), generator=generator)) for high in (5, 6))
        cached.roll_back(max(0, min(len(cached), len(tokens) - num_dropped)))
        tokens = tokens[: max(len(cached), 1)] + torch.randint(40, (num_new + 1,), generator=generator).tolist()
        tokens = tokens[:50] if len(cached) < 50 else tokens[:30]
        cached.roll_back(len(tokens) - 1)
        num_rows = min(2, len(tokens) - len(cached))
        logits = cached.feed(tokens[len(cached) :], num_rows)
        with torch.no_grad():
            expected = model(torch.tensor([tokens]), output_hidden_states=True)
        torch.testing.assert_close(logits, expected.logits[0, -num_rows:], rtol=0, atol=1e-10)
        if architecture != "opt":
            hidden = expected.hidden_states[-1][0, -num_rows:]
            torch.testing.assert_close(cached.hidden[-num_rows:], hidden, rtol=0, atol=1e-10)
        assert len(cached) == len(tokens)


def test_both_ends_of_the_context_are_reached_and_a_draft_with_a_shorter_one_changes_nothing():
    target, draft = random_pair("gpt2")
    decoder = SpeculativeDecoder(target, ModelDrafter(draft, FixedLength(5)), sampling=GREEDY)
    assert len(decoder.generate([7], 64).token_ids) == 64
    assert len(decoder.generate([1] * 64, 1).token_ids) == 1
    with pytest.raises(ValueError, match="context of 64"):
        decoder.generate([1] * 60, 6)
    config = GPT2Config(vocab_size=40, n_embd=16, n_layer=1, n_head=2, n_positions=16, **IDS)
    shorter = ModelDrafter(AutoModelForCausalLM.from_config(config).double().eval(), FixedLength(3))
    generation = SpeculativeDecoder(target, shorter, sampling=GREEDY).generate([7], 30)
    assert list(generation.token_ids) == greedy_of(target, [7], 30)
    assert generation.rounds[-2].drafted == ()
