"""One generation: its settings, and the models that it holds.

A model's cache holds one sequence, so a generation takes each of its models before it resets them, and holds them until
it ends. Before the first token it refuses a model that is in use or in train mode, or whose ids do not fit. Ids fit if

    no distribution has more ids than the narrowest one that verifies it    drafted tokens are looked up in that one
    every model has an embedding for every id that the target may emit      emitted tokens are fed to all models

so a model's distributions may be narrower than the target's; they have zeros there (law 4.2).
"""

from collections.abc import Sequence
from math import inf
from weakref import WeakSet

from lm import DraftModel, GreedySampler, Sampler, Sampling

# the models of open sessions
_IN_USE: WeakSet[DraftModel] = WeakSet()
# New tokens that caches get room for at once: 100,000 would take gigabytes, and few answers are so long.
_MAX_NEW = 4096


class Session:
    """State that one generation shares with its drafters. As a context manager it keeps other generations from
    the models that it takes until it ends.
    """

    is_open = False
    # number of ids that the target may emit; 0 before a target is taken
    _num_emitted = 0
    # number of ids that all verifying models have; infinite before a target is taken
    _num_drafted = inf

    def __init__(
        self,
        sampling: Sampling,
        eos_ids: frozenset[int],
        draws: Sampler,
        prompt_ids: Sequence[int] = (),
        max_new_tokens: int = 0,
    ) -> None:
        """`draws` are replaced by `GreedySampler` at temperature 0; every model must have an embedding for each
        id of the prompt, and makes room for it and `max_new_tokens`.
        """
        self.num_prompt = len(prompt_ids)
        self.num_tokens = self.num_prompt + max_new_tokens
        self.models: list[DraftModel] = []  # those that are taken
        self.sampling = sampling
        self.eos_ids = eos_ids
        self.draws = GreedySampler() if sampling.is_greedy else draws
        self._prompt_range = min(prompt_ids, default=0), max(prompt_ids, default=0)

    def __enter__(self) -> "Session":
        self.is_open = True
        return self

    def __exit__(self, *_: object) -> None:
        self.is_open = False
        for model in self.models:
            _IN_USE.discard(model)
        self.models.clear()

    def take(self, model: DraftModel, role: str, *, verifies: bool = False) -> None:
        """Take a model and empty its cache; the target first, and every model that `verifies` before those below
        it. ValueError, by its `role`, for a model that this module refuses.
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
        if self.is_open:
            _IN_USE.add(model)
        self.models.append(model)
        model.num_prompt = self.num_prompt
        model.reset(room_of(self.num_prompt, self.num_tokens))

    def check(self, model: DraftModel, role: str) -> None:
        """Raise ValueError for a model in use or in train mode, or without an embedding for an id of the prompt."""
        if model in _IN_USE:
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


def room_of(num_prompt: int, num_tokens: int) -> int:
    """Positions that caches get at once for a text of `num_tokens`, which may end long before."""
    return min(num_tokens, num_prompt + _MAX_NEW)
