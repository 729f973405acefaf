"""Models that start a generation with its prompt in their caches, so that a clock does not measure its reading.

Law 4.5: after `prime(prompt)` the cache holds prompt[:-1], a prefix of committed[:-1], and `reset` returns to that.
Beside a feature draft nothing is primed: its first round reads the prompt, for every policy alike.
"""

from collections.abc import Sequence
from functools import cached_property, partial

from decode.drafters.factory import PairModels
from evaluation.costs.measure import Loop
from lm import CachedModel


class PrimedModel(CachedModel):
    """A `CachedModel` whose `reset` keeps the prompt."""

    _num_primed = 0

    def prime(self, prompt_ids: Sequence[int]) -> None:
        """Read all of the prompt but its last token; sequences start from there until the next call."""
        self._num_primed = 0
        self.reset()
        if len(prompt_ids) > 1:
            self.feed(prompt_ids[:-1])
        self._num_primed = len(prompt_ids) - 1

    def reset(self) -> None:
        """Go back to the end of the prompt."""
        if self._num_primed:
            self.roll_back(self._num_primed)
        else:
            super().reset()


class PrimedLoop(Loop):
    """The loop of a config, eager or compiled, for several policies that take turns on one prompt."""

    @property
    def eos_ids(self) -> frozenset[int]:
        return self.pair.eos_ids

    def prime(self, prompt_ids: Sequence[int]) -> None:
        """Set the text that every decoder starts from next."""
        for model in (self.models.target, *self.models.drafts.values()):
            if isinstance(model, PrimedModel):
                model.prime(prompt_ids)

    @cached_property
    def models(self) -> PairModels:
        return PairModels(self.pair, self.compile, kind=partial(PrimedModel, compile=self.compile))
