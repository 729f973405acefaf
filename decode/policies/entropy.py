"""Stop on the draft's entropy: SVIP, HSDDW's self-verification, AdaEDL."""

from dataclasses import dataclass

import numpy as np

from decode.policies.base import AfterDraw, BeforeDraw, Number, Outcome, Policy, State
from decode.policies.checks import check_at_least_zero, check_unit


@dataclass(frozen=True)
class Entropy(Policy):
    """SVIP (arXiv 2411.18462): keep the token, stop after it when sqrt(scale * H(q)) > max_sqrt_entropy.

    sqrt(scale * H) estimates an upper bound on 1 - acceptance_rate (Pinsker with H(q, p) = rho * H(q), scale = (rho -
    1) / 2 = 0.15 for rho = 1.3). The official code has 0.15 and 0.3 as here; the paper folds the scale into its
    threshold h.
    """

    max_sqrt_entropy: Number = 0.3
    scale: Number = 0.15
    signals = frozenset({"entropy"})

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least_zero("max_sqrt_entropy", self.max_sqrt_entropy)
        check_at_least_zero("scale", self.scale)

    def after(self, state: State, drawn: AfterDraw) -> tuple[State, Number]:
        return state, (self.scale * drawn.entropy) ** 0.5 > self.max_sqrt_entropy


@dataclass(frozen=True)
class SelfVerify(Policy):
    """HSDDW's self-verification: keep the token, stop after it when H(q) > tau.

    tau is the running mean, within this generation, of H(q) where the first token of each round was rejected; it starts
    at `initial` (0 in the paper: drafts of one token until a first rejection).
    """

    initial: Number = 0.0
    signals = frozenset({"entropy"})

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least_zero("initial", self.initial)

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
    """AdaEDL (arXiv 2410.18351): stop before drawing when 1 - sqrt(scale * H(q)) < lambda, with a lambda that follows
    acceptance.

    After each round: rate <- .5 rate + .5 accepted / drafted; aim = lambda + step if rate < target_rate, lambda if all
    were accepted at the cap, else lambda - step; lambda <- .9 lambda + .1 aim. The first token of a round is always
    drafted, so that lambda can recover.
    """

    initial_lambda: Number = 0.2
    scale: Number = 0.2
    step: Number = 0.01
    target_rate: Number = 0.9
    signals = frozenset({"entropy"})

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least_zero("scale", self.scale)
        check_at_least_zero("step", self.step)
        check_unit("target_rate", self.target_rate)

    def start(self) -> State:
        return self.initial_lambda, self.target_rate

    def stop_before(self, state: State, seen: BeforeDraw) -> Number:
        bound = 1.0 - (self.scale * seen.entropy) ** 0.5
        return (bound < state[0]) & (seen.position > 0)

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
