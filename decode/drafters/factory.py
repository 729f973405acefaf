"""The loop of a pair: its two models, whichever kind of draft the pair has, and the decoder of chains or of trees that
they make.
"""

from typing import NamedTuple

from decode.drafters.trees.decoder import TreeDecoder
from decode.drafters.trees.drafter import TreeDrafter
from decode.drafters.trees.shapes import Shape
from decode.loop.decoder import SpeculativeDecoder
from decode.loop.drafter import ModelDrafter
from decode.policies.base import Policy
from lm import KINDS, CachedModel, Compile, DraftModel, FeatureDraft, Pair, Sampling, TappedModel, feature_model
from lm.features.stepwise import TreeDraft
from lm.features.taps import TappedTreeModel
from lm.trees.cached import TreeModel


class LoopModels(NamedTuple):
    """Target and draft of a loop. They belong together: a feature draft reads this very target."""

    target: CachedModel
    draft: DraftModel


class TreeModels(NamedTuple):
    """Target and draft of a loop with trees; chains can be drafted with them too."""

    target: TreeModel
    draft: TreeDraft


def loop_models_of(pair: Pair, compile: Compile = False, *, with_hidden: bool = False) -> LoopModels:
    """Both, with empty caches.

    Args:
        pair: loaded.
        compile: as `decode.compile`.
        with_hidden: keep the draft's hidden states, for heads.

    Raises:
        ValueError: a feature draft is to be compiled, or reads what this target does not keep.
    """
    drafting, width = pair.drafting, pair.vocab_size
    if isinstance(drafting, FeatureDraft):
        if compile is not False:
            raise ValueError(
                f"decode.compile is {compile}, and a feature draft runs eagerly; set decode.compile: false"
            )
        target = TappedModel(pair.target, drafting, vocab_size=width)
        return LoopModels(target, feature_model(drafting, target, vocab_size=width))
    kind = KINDS[compile]
    return LoopModels(kind(pair.target, vocab_size=width), kind(drafting, vocab_size=width, with_hidden=with_hidden))


def tree_models_of(pair: Pair, compile: Compile = False, *, with_hidden: bool = False) -> TreeModels:
    """Both, with empty caches; args are those of `loop_models_of`.

    Raises:
        ValueError: trees are to be compiled; a model that cannot hold a tree.
    """
    drafting, width = pair.drafting, pair.vocab_size
    if compile is not False:
        raise ValueError(f"decode.compile is {compile}, and trees are drafted eagerly; set decode.compile: false")
    if isinstance(drafting, FeatureDraft):
        target = TappedTreeModel(pair.target, drafting, vocab_size=width)
        return TreeModels(target, feature_model(drafting, target, vocab_size=width))
    return TreeModels(
        TreeModel(pair.target, vocab_size=width), TreeModel(drafting, vocab_size=width, with_hidden=with_hidden)
    )


def pair_decoder(
    pair: Pair,
    policy: Policy,
    *,
    sampling: Sampling,
    max_draft_length: int,
    shape: Shape | None = None,
    compile: Compile = False,
) -> SpeculativeDecoder:
    """The loop of a pair under one policy, with models of its own.

    Args:
        pair: loaded; its EOS ids end a generation.
        policy: when to stop drafting.
        sampling: of target and draft.
        max_draft_length: upper bound of every round: tokens of a chain, levels of a tree.
        shape: of the trees that are drafted; None: chains.
        compile: as `decode.compile`.

    Raises:
        ValueError: trees or a feature draft are to be compiled, or a model cannot hold a tree.
    """
    with_hidden = bool(policy.heads)
    if shape is None:
        target, draft = loop_models_of(pair, compile, with_hidden=with_hidden)
        drafter = ModelDrafter(draft, policy)
        return SpeculativeDecoder(
            target, drafter, sampling=sampling, max_draft_length=max_draft_length, eos_ids=pair.eos_ids
        )
    models = tree_models_of(pair, compile, with_hidden=with_hidden)
    return TreeDecoder(
        models.target,
        TreeDrafter(models.draft, policy, shape),
        sampling=sampling,
        max_draft_length=max_draft_length,
        eos_ids=pair.eos_ids,
    )
