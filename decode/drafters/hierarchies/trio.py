"""Target, draft and micro of a hierarchy, loaded when they are first needed: what is already decoded is read without
them.
"""

from collections.abc import Callable
from functools import cached_property

from decode.experiment import check_micro
from lm import CachedModel, Pair


class Trio:
    """Three cached models on one pair; drafters that take turns may share them."""

    def __init__(self, load: Callable[[], Pair], *, with_hidden: bool = False) -> None:
        """Args:
        load: the pair, called at most once.
        with_hidden: micro and draft keep hidden states, which heads read.
        """
        self._load, self._with_hidden = load, with_hidden

    @cached_property
    def pair(self) -> Pair:
        return self._load()

    @cached_property
    def target(self) -> CachedModel:
        return CachedModel(self.pair.target, vocab_size=self.pair.vocab_size)

    @cached_property
    def draft(self) -> CachedModel:
        return CachedModel(self.pair.draft, vocab_size=self.pair.vocab_size, with_hidden=self._with_hidden)

    @cached_property
    def micro(self) -> CachedModel:
        """Raises ValueError where the config names none."""
        check_micro(self.pair)
        assert self.pair.micro is not None
        return CachedModel(self.pair.micro, vocab_size=self.pair.vocab_size, with_hidden=self._with_hidden)
