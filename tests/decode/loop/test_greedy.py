"""Greedy decoding equals transformers' own, token for token, in float64, on five architectures; and caches equal their
absence.
"""

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config

from decode import ModelDrafter, SpeculativeDecoder
from decode.policies import Entropy, FixedLength, Heuristic
from lm import CachedModel, Sampling
from tests.toys.random_pairs import CONFIGS, IDS, random_pair


@pytest.mark.parametrize("architecture", CONFIGS)
def test_greedy_output_equals_transformers_generate(architecture):
    target, draft = random_pair(architecture)
    prompt = [3, 1, 4, 1, 5]
    expected = target.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=30)[0, len(prompt) :].tolist()
    assert len(set(expected)) > 2
    num_accepted = set()
    for policy in (FixedLength(4), Heuristic(3), Entropy(0.6)):
        decoder = SpeculativeDecoder(target, ModelDrafter(draft, policy), sampling=Sampling(temperature=0.0))
        generation = decoder.generate(prompt, 30)
        assert list(generation.token_ids) == expected
        num_accepted |= {(played.num_accepted, len(played.drafted)) for played in generation.rounds}
    assert any(accepted > 0 for accepted, _ in num_accepted)
    assert any(accepted < drafted for accepted, drafted in num_accepted)


@pytest.mark.parametrize("architecture", CONFIGS)
def test_cached_logits_equal_uncached_ones_under_random_appends_and_roll_backs(architecture):
    model, _ = random_pair(architecture)
    cached = CachedModel(model, with_hidden=True)
    generator = torch.Generator().manual_seed(0)
    tokens = [1, 2, 3]
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
            torch.testing.assert_close(
                cached.hidden[-num_rows:], expected.hidden_states[-1][0, -num_rows:], rtol=0, atol=1e-10
            )
        assert len(cached) == len(tokens)


def test_both_ends_of_the_context_are_reached():
    target, draft = random_pair("gpt2")
    decoder = SpeculativeDecoder(target, ModelDrafter(draft, FixedLength(5)), sampling=Sampling(temperature=0.0))
    assert len(decoder.generate([7], 64).token_ids) == 64
    assert len(decoder.generate([1] * 64, 1).token_ids) == 1
    with pytest.raises(ValueError, match="context of 64"):
        decoder.generate([1] * 60, 6)


def test_a_draft_with_a_shorter_context_stops_drafting_and_changes_nothing():
    target, _ = random_pair("gpt2")
    draft = AutoModelForCausalLM.from_config(
        GPT2Config(vocab_size=40, n_embd=16, n_layer=1, n_head=2, n_positions=16, **IDS)
    ).double()
    expected = target.generate(torch.tensor([[7]]), do_sample=False, max_new_tokens=30)[0, 1:].tolist()
    decoder = SpeculativeDecoder(target, ModelDrafter(draft.eval(), FixedLength(3)), sampling=Sampling(temperature=0.0))
    generation = decoder.generate([7], 30)
    assert list(generation.token_ids) == expected
    assert generation.rounds[-2].drafted == ()
