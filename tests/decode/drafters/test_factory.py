"""The one factory of decoders: what the decoders of a pair share, and what it refuses."""

from decode import ModelDrafter, TreeDrafter
from decode.drafters.factory import PairModels
from decode.drafters.trees import dynamic
from decode.policies import FixedLength, HeadPolicy
from heads import AcceptanceHead
from lm import Pair, Sampling
from tests.toys.small_pair import Words, model


def test_decoders_share_the_models_of_a_pair_which_is_loaded_at_its_use():
    pair, loaded = Pair(model(1, 2), model(2), model(3), Words()), []
    models = PairModels(lambda: loaded.append(pair) or pair)
    assert not loaded
    head = HeadPolicy(AcceptanceHead(models.target.hidden_size, 0, "drawn"), 0.5)
    policies = FixedLength(2), FixedLength(3), head
    decoders = [models.decoder(models.drafter(policy), sampling=Sampling()) for policy in policies]
    plain, other, scored = (decoder.drafter.model for decoder in decoders)
    assert len({id(decoder.target) for decoder in decoders}) == len(loaded) == 1
    assert plain is other is models.draft
    assert (plain.with_hidden, scored.with_hidden) == (False, True)
    assert (models.target.model, models.micro.model) == (pair.target, pair.micro)
    assert decoders[0].eos_ids == pair.eos_ids
    trees = PairModels(pair, holds_trees=True)
    tree, chain = trees.drafter(FixedLength(3), dynamic(width=2, num_nodes=4)), trees.drafter(FixedLength(3))
    assert (type(tree), type(chain), tree.model) == (TreeDrafter, ModelDrafter, chain.model)
