"""Law 4.9 (SpecDec++, arXiv 2405.19715, Eq. 2.1-2.3): what rounds cost in seconds.

    T = t_draft * num_draft_forwards + sum over rounds of t_target(k)          k: tokens drafted in the round
    throughput = N / T                        speed-up over the target alone = throughput * t_target(0)

With t_target(k) = t_target this is the paper's T = t_draft N_draft + t_target N_target, and its latency per token is t_draft + t_draft *
(discard rate) + (t_target - t_draft) * (verification rate). Verification is not free everywhere, so t_target may grow with k.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from decode.traces.replay import Replayed
from decode.traces.trace import Array


@dataclass(frozen=True)
class CostModel:
    """Times of one pair on one machine, in seconds."""

    t_draft_s: float
    """Of one draft forward with everything that a draft step does."""
    t_target_s: tuple[float, ...]
    """Of one verification of k = 0, 1, … drafted tokens; beyond the last k as the last."""
    origin: str = "given"
    """given, measured, fitted, or a ratio."""

    def __post_init__(self) -> None:
        for name, values in (("t_draft_s", (self.t_draft_s,)), ("t_target_s", self.t_target_s)):
            if not values or not all(0 < value < float("inf") for value in values):
                raise ValueError(f"{name} is {values}; a time is a positive number of seconds")

    @classmethod
    def constant(cls, t_draft_s: float, t_target_s: float, origin: str = "given") -> "CostModel":
        """Verification that costs the same however many tokens it verifies."""
        return cls(t_draft_s, (t_target_s,), origin)

    @property
    def ratio(self) -> float:
        """t_target(0) / t_draft."""
        return self.t_target_s[0] / self.t_draft_s

    def with_ratio(self, ratio: float) -> "CostModel":
        """Other hardware: this target's time, constant in k, and a draft that is `ratio` times faster."""
        check_ratio(ratio)
        return replace(self, t_draft_s=self.t_target_s[0] / ratio, t_target_s=self.t_target_s[:1], origin=f"ratio {ratio:g}")

    def target_s(self, length: Int[Array, "..."]) -> Float[Array, "..."]:
        """t_target(k)."""
        return np.asarray(self.t_target_s)[np.minimum(length, len(self.t_target_s) - 1)]

    def time_s(self, replayed: Replayed) -> Float[Array, "setting row"]:
        """T of every setting on every prompt."""
        per_round = self.target_s(np.arange(replayed.lengths.shape[-1]))
        return self.t_draft_s * replayed.counts.num_draft_forwards + replayed.lengths @ per_round

    def tokens_per_s(self, replayed: Replayed) -> Float[Array, " setting"]:
        """Throughput of every setting, all prompts together."""
        return replayed.counts.num_emitted.sum(-1) / self.time_s(replayed).sum(-1)

    def line(self) -> "LinearCosts":
        """The line through t_target(1) and t_target at its last k, neither part of it below 0."""
        alone, *longer = self.t_target_s
        slope = max(0.0, (longer[-1] - longer[0]) / (len(longer) - 1)) if len(longer) > 1 else 0.0
        return LinearCosts(self.t_draft_s, alone, slope, max(0.0, longer[0] - slope - alone) if longer else 0.0)


class LinearCosts(NamedTuple):
    """A cost model as the rule of law 4.11 sees it: t_target(k) = t_target_s + (t_start_s + t_verify_s k where k > 0)."""

    t_draft_s: float
    t_target_s: float
    t_verify_s: float
    t_start_s: float


def check_ratio(ratio: float) -> None:
    """Raise ValueError unless a ratio of times can be one."""
    if not 0 < ratio < float("inf"):
        raise ValueError(f"t_target / t_draft is {ratio}; it must be a positive number")
