"""Trees of feature drafts (EAGLE-2's, CaPE's on GliDe): greedy equals plain generation, the sampled law is exact,
features stay aligned.
"""

import pytest
import torch

from decode.drafters.trees import Cape, Dynamic, TreeDrafter
from decode.loop.decoder import SpeculativeDecoder
from decode.policies import CumulativeTokenProb, FixedLength, Policy
from lm import CachedModel, Sampling, feature_model
from lm.features.recorder import FeatureRecorder
from tests.cases import first_fast
from tests.decode.features.test_chains import PROMPT, greedy, target_law
from tests.toys.enumeration import assert_same_law, law_of
from tests.toys.loop import SAMPLINGS
from tests.toys.random_drafts import draft, target

SHAPES = {
    "eagle": Dynamic(3, 12),
    "eagle3": Dynamic(3, 8),
    "reduced": Dynamic(2, 4),
    "layers": Dynamic(2, 6),
    "glide": Cape(((0.5, 3), (1.0, 2))),
}


def tree_decoder_of(kind: str, policy: Policy, sampling: Sampling) -> SpeculativeDecoder:
    tapped = CachedModel(target(), recorder=FeatureRecorder(target(), draft(kind)), holds_trees=True)
    drafter = TreeDrafter(feature_model(draft(kind), tapped), policy, SHAPES[kind])
    return SpeculativeDecoder(tapped, drafter, sampling=sampling, eos_ids=frozenset())


@pytest.mark.parametrize("kind", first_fast(SHAPES))
def test_greedy_output_of_trees_equals_transformers_generate(kind):
    for policy in (FixedLength(3), CumulativeTokenProb(0.2)):
        decoder = tree_decoder_of(kind, policy, Sampling(temperature=0))
        generation = decoder.generate(PROMPT, 40)
        assert list(generation.token_ids) == greedy(40)
        assert 0 < generation.counts.num_accepted < generation.counts.num_drafted


@pytest.mark.parametrize("kind", SHAPES)
def test_after_trees_the_draft_reads_what_it_reads_of_a_fresh_sequence(kind):
    decoder = tree_decoder_of(kind, FixedLength(3), Sampling(temperature=0))
    text = [*PROMPT, *decoder.generate(PROMPT, 20).token_ids]
    fresh = CachedModel(target(), recorder=FeatureRecorder(target(), draft(kind)), holds_trees=True)
    fresh.feed(text[:-1])
    assert decoder.target.recorder.num_features == len(decoder.target) == len(text) - 1
    if kind != "glide":
        torch.testing.assert_close(
            decoder.target.recorder.features(0, len(text) - 1),
            fresh.recorder.features(0, len(text) - 1),
            rtol=0,
            atol=1e-8,
        )
    model = feature_model(draft(kind), fresh)
    used = decoder.drafter.model
    torch.testing.assert_close(used.feed(text[len(used) :]), model.feed(text), rtol=0, atol=1e-8)


def test_the_sampled_law_of_trees_is_the_target_s_exactly():
    sampling = SAMPLINGS["top_k"]
    decoder = tree_decoder_of("reduced", FixedLength(2), sampling)
    law = law_of(lambda draws: decoder.generate(PROMPT, 4, generator=draws).token_ids)
    assert_same_law(law, target_law(sampling, 4), tolerance=1e-10)
