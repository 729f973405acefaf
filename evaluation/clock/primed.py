"""Models that start a generation with its prompt in their caches, so that a clock around it reads no prompt.

Law 4.5 holds as ever: after `prime(prompt)` the cache holds prompt[:-1], which is a prefix of committed[:-1] in every
generation from this prompt, and `reset` goes back to that in place of nothing. Generations from another prompt need
another `prime`. Beside a feature draft nothing is primed: its first round is the target's reading of the prompt, which
the clock then has in it, for every policy alike.
"""

from collections.abc import Sequence

from decode.loop.decoder import SpeculativeDecoder
from decode.loop.drafter import ModelDrafter
from decode.loop.models import models_of
from decode.policies.base import Policy
from lm import CachedModel, Compile, CompiledModel, CompiledTailModel, DraftModel, FeatureDraft, Pair, Sampling


class PrimedModel(CachedModel):
    """A `CachedModel` whose `reset` keeps the prompt."""

    _num_primed = 0

    def prime(self, prompt_ids: Sequence[int]) -> None:
        """Read all of the prompt but its last token; sequences start from there until the next call."""
        self._num_primed = 0
        self.reset()
        if len(prompt_ids) > 1:
            self.forward(prompt_ids[:-1])
        self._num_primed = len(prompt_ids) - 1

    def reset(self) -> None:
        """Back to the prompt."""
        if self._num_primed:
            self.roll_back(self._num_primed)
        else:
            super().reset()


class PrimedCompiledModel(PrimedModel, CompiledModel):
    """The same of a `CompiledModel`."""

    def _grow(self, length: int) -> None:
        self._num_primed = 0  # a larger cache is a new one: what it held is fed again
        super()._grow(length)


class PrimedCompiledTailModel(PrimedModel, CompiledTailModel):
    """The same of a `CompiledTailModel`."""


_KINDS: dict[Compile, type[PrimedModel]] = {
    False: PrimedModel,
    "stop": PrimedCompiledTailModel,
    True: PrimedCompiledModel,
}


class PrimedLoop:
    """The loop of a config, eager or compiled, for several policies that take turns on one prompt."""

    def __init__(self, pair: Pair, sampling: Sampling, *, max_draft_length: int, compile: Compile) -> None:
        self._pair, self._sampling, self._max_draft_length = pair, sampling, max_draft_length
        self._kind = _KINDS[compile]
        self._drafts: dict[bool, DraftModel] = {}
        """Drafts by whether they keep hidden states."""
        if isinstance(pair.drafting, FeatureDraft):
            self._target, draft = models_of(pair, compile)
            self._drafts = {False: draft, True: draft}
        else:
            self._target = self._kind(pair.target, vocab_size=pair.vocab_size)

    def decoder(self, policy: Policy) -> SpeculativeDecoder:
        """For one policy; models are shared."""
        with_hidden = bool(policy.heads)
        if with_hidden not in self._drafts:
            self._drafts[with_hidden] = self._kind(
                self._pair.draft, vocab_size=self._pair.vocab_size, with_hidden=with_hidden
            )
        return SpeculativeDecoder(
            self._target,
            ModelDrafter(self._drafts[with_hidden], policy),
            sampling=self._sampling,
            max_draft_length=self._max_draft_length,
            eos_ids=self._pair.eos_ids,
        )

    def prime(self, prompt_ids: Sequence[int]) -> None:
        """Set the text that every decoder starts from next."""
        for model in (self._target, *self._drafts.values()):
            if isinstance(model, PrimedModel):
                model.prime(prompt_ids)
