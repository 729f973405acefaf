"""The loop writes what plain `generate` writes where the target's rotary frequencies change with the length of the text
(law 4.2).
"""

import pytest
import torch

from decode import ModelDrafter, SpeculativeDecoder, speculative_generate
from decode.drafters.parallel.pearl import PearlDecoder
from decode.drafters.trees.decoder import TreeDecoder
from decode.drafters.trees.drafter import TreeDrafter
from decode.policies import FixedLength
from lm import CachedModel, Sampling
from tests.toys.enumeration import assert_same_law, law_of
from tests.toys.longrope import BOUND, greedy_of, model_of, said_by_generate, text_of

KINDS = ("phi3", "llama")
LENGTH = 12


def decoder_of(kind: str, **how) -> SpeculativeDecoder:
    """A target, and a draft of it that is right about half of the time."""
    drafter = ModelDrafter(CachedModel(model_of(kind, noise=0.05)), FixedLength(4))
    how = {"sampling": Sampling(temperature=0.0), "eos_ids": frozenset()} | how
    return SpeculativeDecoder(CachedModel(model_of(kind)), drafter, **how)


@pytest.mark.parametrize("kind", KINDS)
def test_eight_of_eight_greedy_texts_across_the_bound_are_those_of_generate(kind):
    decoder, target = decoder_of(kind), model_of(kind)
    prompts = [text_of(length, seed=length) for length in range(BOUND - 9, BOUND - 1)]
    generations = [decoder.generate(prompt, LENGTH) for prompt in prompts]
    assert [each.token_ids for each in generations] == [greedy_of(target, prompt, LENGTH) for prompt in prompts]
    accepted = sum(each.counts.num_accepted for each in generations)
    assert 0 < accepted < sum(each.counts.num_drafted for each in generations)


@pytest.mark.parametrize("kind", KINDS)
def test_the_sampled_law_across_the_bound_is_that_of_generate(kind):
    """Enumerated: three tokens of the two likeliest each, the second of which is the first that is read with the far
    frequencies.
    """
    sampling, prompt, target = Sampling(temperature=2.0, top_k=2), text_of(BOUND - 1), model_of(kind)
    decoder = decoder_of(kind, sampling=sampling)
    ours = law_of(lambda draws: decoder.generate(prompt, 3, generator=draws).token_ids)
    expected: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        laws = {tokens: sampling.probs(said_by_generate(target, prompt, tokens)[-1:])[0] for tokens in expected}
        expected = {
            (*tokens, token): prob * float(laws[tokens][token])
            for tokens, prob in expected.items()
            for token in laws[tokens].nonzero().flatten().tolist()
        }
    assert_same_law(ours, expected, tolerance=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_short_text_beside_a_long_one_in_a_batch_is_that_of_generate(kind):
    decoder, target = decoder_of(kind), model_of(kind)
    prompts = [text_of(length, seed=length) for length in (4, 30, BOUND, 20, BOUND - 5)]
    generations = decoder.generate_batch(prompts, LENGTH, batch_size=3)
    assert [each.token_ids for each in generations] == [greedy_of(target, prompt, LENGTH) for prompt in prompts]


@pytest.mark.parametrize("kind", KINDS)
def test_generate_with_a_draft_is_generate_across_the_bound(kind):
    target, draft, prompt = model_of(kind), model_of(kind, noise=0.05), text_of(BOUND - 6)
    how = {"custom_generate": speculative_generate, "draft_model": draft, "policy": FixedLength(5)}
    ids = target.generate(torch.tensor([prompt]), max_new_tokens=LENGTH, do_sample=False, **how)
    assert tuple(ids[0, len(prompt) :].tolist()) == greedy_of(target, prompt, LENGTH)


@pytest.mark.parametrize("kind", KINDS)
def test_pearl_across_the_bound_is_generate(kind):
    target, prompt = model_of(kind), text_of(BOUND - 6)
    decoder = PearlDecoder(
        target, model_of(kind, noise=0.05), gamma=3, sampling=Sampling(temperature=0.0), eos_ids=frozenset()
    )
    assert decoder.generate(prompt, LENGTH).token_ids == greedy_of(target, prompt, LENGTH)


def test_a_draft_that_stays_on_the_device_comes_to_the_host_where_it_is_read_again():
    decoder, target, prompt = decoder_of("phi3"), model_of("phi3"), text_of(BOUND - 6)
    decoder.drafter.reads_at_end = True
    assert decoder.generate(prompt, LENGTH).token_ids == greedy_of(target, prompt, LENGTH)


@pytest.mark.parametrize("kind", KINDS)
def test_trees_across_the_bound_are_refused_with_one_line_and_on_either_side_are_generate(kind):
    target = model_of(kind)
    decoder = TreeDecoder(
        target,
        TreeDrafter(model_of(kind, noise=0.05), FixedLength(3)),
        sampling=Sampling(temperature=0.0),
        eos_ids=frozenset(),
    )
    for prompt, length in ((text_of(5), BOUND - 4), (text_of(BOUND + 2), LENGTH)):
        assert decoder.generate(prompt, length).token_ids == greedy_of(target, prompt, length)
    for prompt, length in ((text_of(5), BOUND - 3), (text_of(BOUND), 2), (text_of(BOUND + 1), 2)):
        with pytest.raises(
            ValueError, match=f"make a text of {len(prompt) + length}, .* beyond {BOUND} .*chains instead of trees"
        ) as refusal:
            decoder.generate(prompt, length)
        assert "\n" not in str(refusal.value)
