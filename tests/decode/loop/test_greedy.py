"""Caches equal their absence, up to both ends of the context."""

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config

from decode import ModelDrafter, SpeculativeDecoder
from decode.policies import FixedLength
from lm import CachedModel, Sampling
from tests.toys.enumeration import seeded
from tests.toys.random_pairs import CONFIGS, IDS, greedy_of, random_pair

GREEDY = Sampling(temperature=0.0)


@pytest.mark.parametrize("architecture", CONFIGS)
def test_cached_logits_equal_uncached_ones_under_random_appends_and_roll_backs(architecture):
    model, _ = random_pair(architecture)
    cached = CachedModel(model, with_hidden=True)
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
