"""The one factory of decoders: what the decoders of a pair share, and what it refuses."""

import pytest

from decode import ModelDrafter, PearlDecoder, TreeDrafter
from decode.drafters.factory import PairModels
from decode.drafters.trees import Dynamic
from decode.policies import FixedLength, HeadPolicy
from heads import AcceptanceHead
from lm import Pair, Sampling
from tests.toys.enumeration import seeded
from tests.toys.small_pair import Words, model

GREEDY = Sampling(temperature=0.0)
PROMPT = [3, 1, 4, 1, 5]


@pytest.fixture(scope="module")
def pair() -> Pair:
    return Pair(model(1, 2), model(2), model(3), Words())


def test_nothing_is_loaded_before_a_model_is_asked_for(pair):
    loaded = []
    models = PairModels(lambda: loaded.append(pair) or pair)
    assert not loaded
    assert models.target.model is pair.target
    assert models.micro.model is pair.micro
    assert len(loaded) == 1


def test_decoders_share_the_target_and_the_draft_with_or_without_hidden_states(pair):
    models = PairModels(pair)
    head = HeadPolicy(AcceptanceHead(models.target.hidden_size, 0, "drawn"), 0.5)
    policies = FixedLength(2), FixedLength(3), head
    decoders = [models.decoder(models.drafter(policy), sampling=GREEDY) for policy in policies]
    plain, other, scored = (decoder.drafter.model for decoder in decoders)
    assert len({id(decoder.target) for decoder in decoders}) == 1
    assert plain is other
    assert plain is not scored
    assert (plain.with_hidden, scored.with_hidden) == (False, True)
    assert models.draft is plain
    assert decoders[0].eos_ids == pair.eos_ids


def test_chains_trees_and_pearl_write_what_the_target_says(pair):
    models, trees = PairModels(pair), PairModels(pair, holds_trees=True)
    tree = trees.drafter(FixedLength(3), Dynamic(width=2, num_nodes=4))
    drafters = models.drafter(FixedLength(3)), trees.drafter(FixedLength(3)), tree, models.drafter(FixedLength(0))
    assert [type(drafter) for drafter in drafters] == [ModelDrafter, ModelDrafter, TreeDrafter, ModelDrafter]
    pairs = zip((models, trees, trees, models), drafters, strict=True)
    decoders = [made.decoder(drafter, sampling=GREEDY, eos_ids=frozenset()) for made, drafter in pairs]
    written = [decoder.generate(PROMPT, 12).token_ids for decoder in decoders]
    assert written == [written[-1]] * 4
    pearl = (
        PearlDecoder(models.target, models.draft, gamma=2, sampling=GREEDY)
        .generate(PROMPT, 12, generator=seeded())
        .token_ids
    )
    assert pearl == written[0][: len(pearl)]
    with pytest.raises(ValueError, match="drafted eagerly"):
        PairModels(pair, "stop", holds_trees=True)
