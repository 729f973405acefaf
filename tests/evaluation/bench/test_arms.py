"""All arms write the same number of tokens; transformers runs under its schedules, and its configs are restored."""

import pytest
import torch
from transformers.generation.candidate_generator import AssistedCandidateGenerator

from decode import SpeculativeDecoder
from decode.policies import FixedLength, TokenProb
from evaluation.bench.arms import HEURISTICALLY, assisted, constant, generations_of
from evaluation.costs.measure import Loop
from lm import Sampling
from tests.toys.small_pair import EOS, PROMPTS

NUM_TOKENS = 12
SAMPLINGS = [Sampling(temperature=0.0), Sampling(), Sampling(temperature=0.7, top_p=0.9)]


def loop_of(pair, sampling):
    return Loop(pair=pair, prompts=PROMPTS[:2], sampling=sampling, max_draft_length=5, max_new_tokens=NUM_TOKENS)


@pytest.fixture
def settings_used(monkeypatch):
    """Per generation of transformers: its settings and warpers, and how many tokens each draft may have."""
    generations = []
    prepare, limit = AssistedCandidateGenerator.__init__, AssistedCandidateGenerator._calculate_new_tokens

    def watched(self, *arguments, **settings):
        prepare(self, *arguments, **settings)
        draft, target = self.assistant_generation_config, self.generation_config
        schedule = {"schedule": draft.num_assistant_tokens_schedule, "threshold": draft.assistant_confidence_threshold}
        sampled = {"eos": target.eos_token_id, "temperature": target.temperature, "top_p": target.top_p}
        generations.append(schedule | sampled | {"most": []})

    def limited(self, ids):
        generations[-1]["most"].append(int(self.num_assistant_tokens))
        return limit(self, ids)

    monkeypatch.setattr(AssistedCandidateGenerator, "__init__", watched)
    monkeypatch.setattr(AssistedCandidateGenerator, "_calculate_new_tokens", limited)
    return generations


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_every_arm_writes_the_same_number_of_tokens_and_restores_the_models_configs(pair, sampling):
    before = [each.generation_config.to_dict() for each in (pair.target, pair.draft)]
    loop = loop_of(pair, sampling)
    for policy in (FixedLength(0), FixedLength(3), TokenProb(0.3)):
        assert generations_of(loop.decoder(policy), NUM_TOKENS)(PROMPTS[0], 0)[0] == NUM_TOKENS
    for changes in (None, {}, HEURISTICALLY, constant(3)):
        assert assisted(pair, NUM_TOKENS, sampling, changes)(PROMPTS[0], 0)[0] == NUM_TOKENS
    assert [each.generation_config.to_dict() for each in (pair.target, pair.draft)] == before
    assert pair.target.generation_config.eos_token_id == EOS


def test_the_default_schedule_is_what_transformers_does_where_nothing_is_set(pair, settings_used):
    assisted(pair, NUM_TOKENS, SAMPLINGS[2], {})(PROMPTS[0], 0)
    assert settings_used[0]["threshold"] == 0.4
    assert settings_used[0]["schedule"] == "constant"
    assert settings_used[0]["most"][0] == 20
    assert (settings_used[0]["temperature"], settings_used[0]["top_p"], settings_used[0]["eos"]) == (0.7, 0.9, None)


def test_the_heuristic_keeps_its_threshold_and_what_it_has_learnt_between_other_arms(pair, settings_used):
    timed = assisted(pair, NUM_TOKENS, Sampling(), HEURISTICALLY)
    other = assisted(pair, NUM_TOKENS, Sampling(), constant(2))
    timed(PROMPTS[0], 0)
    learnt = pair.draft.generation_config.num_assistant_tokens
    other(PROMPTS[0], 0)
    timed(PROMPTS[1], 1)
    first, between, second = settings_used
    assert first["threshold"] == 0.4
    assert learnt is None
    assert set(between["most"]) == {2}, "a constant schedule drafts so many tokens"
    assert not between["threshold"]
    assert abs(second["most"][0] - first["most"][-1]) <= 2
    assert second["most"][0] != 20


def test_arms_of_one_prompt_start_from_one_seed(pair, monkeypatch):
    loop, drawn = loop_of(pair, Sampling()), []
    generate = SpeculativeDecoder.generate

    def watched(self, *arguments, generator):
        drawn.append(torch.rand(1, generator=generator.clone_state()).item())
        return generate(self, *arguments, generator=generator)

    monkeypatch.setattr(SpeculativeDecoder, "generate", watched)
    for seed, prompt in enumerate(PROMPTS[:2]):
        for k in (2, 4):
            generations_of(loop.decoder(FixedLength(k)), NUM_TOKENS)(prompt, seed)
    assert drawn[::2] == drawn[1::2]
    assert len(set(drawn)) == 2
