"""The one factory of decoders: what the decoders of a pair share, and what it refuses."""

import pytest

from decode import ModelDrafter, TreeDrafter
from decode.drafters.factory import PairModels
from decode.drafters.trees import Dynamic
from decode.policies import FixedLength, HeadPolicy
from heads import AcceptanceHead
from lm import Pair, Sampling
from tests.toys.small_pair import Words, model

GREEDY = Sampling(temperature=0.0)
PROMPT = [3, 1, 4, 1, 5]


@pytest.fixture(scope="module")
def pair() -> Pair:
    return Pair(model(1, 2), model(2), model(3), Words())


def test_decoders_share_the_target_and_the_draft_with_or_without_hidden_states_and_a_pair_is_loaded_at_its_use(pair):
    loaded = []
    models = PairModels(lambda: loaded.append(pair) or pair)
    assert not loaded
    head = HeadPolicy(AcceptanceHead(models.target.hidden_size, 0, "drawn"), 0.5)
    policies = FixedLength(2), FixedLength(3), head
    decoders = [models.decoder(models.drafter(policy), sampling=GREEDY) for policy in policies]
    plain, other, scored = (decoder.drafter.model for decoder in decoders)
    assert len({id(decoder.target) for decoder in decoders}) == 1
    assert plain is other
    assert plain is not scored
    assert (plain.with_hidden, scored.with_hidden) == (False, True)
    assert models.draft is plain
    assert (models.target.model, models.micro.model) == (pair.target, pair.micro)
    assert len(loaded) == 1
    assert decoders[0].eos_ids == pair.eos_ids


def test_one_pair_drafts_chains_and_trees_but_compiles_no_trees(pair):
    trees = PairModels(pair, holds_trees=True)
    tree, chain = trees.drafter(FixedLength(3), Dynamic(width=2, num_nodes=4)), trees.drafter(FixedLength(3))
    assert (type(tree), type(chain), tree.model) == (TreeDrafter, ModelDrafter, chain.model)
    written = [trees.decoder(each, sampling=GREEDY).generate(PROMPT, 12).token_ids for each in (tree, chain)]
    assert written[0] == written[1]
    with pytest.raises(ValueError, match="drafted eagerly"):
        PairModels(pair, "stop", holds_trees=True)
