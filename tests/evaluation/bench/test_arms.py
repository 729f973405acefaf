"""Arms write the same number of tokens, transformers under its schedules; batches are counted on a clock."""

from itertools import product

import pytest
from transformers.generation.candidate_generator import AssistedCandidateGenerator

from decode.loop.batch import BatchRound
from decode.policies import FixedLength, TokenProb
from decode.policies.auto import Auto
from decode.policies.batch import BatchAuto
from evaluation.bench import batch_sizes
from evaluation.bench.arms import HEURISTICALLY, assisted, constant
from evaluation.bench.batch_sizes import curves_of, measure_sizes, size_table, size_verdict
from evaluation.costs.measure import Loop
from evaluation.gain import Gain
from evaluation.sources.clock import generations_of
from heads import AcceptanceHead
from lm import Sampling
from tests.toys.small_pair import EOS, PROMPTS

NUM_TOKENS = 12
SAMPLINGS = [Sampling(temperature=0.0), Sampling(), Sampling(temperature=0.7, top_p=0.9)]


def loop_of(pair, sampling):
    return Loop(pair=pair, prompts=PROMPTS[:2], sampling=sampling, max_draft_length=5, max_new_tokens=NUM_TOKENS)


def emitted(arm):
    """Number of tokens of one generation, whose first token is there before its last one."""
    run = arm((PROMPTS[0], NUM_TOKENS, 0))
    assert 0 < run.first_token_s <= run.whole_s
    return run.counts.num_emitted


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
        assert emitted(generations_of(loop.decoder(policy))) == NUM_TOKENS
    for changes in (None, {}, HEURISTICALLY, constant(3)):
        assert emitted(assisted(pair, sampling, changes)) == NUM_TOKENS
    assert [each.generation_config.to_dict() for each in (pair.target, pair.draft)] == before
    assert pair.target.generation_config.eos_token_id == EOS
    pair.target.generation_config.eos_token_id = list(range(pair.vocab_size))
    for ends_at_eos, num_tokens in ((True, 1), (False, NUM_TOKENS)):
        assert emitted(assisted(pair, sampling, None, ends_at_eos=ends_at_eos)) == num_tokens
    pair.target.generation_config.eos_token_id = EOS


def test_the_default_schedule_is_transformers_own_and_the_heuristic_keeps_what_it_has_learnt(pair, settings_used):
    assisted(pair, SAMPLINGS[2], {})((PROMPTS[0], NUM_TOKENS, 0))
    (default,) = settings_used
    assert (default["threshold"], default["schedule"], default["most"][0]) == (0.4, "constant", 20)
    assert (default["temperature"], default["top_p"], default["eos"]) == (0.7, 0.9, None)
    timed = assisted(pair, Sampling(), HEURISTICALLY)
    other = assisted(pair, Sampling(), constant(2))
    timed((PROMPTS[0], NUM_TOKENS, 0))
    assert pair.draft.generation_config.num_assistant_tokens is None
    other((PROMPTS[0], NUM_TOKENS, 0))
    timed((PROMPTS[1], NUM_TOKENS, 1))
    _, first, between, second = settings_used
    assert first["threshold"] == 0.4
    assert set(between["most"]) == {2}, "a constant schedule drafts so many tokens"
    assert not between["threshold"]
    assert abs(second["most"][0] - first["most"][-1]) <= 2
    assert second["most"][0] != 20


def test_every_policy_has_a_row_at_every_size_and_auto_runs_with_the_curves_of_batches(pair, monkeypatch):
    ran, generations_of = [], batch_sizes._arm_of

    def watched(loop, policy, size, rounds):
        decode = generations_of(loop, policy, size, rounds)

        def written(seed):
            ran.append((policy, decode(seed)))
            return ran[-1][1]

        return written

    monkeypatch.setattr(batch_sizes, "_arm_of", watched)
    loop = Loop(pair=pair, prompts=[[1, 2], [3, 4, 5]], sampling=Sampling(), max_draft_length=4, max_new_tokens=6)
    auto = Auto(AcceptanceHead(pair.draft.config.hidden_size, 0, "drawn", scalars=True), 1.0, 2.0)
    policies = {"none": FixedLength(0), "two": FixedLength(2), "own": TokenProb(0.4), "auto": auto}
    rows, curves = measure_sizes(loop, policies, [1, 3])
    assert [(row["batch_size"], row["policy"]) for row in rows] == list(product((1, 3), policies))
    for size in (1, 3):
        fixed = [row for row in rows if row["batch_size"] == size and row["policy"] in ("none", "two")]
        assert max(row["against_fixed"] for row in fixed) >= 1.0
        assert all(row["gain"].low <= row["gain"].value <= row["gain"].high for row in fixed), "intervals over turns"
    assert len(size_table(rows).rows) == 4
    speeds = {"none": 90.0, "two": 100.0, "own": 110.0, "auto": 1.0}
    gain = {"gain": Gain(0.1, 0.05, 0.15, None)}
    made = [row | gain | {"tokens_per_s": speeds[row["policy"]]} for row in rows]
    sentence = "In batches of 3, own is faster than the best fixed length by more than noise, +10.0 % (5.0, 15.0)."
    assert size_verdict(made).endswith(sentence)
    assert curves.draft.seconds[0] > 0
    rules = [policy for policy, _ in ran if isinstance(policy, BatchAuto)]
    assert len(rules) == 8
    assert all(rule.costs.draft(3) < 1.0 for rule in rules)  # seconds: a toy takes less than the 1 that it began with
    # two requests a row, each written to its end, which no EOS brings
    assert {run.counts.num_emitted for _, run in ran} == {2 * size * 6 for size in (1, 3)}


def test_curves_leave_out_rounds_that_read_prompts_and_never_fall():
    rounds = [
        BatchRound((4, 4), 12, 5, 0.4, 2.0, 0),
        BatchRound((2, 2, 2), 8, 5, 0.3, 1.0, 0),
        BatchRound((2, 1), 7, 5, 9.0, 1.2, 0),
        BatchRound((4, 4), 12, 5, 9.0, 9.0, 1),
    ]
    curves = curves_of(rounds)
    assert (curves.draft.numbers, curves.draft.seconds) == ((2.0, 4.0), pytest.approx((0.1, 0.2)))
    assert curves.target.numbers == (7.0, 8.0, 12.0)
    assert curves.target.seconds == pytest.approx((1.1, 1.1, 2.0))
    with pytest.raises(ValueError, match="drafted with all"):
        curves_of(rounds[2:])
