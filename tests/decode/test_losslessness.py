"""The output of the real loop has exactly the target's law (laws 4.2, 4.3), for every policy, sampling and ending."""

from enumeration import ToyModel, assert_same_law, law_of

from decode import ModelDrafter, SpeculativeDecoder, policies
from lm import Sampling

PROMPT = [0, 1]


def test_fixed_length_preserves_the_target_law():
    target, draft = ToyModel(1), ToyModel(2)
    decoder = SpeculativeDecoder(target, ModelDrafter(draft, policies.FixedLength(2)), eos_ids=frozenset({2}))
    law = law_of(lambda draws: decoder.generate(PROMPT, 3, generator=draws).token_ids)
    assert_same_law(law, target.law(PROMPT, 3, sampling=Sampling(), eos_ids=frozenset({2})))
