"""Draft lengths that do not depend on the tokens of the draft: a fixed one, and transformers' heuristic."""

from dataclasses import dataclass

import numpy as np

from decode.policies.base import Number, Outcome, Policy, State
from decode.policies.checks import check_count


@dataclass(frozen=True)
class FixedLength(Policy):
    """Always `k` tokens; 0 never drafts (Leviathan et al., arXiv 2211.17192)."""

    k: Number = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("k", self.k, 0)

    def limit(self, state: State) -> Number:
        return self.k


@dataclass(frozen=True)
class Heuristic(Policy):
    """transformers' `num_assistant_tokens_schedule="heuristic"`: all accepted: +2; else -1, at least 1. Starts at `k`,
    per generation.

    transformers also adds 2 when nothing was drafted at the length limit; here such a round changes nothing.
    """

    k: Number = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("k", self.k, 1)

    def start(self) -> State:
        return (self.k,)

    def limit(self, state: State) -> Number:
        return state[0]

    def end(self, state: State, outcome: Outcome) -> State:
        (k,) = state
        changed = np.where(outcome.num_accepted == outcome.num_drafted, k + 2, np.maximum(k - 1, 1))
        return (np.where(outcome.num_drafted > 0, changed, k),)
