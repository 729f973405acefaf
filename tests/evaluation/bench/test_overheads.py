"""What the loop spends outside forwards: every forward of a timed generation is in the log."""

import pytest
import torch

from decode import ModelDrafter, SpeculativeDecoder
from decode.policies import FixedLength
from evaluation.bench.overheads import Call, TalliedModel, outside_share
from lm import Sampling
from tests.toys.small_pair import PROMPTS

NUM_TOKENS = 12


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


def test_time_outside_forwards_is_less_than_all_of_it(pair):
    outside = outside_share(pair, PROMPTS[:2], 3, Sampling(), NUM_TOKENS)
    assert outside["wall_s"] > 0
    assert outside["share"] < 1
    assert outside["own_share"] < 1
