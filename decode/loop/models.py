"""Models as a loop runs them: the one module that wraps them, with one rule for each thing that a wrapper decides.

vocabulary        a bare model's logits are cut to `vocab_size`; a wrapped model keeps its own (`Session.take` refuses
                  one that does not fit)
trees             a bare model is made to hold them if they are needed; a wrapped one must hold them
hidden states     are kept from now on if they are needed, by either
"""

from collections.abc import Callable
from typing import Any

from transformers import PreTrainedModel

from lm import CachedModel, DraftModel, FeatureDraft, FeatureModel, feature_model
from lm.features.recorder import FeatureRecorder

Drafting = PreTrainedModel | FeatureDraft | CachedModel  # of the last, the caller keeps the cache
ModelClass = Callable[..., CachedModel]  # makes a model with an empty cache, called as `CachedModel`


def cached(
    model: PreTrainedModel | DraftModel,
    needed_by: object,
    *,
    vocab_size: int | None,
    with_hidden: bool = False,
    holds_trees: bool = False,
) -> Any:
    """The model, wrapped in a `CachedModel` if it is a `PreTrainedModel`. ValueError, which names the class of
    `needed_by`, for a wrapped model that holds no trees, or one that lacks the hidden states that are needed.
    """
    if isinstance(model, PreTrainedModel):
        model = CachedModel(model, vocab_size=vocab_size, holds_trees=holds_trees)
    if holds_trees and not model.holds_trees:
        raise ValueError(f"a {type(needed_by).__name__} needs models that hold trees; pass holds_trees=True to each")
    if with_hidden and not isinstance(model, FeatureModel) and not model.with_hidden:
        model.keep_hidden()
    return model


def target_of(
    target: PreTrainedModel, drafting: Drafting, model_class: ModelClass = CachedModel, *, vocab_size: int | None
) -> CachedModel:
    """The model that verifies, with what a feature draft reads of it; ValueError for a draft of another target."""
    if not isinstance(drafting, FeatureDraft):
        return model_class(target, vocab_size=vocab_size)
    if not drafting.is_bound_to(target):
        raise ValueError("draft_model is a draft of another target; load it with this one, or draft.bind(target)")
    return model_class(target, vocab_size=vocab_size, recorder=FeatureRecorder(target, drafting))


def draft_of(
    drafting: Drafting, target: CachedModel, model_class: ModelClass = CachedModel
) -> CachedModel | FeatureModel:
    """The model that drafts for a target of `target_of`: a `CachedModel` itself. Its drafter makes it keep what heads
    read.
    """
    if isinstance(drafting, CachedModel):
        return drafting
    if isinstance(drafting, FeatureDraft):
        return feature_model(drafting, target, vocab_size=target.num_logits)
    return model_class(drafting, vocab_size=target.num_logits)
