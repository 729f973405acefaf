"""Policies without training: fixed lengths, the draft's own probabilities, its entropy."""

from dataclasses import dataclass
from math import inf

import numpy as np

from decode.policies.base import AfterDraw, BeforeDraw, Number, Outcome, Policy, State


@dataclass(frozen=True)
class FixedLength(Policy):
    """Always `k` tokens; 0 never drafts (Leviathan et al., arXiv 2211.17192)."""

    k: Number = 5
    ranges = (("k", 0, inf),)

    def limit(self, state: State) -> Number:
        return self.k


@dataclass(frozen=True)
class Heuristic(Policy):
    """transformers' `num_assistant_tokens_schedule="heuristic"`: after a draft that was accepted whole the length
    grows by 2, else it falls by 1, to at least 1. It starts at `k`, per generation.

    transformers also adds 2 when nothing was drafted at the length limit; here such a round changes nothing.
    """

    k: Number = 5
    ranges = (("k", 1, inf),)

    def start(self) -> State:
        return (self.k,)

    def limit(self, state: State) -> Number:
        return state[0]

    def end(self, state: State, outcome: Outcome) -> State:
        return (np.where(outcome.num_drafted > 0, heuristic_length(state[0], outcome), state[0]),)


def heuristic_length(length: Number, outcome: Outcome) -> Number:
    """The next draft length under transformers' heuristic."""
    return np.where(outcome.num_accepted == outcome.num_drafted, length + 2, np.maximum(length - 1, 1))


@dataclass(frozen=True)
class TokenProb(Policy):
    """Stop after a token with q(y) < min_token_prob.

    transformers' `assistant_confidence_threshold` (0.4, the token is kept); SWIFT uses 0.8. Departure: q is
    untruncated at temperature 1, so that the signal means the same under every `Sampling` (greedy included).
    """

    min_token_prob: Number = 0.4
    signals = frozenset({"token_prob"})
    ranges = (("min_token_prob", 0, 1),)

    def after(self, state: State, drawn: AfterDraw) -> tuple[State, Number]:
        return state, drawn.token_prob < self.min_token_prob


class ProductPolicy(Policy):
    """A policy whose state is the product of probabilities along the draft."""

    def start(self) -> State:
        return (1.0,)

    def begin(self, state: State) -> State:
        return (1.0,)


@dataclass(frozen=True)
class CumulativeTokenProb(ProductPolicy):
    """Stop after the token at which the product of q(y) over the draft falls below min_token_prob."""

    min_token_prob: Number = 0.2
    signals = frozenset({"token_prob"})
    ranges = (("min_token_prob", 0, 1),)

    def after(self, state: State, drawn: AfterDraw) -> tuple[State, Number]:
        product = state[0] * drawn.token_prob
        return (product,), product < self.min_token_prob


@dataclass(frozen=True)
class MaxProb(Policy):
    """Stop after the token where max_v q(v) < min_max_prob (Kangaroo, arXiv 2404.18911: 0.6)."""

    min_max_prob: Number = 0.6
    signals = frozenset({"max_prob"})
    ranges = (("min_max_prob", 0, 1),)

    def after(self, state: State, drawn: AfterDraw) -> tuple[State, Number]:
        return state, drawn.max_prob < self.min_max_prob


@dataclass(frozen=True)
class Entropy(Policy):
    """SVIP (arXiv 2411.18462): keep the token, stop after it when sqrt(scale * H(q)) > max_sqrt_entropy.

    The root estimates an upper bound on 1 - acceptance_rate (`data_gen.stats`). The official code has 0.15 and
    0.3 as here, which is rho = 1.3; the paper folds the scale into its threshold h.
    """

    max_sqrt_entropy: Number = 0.3
    scale: Number = 0.15
    signals = frozenset({"entropy"})
    ranges = (("max_sqrt_entropy", 0, inf), ("scale", 0, inf))

    def after(self, state: State, drawn: AfterDraw) -> tuple[State, Number]:
        return state, (self.scale * drawn.entropy) ** 0.5 > self.max_sqrt_entropy


@dataclass(frozen=True)
class SelfVerify(Policy):
    """HSDDW's self-verification: keep the token, stop after it when H(q) > tau.

    tau is the running mean, within this generation, of H(q) where the first token of each round was rejected; it
    starts at `initial` (0 in the paper: drafts of one token until a first rejection).
    """

    initial: Number = 0.0
    signals = frozenset({"entropy"})
    ranges = (("initial", 0, inf),)

    def start(self) -> State:
        return 0.0, 0.0

    def after(self, state: State, drawn: AfterDraw) -> tuple[State, Number]:
        total, count = state
        tau = np.where(count > 0, total / np.maximum(count, 1.0), self.initial)
        return state, drawn.entropy > tau

    def end(self, state: State, outcome: Outcome) -> State:
        total, count = state
        is_rejected = outcome.num_accepted < outcome.num_drafted
        return total + np.where(is_rejected, outcome.rejected_entropy, 0.0), count + is_rejected


@dataclass(frozen=True)
class AdaEDL(Policy):
    """AdaEDL (arXiv 2410.18351): stop before drawing when 1 - sqrt(scale * H(q)) < lambda, which follows acceptance.

    After each round: rate <- .5 rate + .5 accepted / drafted; aim = lambda + step if rate < target_rate, lambda
    if all were accepted at the cap, else lambda - step; lambda <- .9 lambda + .1 aim. The first token of a round
    is always drafted, so that lambda can recover.
    """

    initial_lambda: Number = 0.2
    scale: Number = 0.2
    step: Number = 0.01
    target_rate: Number = 0.9
    signals = frozenset({"entropy"})
    ranges = (("scale", 0, inf), ("step", 0, inf), ("target_rate", 0, 1))

    def start(self) -> State:
        return self.initial_lambda, self.target_rate

    def stop_before(self, state: State, signals: BeforeDraw) -> Number:
        bound = 1.0 - (self.scale * signals.entropy) ** 0.5
        return (bound < state[0]) & (signals.position > 0)

    def end(self, state: State, outcome: Outcome) -> State:
        threshold, rate = state
        has_drafted = outcome.num_drafted > 0
        accepted = outcome.num_accepted / np.maximum(outcome.num_drafted, 1)
        rate = np.where(has_drafted, 0.5 * rate + 0.5 * accepted, rate)
        is_full = (outcome.num_accepted == outcome.num_drafted) & (outcome.num_drafted == outcome.num_allowed)
        aim = np.where(
            rate < self.target_rate, threshold + self.step, np.where(is_full, threshold, threshold - self.step)
        )
        return np.where(has_drafted, 0.9 * threshold + 0.1 * aim, threshold), rate
