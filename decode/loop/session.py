"""One generation, as its drafters know it: what they share, and the models that serve it alone.

A model's cache holds one sequence, so a generation takes each of its models before it resets them, and keeps them until
it ends. A model that another generation has, that is in train mode, or whose ids do not fit is refused then, before the
first token. The ids fit where

    no distribution has more ids than the narrowest of those that verify it     drafted tokens are looked up in their
        laws
    every model can be fed every id that the target may emit                    what is emitted is fed to all

so a model's distributions may be narrower than the target's, which have zeros there (law 4.2).
"""

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedModel

from lm import CachedModel, DraftModel, GreedySampler, Sampler, Sampling


class Session:
    """State that one generation shares with its drafters. It is open while it is entered."""

    def __init__(
        self, sampling: Sampling, eos_ids: frozenset[int], draws: Sampler, prompt_ids: Sequence[int] = ()
    ) -> None:
        """Args:
        sampling: the one transform of all models.
        eos_ids: tokens that end the generation.
        draws: source of uniforms; at temperature 0 `GreedySampler` takes its place.
        prompt_ids: what every model reads first; each must have an embedding for every one of them.
        """
        self.num_prompt = len(prompt_ids)
        self._prompt_range = min(prompt_ids, default=0), max(prompt_ids, default=0)
        self.sampling, self.eos_ids = sampling, eos_ids
        self.draws = GreedySampler() if sampling.is_greedy else draws
        self.is_open = False
        """Whether the models that it took are its own."""
        self._num_emitted: int | None = None
        """Ids that the target may emit; None where no target was taken."""
        self._num_drafted: int | None = None
        """Ids that all who verified so far have."""

    def __enter__(self) -> "Session":
        self.is_open = True
        return self

    def __exit__(self, *_: object) -> None:
        self.is_open = False

    def take(self, model: DraftModel, role: str, *, verifies: bool = False) -> None:
        """Make a model this generation's own, before it is reset.

        Args:
            model: a model of any level; those that verify come before those whose drafts they verify, the target
                first of all.
            role: name of the model in messages.
            verifies: whether it verifies what is drafted below it.

        Raises:
            ValueError: an open generation has it, it is in train mode, its ids do not fit.
        """
        check_free(model, role)
        model.check_mode()
        self.check_prompt(model, role)
        self._check_ids(model, role)
        if verifies:
            self._num_emitted = model.num_logits if self._num_emitted is None else self._num_emitted
            self._num_drafted = min(model.num_logits, self._num_drafted or model.num_logits)
        model.session = self

    def check_prompt(self, model: DraftModel, role: str) -> None:
        """Raise ValueError if the model has no embedding for a token id of the prompt."""
        for token_id in self._prompt_range:
            if not 0 <= token_id < model.num_embeddings:
                raise ValueError(
                    f"the prompt has token id {token_id}, and the {role} has embeddings for ids 0 to "
                    f"{model.num_embeddings - 1}; encode the prompt with the pair's own tokenizer"
                )

    def _check_ids(self, model: DraftModel, role: str) -> None:
        if self._num_emitted is None or self._num_drafted is None:
            return
        if model.num_logits > self._num_drafted:
            raise ValueError(
                f"the {role} names {model.num_logits} ids and what verifies it {self._num_drafted}; give the {role}'s "
                f"drafter vocab_size={self._num_drafted} (or lm.Pair.vocab_size, which is the tokenizer's), so that "
                "the others have probability 0"
            )
        if model.num_embeddings < self._num_emitted:
            raise ValueError(
                f"the {role} takes {model.num_embeddings} ids and the target may emit {self._num_emitted}, after some "
                "of which it could not go on; choose models of one vocabulary, or, where the tokenizer has no more ids "
                "than either, give its vocab_size to target and drafter alike"
            )


def cached(
    model: Any,
    kind: type[CachedModel],
    *,
    vocab_size: int | None = None,
    with_hidden: bool = False,
) -> Any:
    """The model as a loop runs it: a `PreTrainedModel` is wrapped in a model of this kind, any other is one already.

    Args:
        model: as a caller hands it in.
        kind: `CachedModel`, or one that holds trees.
        vocab_size: `Pair.vocab_size` where the model's logits are wider than the tokenizer.
        with_hidden: keep hidden states, for heads.
    """
    if isinstance(model, PreTrainedModel):
        return kind(model, vocab_size=vocab_size, with_hidden=with_hidden)
    return model


def check_free(model: DraftModel, role: str) -> None:
    """Raise ValueError if an open generation has the model."""
    if model.session is not None and model.session.is_open:
        raise ValueError(
            f"the {role} is in use already, by another part of this generation or by another stream that is still "
            "open, and its cache holds one sequence; make a model object for each use, or exhaust or close() the other "
            "stream first"
        )
