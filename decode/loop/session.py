"""One generation: its settings, and the models that it holds.

A model's cache holds one sequence, so a generation takes each of its models before it resets them, and holds them until
it ends. Before the first token it refuses a model that is in use or in train mode, or whose ids do not fit. Ids fit if

    no distribution has more ids than the narrowest one that verifies it    drafted tokens are looked up in that one
    every model has an embedding for every id that the target may emit      emitted tokens are fed to all models

so a model's distributions may be narrower than the target's; they have zeros there (law 4.2).
"""

from collections.abc import Sequence
from math import inf
from typing import Any

from transformers import PreTrainedModel

from lm import CachedModel, DraftModel, GreedySampler, Sampler, Sampling


class Session:
    """State that one generation shares with its drafters."""

    is_open = False
    """Whether its models are in use."""
    _num_emitted = 0
    """Number of ids that the target may emit; 0 before a target is taken."""
    _num_drafted = inf
    """Number of ids that all verifying models have; infinite before a target is taken."""

    def __init__(
        self,
        sampling: Sampling,
        eos_ids: frozenset[int],
        draws: Sampler,
        prompt_ids: Sequence[int] = (),
        max_new_tokens: int = 0,
    ) -> None:
        """`draws` are replaced by `GreedySampler` at temperature 0; every model must have an embedding for each id of
        the prompt, and makes room for it and `max_new_tokens`.
        """
        self.num_prompt = len(prompt_ids)
        self.num_tokens = self.num_prompt + max_new_tokens
        self.models: list[DraftModel] = []  # those that are taken
        self._prompt_range = min(prompt_ids, default=0), max(prompt_ids, default=0)
        self.sampling, self.eos_ids = sampling, eos_ids
        self.draws = GreedySampler() if sampling.is_greedy else draws

    def take(self, model: DraftModel, role: str, *, verifies: bool = False) -> None:
        """Take a model and empty its cache; the target first, and every model that `verifies` before those below it.
        ValueError, by its `role`, for a model that this module refuses.
        """
        self.check(model, role)
        if model.num_logits > self._num_drafted:
            raise ValueError(
                f"the {role} has logits for {model.num_logits} ids, but its verifier for {self._num_drafted}; pass "
                f"vocab_size={self._num_drafted} (lm.Pair.vocab_size, the tokenizer's) to the {role}'s drafter or model"
            )
        if model.num_embeddings < self._num_emitted:
            raise ValueError(
                f"the {role} has embeddings for {model.num_embeddings} ids, but the target may emit "
                f"{self._num_emitted}; use models of one vocabulary, or, if the tokenizer has no more ids than either, "
                "pass its vocab_size to target and drafter"
            )
        if verifies:
            self._num_drafted = min(model.num_logits, self._num_drafted)
            self._num_emitted = self._num_emitted or model.num_logits
        model.session = self
        model.reset(self.num_tokens)
        self.models.append(model)

    def check(self, model: DraftModel, role: str) -> None:
        """Raise ValueError for a model in use or in train mode, or without an embedding for an id of the prompt."""
        if model.session is not None and model.session.is_open:
            raise ValueError(
                f"the {role} is already in use, by another part of this generation or by another open stream; make a "
                "model object for each use, or exhaust or close() the other stream first"
            )
        model.check_mode()
        for token_id in self._prompt_range:
            if not 0 <= token_id < model.num_embeddings:
                raise ValueError(
                    f"the prompt has token id {token_id}, and the {role} has embeddings for ids 0 to "
                    f"{model.num_embeddings - 1}; encode the prompt with the pair's own tokenizer"
                )


def cached(
    model: Any, needed_by: object, *, vocab_size: int | None, with_hidden: bool = False, holds_trees: bool = False
) -> Any:
    """The model as a loop runs it: a `PreTrainedModel` is wrapped in a `CachedModel`; another one keeps its vocabulary
    and must hold trees if they are needed. ValueError, which names the class of `needed_by`, otherwise, and for a model
    that lacks the hidden states that are needed.
    """
    if isinstance(model, PreTrainedModel):
        return CachedModel(model, vocab_size=vocab_size, with_hidden=with_hidden, holds_trees=holds_trees)
    if holds_trees and not model.holds_trees:
        raise ValueError(f"a {type(needed_by).__name__} needs models that hold trees; pass holds_trees=True to each")
    if with_hidden and not model.with_hidden:
        model.keep_hidden()
    return model
