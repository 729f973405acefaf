"""`decode bench`: every arm writes the same number of tokens, every forward of a timed generation is in the log, and ratios are medians."""

import pytest
import torch
from small_pair import EOS, PROMPTS, VOCAB, model
from transformers import PreTrainedTokenizerBase

from decode import ModelDrafter, SpeculativeDecoder
from decode.bench.generations import Arms, Call, TalliedModel, _fixed_length, median_ratio, outside_share, timed_in_turns
from decode.costs.measure import head_cost
from decode.policies import FixedLength
from heads import AcceptanceHead
from lm import Pair, Sampling

NUM_TOKENS = 12


class Words(PreTrainedTokenizerBase):
    """As many ids as the pair has logits."""

    def __len__(self) -> int:
        return VOCAB

    def get_vocab(self) -> dict[str, int]:
        return {str(token): token for token in range(VOCAB)}


@pytest.fixture
def pair() -> Pair:
    return Pair(model(1, 2), model(2), None, Words())


@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("is_unread", [False, True])
def test_the_log_holds_every_forward_of_a_generation(pair, k, is_unread):
    log: list[Call] = []
    drafter = ModelDrafter(TalliedModel("draft", pair, log), FixedLength(k))
    drafter.is_unread = is_unread  # as on an accelerator, where drafted tokens are fed without a word to the host
    decoder = SpeculativeDecoder(TalliedModel("target", pair, log), drafter, max_draft_length=k, eos_ids=frozenset())
    counts = decoder.generate(PROMPTS[0], NUM_TOKENS, generator=torch.Generator().manual_seed(0)).counts
    assert counts.num_draft_forwards > 0
    assert sum(call.name == "draft" for call in log) == counts.num_draft_forwards
    assert sum(call.name == "target" for call in log) == counts.num_target
    fed = sum(call.num_fed for call in log if call.name == "target")
    assert fed == len(PROMPTS[0]) + counts.num_drafted + counts.num_target - 1
    lengths = [call.length for call in log if call.name == "draft"]
    assert lengths[:k] == [0, *range(len(PROMPTS[0]), len(PROMPTS[0]) + k - 1)]


def test_every_arm_writes_the_same_number_of_tokens_and_leaves_the_models_as_they_were(pair, monkeypatch):
    lengths = []
    generate = SpeculativeDecoder.generate

    def watched(self, *arguments, **settings):
        generation = generate(self, *arguments, **settings)
        lengths.append(len(generation.token_ids))
        return generation

    monkeypatch.setattr(SpeculativeDecoder, "generate", watched)
    before = [each.generation_config.to_dict() for each in (pair.target, pair.draft)]
    arms = Arms(pair, NUM_TOKENS)
    for sampling in (Sampling(temperature=0.0), Sampling()):
        for k in (0, 3):
            assert arms.ours(PROMPTS[0], k, sampling) > 0
            assert arms.assisted(PROMPTS[0], k, sampling) > 0  # asserts its own length
    assert lengths == [NUM_TOKENS] * 4
    assert [each.generation_config.to_dict() for each in (pair.target, pair.draft)] == before


def test_assisted_generation_drafts_a_fixed_length_and_no_eos_ends_it(pair):
    with _fixed_length(pair, 3):
        assert pair.draft.generation_config.num_assistant_tokens == 3
        assert pair.draft.generation_config.num_assistant_tokens_schedule == "constant"
        assert pair.target.generation_config.eos_token_id is None
    assert pair.target.generation_config.eos_token_id == EOS


def test_greedy_generations_of_one_pair_never_differ_from_themselves(pair, monkeypatch):
    arms = Arms(pair, NUM_TOKENS)
    decoder_of = arms._decoder
    monkeypatch.setattr(arms, "_decoder", lambda k, sampling, *, is_compiled: decoder_of(k, sampling, is_compiled=False))
    assert arms.num_differing(PROMPTS[:2], 3) == 0


def test_time_outside_forwards_is_less_than_all_of_it(pair):
    outside = outside_share(pair, PROMPTS[:2], 3, Sampling(), NUM_TOKENS)
    assert outside.wall_s > 0
    assert outside.share < 1
    assert outside.own_share < 1


def test_what_a_head_adds_is_measured_beside_a_step_without_it(pair):
    step_s, head_s = head_cost(pair, AcceptanceHead(16, 1), PROMPTS[0], num_steps=2, repeats=3)
    assert step_s > 0
    assert head_s > -step_s


def test_arms_take_turns_after_one_turn_that_is_not_measured():
    played = []
    arms = [lambda prompt, name=name: played.append((name, prompt[0])) or float(prompt[0]) for name in "ab"]
    assert timed_in_turns(arms, [[1], [2]]) == [[1.0, 2.0], [1.0, 2.0]]
    assert played == [("a", 1), ("b", 1), ("a", 1), ("b", 1), ("a", 2), ("b", 2)]


def test_a_ratio_is_the_median_over_prompts():
    assert median_ratio([2.0, 30.0, 8.0], [1.0, 10.0, 2.0]) == 3.0
