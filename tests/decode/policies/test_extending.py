"""The policy that docs/extending.md adds is made by its name, keeps the output law and stops where it says."""

import torch

from decode.policies.registry import POLICIES, parse_policy
from lm import Sampling
from tests.toys.enumeration import ToyModel, assert_same_law
from tests.toys.extending import added_to
from tests.toys.loop import PROMPT, decoder_of, law


def test_the_policy_of_the_page_is_made_by_its_name_keeps_the_law_and_stops():
    with added_to(POLICIES, "POLICIES"):
        policy = parse_policy("unsure:min_token_prob=0.35,max_entropy=1.0")
    decoder = decoder_of(policy, eos_ids=(2,))
    expected = ToyModel(1).law(PROMPT, 3, sampling=Sampling(), eos_ids=decoder.eos_ids)
    assert_same_law(law(decoder, 3), expected)
    endless = decoder_of(policy, eos_ids=())
    rounds = endless.generate(PROMPT, 60, generator=torch.Generator().manual_seed(0)).rounds[:-3]
    assert len({len(played.drafted) for played in rounds}) > 1
