"""The models of a pair as a loop runs them, and the decoders that share them."""

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

from decode.drafters.trees import Shape, TreeDrafter
from decode.loop.decoder import SpeculativeDecoder
from decode.loop.drafter import Drafter, ModelDrafter
from decode.loop.models import ModelClass, draft_of, target_of
from decode.policies.base import Policy
from lm import CachedModel, FeatureDraft, FeatureModel, Pair, Sampling


class PairModels:
    """Models of a pair, each made at its first use and shared by all decoders, of which one may generate at a time."""

    def __init__(
        self,
        pair: Pair | Callable[[], Pair],
        *,
        holds_trees: bool = False,
        model_class: ModelClass | None = None,
    ) -> None:
        """Args:
        pair: loaded, or a function that loads it at the first use of a model.
        holds_trees: make models that hold trees; they can draft chains too.
        model_class: class of target and draft, if not the one for `holds_trees`.
        """
        self._load = (lambda: pair) if isinstance(pair, Pair) else pair
        self._model_class = model_class or partial(CachedModel, holds_trees=holds_trees)
        self.drafts: dict[bool, CachedModel | FeatureModel] = {}
        """Drafts made so far, by whether they keep hidden states, which a feature draft always does."""

    @cached_property
    def pair(self) -> Pair:
        return self._load()

    @cached_property
    def target(self) -> CachedModel:
        """The model that verifies; ValueError for a feature draft of another target."""
        return target_of(self.pair.target, self.pair.drafting, self._model_class, vocab_size=self.pair.vocab_size)

    def draft_for(self, policy: Policy) -> Any:
        """The draft, with hidden states if the policy has heads."""
        key = bool(policy.heads) or isinstance(self.pair.drafting, FeatureDraft)
        if key not in self.drafts:
            self.drafts[key] = draft_of(self.pair.drafting, self.target, self._model_class)
        return self.drafts[key]

    @cached_property
    def draft(self) -> CachedModel:
        """The draft of a hierarchy, a separate model, for which `Experiment` checks the config."""
        assert self.pair.draft
        return self.draft_for(Policy())

    @cached_property
    def micro(self) -> CachedModel:
        """The smallest model of a hierarchy, for which `Experiment` checks the config."""
        assert self.pair.micro is not None
        return CachedModel(self.pair.micro, vocab_size=self.pair.vocab_size)

    def drafter(self, policy: Policy, shape: Shape | None = None, *, read_every: int = 1) -> Drafter:
        """The drafter of a policy, of chains or of trees of this shape."""
        draft = self.draft_for(policy)
        return TreeDrafter(draft, policy, shape, read_every=read_every) if shape else ModelDrafter(draft, policy)

    def decoder(
        self, drafter: Drafter, *, sampling: Sampling, max_draft_length: int = 20, eos_ids: frozenset[int] | None = None
    ) -> SpeculativeDecoder:
        """The loop of the pair's target with a drafter on these models; `eos_ids` None: those of the pair."""
        eos_ids = self.pair.eos_ids if eos_ids is None else eos_ids
        return SpeculativeDecoder(
            self.target, drafter, sampling=sampling, max_draft_length=max_draft_length, eos_ids=eos_ids
        )
