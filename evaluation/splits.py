"""How much a comparison depends on which prompts are dev and which are test: dev and test redrawn many times.

One split is one draw. On the same 120 prompts, the lead of one policy over another has a standard deviation of about
0.6 points between splits, so a table that shows one split may show an unlucky one. Here all dev and test prompts of an
evaluation are pooled and divided again at random, into as many dev and test prompts as before. In each split, dev
chooses the setting of every family and test judges it, as in `evaluation.contest`.

What depends on dev beyond the choice of a setting keeps its one solution, on the evaluation's own dev prompts: the rule
of law 4.11 (`auto`), the length head, and heads that are recalibrated to a trace. For these, some test prompts of a
split helped to find that solution, so their gains are slightly optimistic. The splits share prompts, so their spread is
no confidence interval: it says how much the choice of a split matters, not how much other prompts would.
"""

from collections.abc import Iterable, Mapping

import numpy as np
from jaxtyping import Bool, Float

from evaluation.competitor import Arm
from evaluation.families import BASELINE, GROUPS, REPLAYED
from evaluation.gain import Throughput
from evaluation.times import Times

NUM_SPLITS = 200
_ROUNDING = 1e-12
"""Policies that do the same differ by less, because their sums are added in another order."""


class RepeatedSplits:
    """Every family in many random splits. A name is that of a family, or of a group of families (`GROUPS`), which is
    the member that is fastest on the dev prompts of each split.
    """

    def __init__(
        self,
        gains: Mapping[str, Float[np.ndarray, " split"]],
        on_dev: Mapping[str, Float[np.ndarray, " split"]],
    ) -> None:
        """From results by family and split.

        Args:
            gains: over the best fixed length on the test prompts of each split, at the settings that its dev prompts
                choose.
            on_dev: tokens per second on the dev prompts of each split.
        """
        self.gains = gains
        self.on_dev = on_dev

    def gain(self, name: str) -> Float[np.ndarray, " split"]:
        """The gain of a family or a group over the best fixed length; KeyError if it does not compete."""
        if name in self.gains:
            return self.gains[name]
        members = list(filter(GROUPS[name], self.gains))
        if not members:
            raise KeyError(f"no family of {name} competes")
        fastest = np.argmax([self.on_dev[member] for member in members], axis=0)
        return np.array([self.gains[member] for member in members])[fastest, np.arange(len(fastest))]

    def lead(self, name: str, rival: str) -> Float[np.ndarray, " split"]:
        """The gain over a rival, which may be a group as well."""
        return (1 + self.gain(name)) / (1 + self.gain(rival)) - 1

    def median(self, name: str) -> float:
        """Median gain over the best fixed length."""
        return float(np.median(self.gain(name)))

    def spread(self, name: str) -> float:
        """Standard deviation of the gain between splits; NaN for a single split."""
        gains = self.gain(name)
        return float(gains.std(ddof=1)) if len(gains) > 1 else float("nan")

    def share_leading(self, name: str) -> float:
        """Share of splits in which no other family that can be run is as fast on test."""
        gains = self.gain(name)
        rivals = [of_rival for rival, of_rival in self.gains.items() if rival != name and rival not in REPLAYED]
        return float(np.mean(np.all([gains > of_rival + _ROUNDING for of_rival in rivals], axis=0)))

    def share_ahead(self, name: str, rival: str) -> float:
        """Share of splits in which one is faster on test than the other."""
        return float(np.mean(self.gain(name) > self.gain(rival) + _ROUNDING))


def repeated_splits(
    arms: Iterable[Arm], times: Times, *, num_splits: int = NUM_SPLITS, seed: int = 0
) -> RepeatedSplits:
    """Choose and judge every family again in random splits of the prompts. Nothing is replayed: the seconds of a split
    are sums of the seconds of its prompts, which are known for every setting. All draws and turns of one prompt stay
    together.

    Args:
        arms: every competitor on dev and test, the fixed lengths among them.
        times: turn counts into seconds.
        num_splits: number of splits.
        seed: of the splits; the same seed and prompts give the same splits at any times.
    """
    by_family: dict[str, list[tuple[Throughput, Throughput]]] = {}
    for arm in arms:
        both = times.throughput(arm.dev), times.throughput(arm.test)
        by_family.setdefault(arm.competitor.family, []).append(both)
    dev, test = by_family[BASELINE][0]
    num_dev = dev.tokens.shape[-1]
    is_dev = draw_splits(num_dev + test.tokens.shape[-1], num_dev, num_splits=num_splits, seed=seed)
    on_dev = {}
    on_test = {}
    for name, members in by_family.items():
        tokens = np.concatenate([np.hstack([dev.tokens, test.tokens]) for dev, test in members])
        seconds = np.concatenate([np.hstack([dev.seconds, test.seconds]) for dev, test in members])
        on_dev[name], on_test[name] = _judged(Throughput(tokens, seconds), is_dev)
    base = on_test[BASELINE]
    # the ratio of tokens apart, so that texts that both share cannot move the ratio of times (`evaluation.gain`)
    gains = {
        name: base.seconds / judged.seconds * (judged.tokens / base.tokens) - 1 for name, judged in on_test.items()
    }
    return RepeatedSplits(gains, on_dev)


def draw_splits(num_prompts: int, num_dev: int, *, num_splits: int, seed: int) -> Bool[np.ndarray, "split prompt"]:
    """Whether each prompt is a dev prompt of each split, drawn without replacement: `num_dev` are."""
    order = np.random.default_rng(seed).random((num_splits, num_prompts)).argsort(axis=1)
    return order < num_dev


def _judged(
    all_settings: Throughput, is_dev: Bool[np.ndarray, "split prompt"]
) -> tuple[Float[np.ndarray, " split"], Throughput]:
    """Tokens per second on the dev prompts of each split, of the setting that is fastest there, the first of equals;
    tokens and seconds of that setting on the split's test prompts.
    """
    weights = is_dev.T.astype(np.float64)
    speeds = (all_settings.tokens @ weights) / (all_settings.seconds @ weights)
    number = speeds.argmax(axis=0)
    tokens = np.where(is_dev, 0, all_settings.tokens[number]).sum(axis=1)
    seconds = np.where(is_dev, 0.0, all_settings.seconds[number]).sum(axis=1)
    return speeds[number, np.arange(len(number))], Throughput(tokens, seconds)
