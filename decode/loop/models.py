"""The two models of a loop, target and draft, whichever kind of draft the pair has: a model of its own, or one that
reads the target.
"""

from typing import NamedTuple

from lm import KINDS, CachedModel, Compile, DraftModel, FeatureDraft, Pair, TappedModel, feature_model


class Models(NamedTuple):
    """The models that a `SpeculativeDecoder` and its `ModelDrafter` share. They belong together: a feature draft reads
    this very target.
    """

    target: CachedModel
    draft: DraftModel


def models_of(pair: Pair, compile: Compile = False, *, with_hidden: bool = False) -> Models:
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
        return Models(target, feature_model(drafting, target, vocab_size=width))
    kind = KINDS[compile]
    return Models(kind(pair.target, vocab_size=width), kind(drafting, vocab_size=width, with_hidden=with_hidden))
