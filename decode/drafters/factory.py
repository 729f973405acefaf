"""The models of a pair as a loop runs them, and the decoders that share them."""

from collections.abc import Callable
from functools import cached_property, partial

from transformers import PreTrainedModel

from configs.schema import PairConfig
from decode.drafters.pearl import PearlDecoder
from decode.drafters.trees import Shape, TreeDrafter
from decode.loop.decoder import SpeculativeDecoder
from decode.loop.drafter import Drafter, ModelDrafter
from decode.policies.base import Policy
from lm import CachedModel, Compile, DraftModel, FeatureDraft, Pair, Sampling, feature_model
from lm.features.model import TreeDraft
from lm.features.recorder import FeatureRecorder

Kind = Callable[..., CachedModel]
"""Makes a model with an empty cache: (loaded model, vocab_size, with_hidden) -> model."""


def target_of(
    target: PreTrainedModel,
    drafting: PreTrainedModel | FeatureDraft,
    kind: Kind = CachedModel,
    *,
    vocab_size: int | None,
) -> CachedModel:
    """The model that verifies; it keeps the states that a feature draft reads.

    Args:
        target: loaded.
        drafting: the pair's draft.
        kind: makes the model.
        vocab_size: width that logits are truncated to.

    Raises:
        ValueError: a model that cannot hold a tree, or lacks what the feature draft reads; a feature draft of another
            target.
    """
    if not isinstance(drafting, FeatureDraft):
        return kind(target, vocab_size=vocab_size)
    if not drafting.is_bound_to(target):
        raise ValueError(
            "draft_model is a feature draft of another target; load it with this one, or draft.bind(target)"
        )
    return kind(target, vocab_size=vocab_size, recorder=FeatureRecorder(target, drafting))


def draft_of(
    drafting: PreTrainedModel | FeatureDraft,
    target: CachedModel,
    kind: Kind = CachedModel,
    *,
    with_hidden: bool = False,
) -> DraftModel | TreeDraft:
    """The model that drafts for a target of `target_of`, with logits of the target's width.

    Args:
        drafting: a separate model, or the feature draft that `target` was made for.
        target: verifies.
        kind: class of a separate model.
        with_hidden: keep hidden states, for heads; a feature draft always does.
    """
    if not isinstance(drafting, FeatureDraft):
        return kind(drafting, vocab_size=target.num_logits, with_hidden=with_hidden)
    return feature_model(drafting, target, vocab_size=target.num_logits)


class PairModels:
    """Target, draft and micro of a pair, each made at its first use and shared by all decoders made here, of which only
    one may generate at a time.
    """

    def __init__(
        self,
        pair: Pair | Callable[[], Pair],
        compile: Compile = False,
        *,
        holds_trees: bool = False,
        with_hidden: bool = False,
        kind: Kind | None = None,
    ) -> None:
        """Args:
            pair: loaded, or a function that loads it at the first use of a model.
            compile: `decode.compile`.
            holds_trees: make models that hold trees; they can draft chains too.
            with_hidden: draft and micro keep hidden states, for heads at any level of a hierarchy; False: the draft
                keeps them only for policies with heads.
            kind: class of target and draft, if not the one for `holds_trees` and `compile`.

        Raises:
            ValueError: trees with compilation.
        """
        if holds_trees and compile is not False:
            raise ValueError(f"decode.compile is {compile}, and trees are drafted eagerly; set decode.compile: false")
        self._load = (lambda: pair) if isinstance(pair, Pair) else pair
        self._compile, self._with_hidden = compile, with_hidden
        self._kind = kind or partial(CachedModel, holds_trees=holds_trees, compile=compile)
        self.drafts: dict[bool, DraftModel | TreeDraft] = {}
        """Drafts made so far, by whether they keep hidden states; a feature draft is made once."""

    @cached_property
    def pair(self) -> Pair:
        return self._load()

    @cached_property
    def target(self) -> CachedModel:
        """The model that verifies.

        Raises:
            ValueError: a feature draft with compilation; see `target_of`.
        """
        if isinstance(self.pair.drafting, FeatureDraft) and self._compile is not False:
            raise ValueError(
                f"decode.compile is {self._compile}, and a feature draft runs eagerly; set decode.compile: false"
            )
        return target_of(self.pair.target, self.pair.drafting, self._kind, vocab_size=self.pair.vocab_size)

    def draft_for(self, policy: Policy) -> DraftModel | TreeDraft:
        """The draft, with hidden states if the policy has heads."""
        return self._draft(bool(policy.heads) or self._with_hidden)

    @cached_property
    def draft(self) -> CachedModel:
        """The draft of a hierarchy, a separate model; ValueError for a feature draft."""
        assert self.pair.draft
        made = self._draft(self._with_hidden)
        assert isinstance(made, CachedModel)
        return made

    @cached_property
    def micro(self) -> CachedModel:
        """The smallest model of a hierarchy; ValueError if the config names none."""
        check_micro(self.pair)
        assert self.pair.micro is not None
        return CachedModel(self.pair.micro, vocab_size=self.pair.vocab_size, with_hidden=self._with_hidden)

    def drafter(self, policy: Policy, shape: Shape | None = None, *, read_every: int = 1) -> Drafter:
        """The drafter of a policy, of chains or of trees of this shape."""
        draft = self.draft_for(policy)
        if shape is None:
            return ModelDrafter(draft, policy)  # type: ignore[arg-type]  # a model that drafts trees drafts chains
        return TreeDrafter(draft, policy, shape, read_every=read_every)  # type: ignore[arg-type]

    def decoder(
        self,
        drafter: Drafter,
        *,
        sampling: Sampling,
        max_draft_length: int = 20,
        eos_ids: frozenset[int] | None = None,
    ) -> SpeculativeDecoder:
        """The loop of the pair's target with a drafter on these models; see `SpeculativeDecoder`.

        `eos_ids` None: those of the pair.
        """
        return SpeculativeDecoder(
            self.target,
            drafter,
            sampling=sampling,
            max_draft_length=max_draft_length,
            eos_ids=self.pair.eos_ids if eos_ids is None else eos_ids,
        )

    def pearl(self, gamma: int, *, sampling: Sampling) -> PearlDecoder:
        """PEARL's loop, which drafts `gamma` tokens a step."""
        return PearlDecoder(self.target, self.draft, gamma=gamma, sampling=sampling, eos_ids=self.pair.eos_ids)

    def _draft(self, with_hidden: bool) -> DraftModel | TreeDraft:
        key = with_hidden and not isinstance(self.pair.drafting, FeatureDraft)
        if key not in self.drafts:
            self.drafts[key] = draft_of(self.pair.drafting, self.target, self._kind, with_hidden=key)
        return self.drafts[key]


def check_micro(pair: PairConfig | Pair) -> None:
    """Raise ValueError if there is no micro model."""
    if pair.micro is None:
        raise ValueError(
            "pair.micro is not set, but a hierarchy needs a third model, smaller than the draft; set pair.micro.path"
        )
