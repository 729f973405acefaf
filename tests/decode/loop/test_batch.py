"""Sequences decoded together are written as each of them alone (law 4.13): round by round, whoever sits beside them."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

import lm.selfcheck
from decode import Generation, ModelDrafter, SpeculativeDecoder
from decode.loop.decoder import integers_of
from decode.policies import Entropy, FixedLength, HeadPolicy
from lm import RandomSampler, Sampling
from lm import batch as batch_module
from tests.toys.enumeration import ToyModel, assert_same_law, law_of, seeded
from tests.toys.loop import AUTOS, OTHER, POLICIES, PROMPT, RULE, SAMPLINGS, Recalling, decoder_of, toy_head
from tests.toys.random_pairs import CONFIGS, random_pair


def draws_of(seed: int) -> RandomSampler:
    return RandomSampler(seeded(seed))


def timeless(generation: Generation) -> list:
    return [replace(one, draft_s=0.0, target_s=0.0) for one in generation.rounds]


def assert_as_alone(decoder: SpeculativeDecoder, prompts, limits, batch_size: int) -> None:
    """Every round of every generation is that of `generate`."""
    draws = [draws_of(number) for number in range(len(prompts))]
    together = decoder.generate_batch(prompts, limits, batch_size=batch_size, generator=draws)
    for number, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
        alone = decoder.generate(prompt, limit, generator=draws_of(number))
        assert timeless(together[number]) == timeless(alone), number


PROMPTS = [[0, 1], [1], [2, 2, 1, 0, 1, 2, 1, 0, 0, 1], [0], [1, 1, 2], [2, 0]]
LIMITS = [9, 4, 12, 0, 7, 15]


CASES = {name: (decoder_of(policy, sampling=SAMPLINGS["top_k"], length=5), 4) for name, policy in POLICIES.items()}
CASES |= {f"{size} rows": (CASES["ada_edl"][0], size) for size in (1, 2, 9)}
CASES |= {name: (decoder_of(POLICIES["both_heads"], sampling=sampling), 3) for name, sampling in SAMPLINGS.items()}


@pytest.mark.parametrize("case", CASES)
def test_every_policy_and_sampling_drafts_in_a_batch_what_it_drafts_alone(case):
    decoder, batch_size = CASES[case]
    assert_as_alone(decoder, PROMPTS, LIMITS, batch_size)


LEARNING = {"head": HeadPolicy(toy_head("drawn", seed=2), 0.5, is_learning=True), "no_head": Recalling()}


@pytest.mark.parametrize("policy", LEARNING)
def test_a_sequence_learns_from_its_own_rounds_as_it_does_alone(policy):
    assert_as_alone(decoder_of(LEARNING[policy], eos_ids=(), length=5), PROMPTS, [30] * len(PROMPTS), 3)


@pytest.mark.parametrize("policy", ["self_verify", "ada_edl", "auto", "batch_rule", "auto_token_prob"])
def test_a_sequence_has_the_targets_law_whoever_sits_beside_it(policy):
    decoder = decoder_of((POLICIES | AUTOS)[policy], sampling=SAMPLINGS["cold"])

    def play(draws):
        generator = [draws, draws_of(5)]
        return decoder.generate_batch([PROMPT, OTHER], [3, 4], batch_size=2, generator=generator)[0].token_ids

    assert_same_law(law_of(play), ToyModel(1).law(PROMPT, 3, sampling=decoder.sampling, eos_ids=decoder.eos_ids))


def test_sequences_of_a_batch_are_independent():
    decoder = decoder_of(RULE)

    def play(draws):
        generations = decoder.generate_batch([PROMPT, OTHER], 2, batch_size=2, generator=[draws, draws])
        return tuple(each.token_ids for each in generations)

    how = {"sampling": decoder.sampling, "eos_ids": decoder.eos_ids}
    ours, others = (ToyModel(1).law(prompt, 2, **how) for prompt in (PROMPT, OTHER))
    assert_same_law(law_of(play), {(a, b): p * q for a, p in ours.items() for b, q in others.items()})


@pytest.mark.parametrize("policy", ["fixed_length", "ada_edl", "batch_rule"])
def test_the_rounds_of_a_batch_add_up_to_the_counts_of_its_sequences(policy):
    decoder = decoder_of((POLICIES | AUTOS)[policy], length=4)
    batch = decoder.batch(PROMPTS, LIMITS, batch_size=3, generator=seeded(1))
    played = list(batch)
    counts = [each.counts for each in batch.generations]
    assert sum(sum(one.steps) for one in played) == sum(each.num_draft_forwards for each in counts)
    assert sum(one.num_tokens for one in played) == sum(each.num_drafted + each.num_target for each in counts)
    assert sum(one.num_emitted for one in played) == sum(each.num_emitted for each in counts)
    assert sum(one.num_joined for one in played) == sum(limit > 0 for limit in LIMITS)
    assert all(list(one.steps) == sorted(one.steps, reverse=True) for one in played)


@pytest.mark.parametrize(("temperature", "policy"), [(0.0, FixedLength(4)), (1.0, Entropy(0.6))])
@pytest.mark.parametrize("architecture", CONFIGS)
def test_models_write_in_a_batch_what_they_write_alone(architecture, temperature, policy):
    target, draft = random_pair(architecture)
    prompts = [[3, 1, 4, 1, 5], [9], [2, 6, 5, 3, 5, 8] * 10, [6, 4, 3]]  # the third ends where the context does
    decoder = SpeculativeDecoder(target, ModelDrafter(draft, policy), sampling=Sampling(temperature=temperature))
    for batch_size in (1, 3) if architecture == "llama" else (3,):
        assert_as_alone(decoder, prompts, [9, 14, 5, 6], batch_size)


def whole_pair() -> SpeculativeDecoder:
    target, draft = random_pair("llama")
    return SpeculativeDecoder(target, ModelDrafter(draft, FixedLength(4)), sampling=Sampling(temperature=0.0))


MUTANTS = {
    "seen_padding": (batch_module, "visible", lambda places, end: torch.ones(*places.shape, end, dtype=torch.bool)),
    "rejected_tokens_stay": (
        batch_module.BatchRow,
        "roll_back",
        lambda self, length: setattr(self, "_length", min(self._length, length + 1)),
    ),
    "rows_off_by_one": (batch_module, "_last", lambda *args: [max(0, index - 1) for index in LAST(*args)]),
}
LAST = batch_module._last


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_broken_batch_is_refused_before_it_decodes_and_would_not_pass(mutant, monkeypatch):
    decoder = whole_pair()
    monkeypatch.setattr(*MUTANTS[mutant])
    monkeypatch.setattr(lm.selfcheck, "_PASSED", {})
    with pytest.raises((ValueError, AssertionError)):
        decoder.generate_batch([[3, 1, 4, 1, 5], [9]], 8, batch_size=2)
    models = decoder.target.model, decoder.drafter.model.model
    monkeypatch.setattr(lm.selfcheck, "_PASSED", {model: {"rows of different lengths": False} for model in models})
    with pytest.raises(AssertionError):
        assert_as_alone(decoder, [[3, 1, 4, 1, 5], [9], [1, 2, 3, 4, 5, 6, 7, 8, 9]], [14, 10, 12], 2)


@pytest.mark.parametrize("array", [np.array, lambda ids: np.array(ids, dtype=np.uint8), torch.tensor, tuple])
def test_prompts_and_limits_are_read_in_any_integer_type(array):
    decoder, number = decoder_of(POLICIES["ada_edl"], length=5), array([6])[0]
    draws = [[draws_of(place) for place in range(2)] for _ in range(4)]
    expected = decoder.generate_batch([PROMPT, OTHER], 6, batch_size=2, generator=draws[0])
    prompts = [array(PROMPT), array(OTHER)]
    for limits, own in zip((number, [number] * 2, array([6, 6])), draws[1:], strict=True):
        found = decoder.generate_batch(prompts, limits, batch_size=array([2])[0], generator=own)
        assert [*map(timeless, found)] == [*map(timeless, expected)]
        assert {type(token) for each in found for token in each.token_ids} == {int}
    assert timeless(decoder.generate(prompts[0], number, generator=draws_of(0))) == timeless(expected[0])


def batch_of_a_window():
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    config = MistralConfig(**sizes, num_attention_heads=2, num_key_value_heads=1, sliding_window=8)
    windowed = MistralForCausalLM(config).eval()
    SpeculativeDecoder(windowed, ModelDrafter(windowed, FixedLength(2))).generate_batch([[1]], 4)


TOY = decoder_of(FixedLength(2))


@pytest.mark.parametrize(
    ("refused", "complaint"),
    [
        (lambda: TOY.generate(torch.tensor([PROMPT]), 3), r"prompt is \[0, 1\] \(list\); it must be an integer"),
        (lambda: TOY.generate_batch([torch.zeros(2)], 3), r"a token id of a prompt is 0\.0 \(float\)"),
        (lambda: TOY.generate_batch([PROMPT], [3, 3]), "max_new_tokens has 2 entries for 1 prompts"),
        (lambda: integers_of(2.5, "a limit"), r"a limit is 2\.5"),
        (lambda: integers_of("3", "a limit"), "a limit is '3'"),
        (lambda: TOY.generate_batch([[1]], 4, batch_size=0), "batch_size is 0"),
        (lambda: TOY.generate_batch([[]], 4), "the prompt has no tokens"),
        (batch_of_a_window, "MistralForCausalLM cannot be decoded in batches: its cache has DynamicSlidingWindowLayer"),
    ],
)
def test_what_is_no_integer_and_what_has_no_batches_is_refused_in_one_line(refused, complaint):
    with pytest.raises(ValueError, match=complaint):
        refused()
