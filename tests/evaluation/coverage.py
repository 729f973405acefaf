"""How often 95 % intervals hold the true gain, and how often a lead that does not exist is called one:

    python -m tests.evaluation.coverage [repetitions]

Dev and test prompts are drawn from a large population whose true speeds are known. As in `evaluation.contest`, dev
chooses the fastest setting of two competitors and test judges the choice with `evaluation.gain.gain_over`. The seconds
of one of the two are scaled so that the true gain of this choice is 0. Scaling changes no answer: 1 + gain is
proportional to it.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from evaluation.competitor import make_competitor
from evaluation.gain import Gain, Throughput, gain_over
from evaluation.table import Table
from evaluation.traces.disk import read_trace, recorded_keys
from evaluation.traces.replay import replay_settings
from tests.toys.times import flat_times

NUM_DEV = 40
NUMS_TEST = (2, 4, 8, 10, 12, 16, 30, 40, 80)
_CHECKPOINTS = Path(__file__).parents[2] / "checkpoints"
_RATIO, _LONGEST = 5.0, 8
_SIZE = 20_000
"""Prompts of a made population."""


class Population(NamedTuple):
    """Two competitors on many prompts, each at several settings."""

    base: Throughput
    own: Throughput


def recorded() -> Population:
    """The best fixed length and the product of token probabilities on all prompts of the shipped traces of
    Qwen2.5-Coder and SmolLM2, at t_target / t_draft = 5.
    """
    lengths = make_competitor("base", "fixed_length", {"k": range(_LONGEST + 1)})
    product = {"min_token_prob": np.linspace(0.01, 0.99, 41).tolist()}
    rules = (lengths, make_competitor("own", "cumulative_token_prob", product))
    times = flat_times(1.0, _RATIO)
    parts: list[list[Throughput]] = [[], []]
    for name in ("coder", "smollm2"):
        folder = _CHECKPOINTS / name / "record" / "trace"
        for trace in (read_trace(folder, [key]) for key in recorded_keys(folder)):
            for part, rule in zip(parts, rules, strict=True):
                part.append(times.throughput(replay_settings(trace, rule.policy)))
    joined = [[np.concatenate(arrays, axis=-1) for arrays in zip(*part, strict=True)] for part in parts]
    return Population(*(Throughput(tokens, seconds) for tokens, seconds in joined))


class Prompts(NamedTuple):
    """What differs between made prompts: standard deviations of logarithms, and how they go together. For comparison,
    the shipped traces have tokens 0.4 (capped at 64), hardness 0.1 to 0.2, gain by hardness -0.1 to 0.2.
    """

    tokens: float
    hardness: float
    """Seconds per token of every competitor."""
    gain_by_hardness: float
    """How the logarithm of the second competitor's seconds grows with that of the hardness, beyond the first's."""
    correlation: float
    """Of tokens and hardness."""


def made(prompts: Prompts) -> Population:
    """9 fixed lengths and 41 thresholds, with near ties among both. A response has 8 to 1,024 tokens, and the noise of
    a setting is larger in short ones.
    """
    generator = np.random.default_rng(0)
    long, hard = generator.multivariate_normal((0, 0), ((1, prompts.correlation), (prompts.correlation, 1)), _SIZE).T
    tokens = np.clip(np.round(150 * np.exp(prompts.tokens * long)), 8, 1024)
    hardness = np.exp(prompts.hardness * hard)
    arms = []
    for num, slope in ((9, 0.0), (41, prompts.gain_by_hardness)):
        means = 1.0 + 0.1 * np.linspace(-1, 1, num) ** 2
        noise = np.exp(0.08 * np.sqrt(64 / tokens) * generator.normal(size=(num, _SIZE)))
        seconds = means[:, None] * noise * tokens * hardness ** (1 + slope)
        arms.append(Throughput(np.broadcast_to(tokens, seconds.shape), seconds))
    return Population(*arms)


POPULATIONS: Mapping[str, Callable[[], Population]] = {
    "recorded: coder and smollm2": recorded,
    "made: even responses": lambda: made(Prompts(0.4, 0.2, 0.2, 0.0)),
    "made: long responses, hard ones gain": lambda: made(Prompts(0.8, 0.2, -0.2, 0.2)),
    "made: long responses, easy ones gain": lambda: made(Prompts(0.8, 0.2, 0.2, 0.2)),
    "made: very long, hard ones are longest": lambda: made(Prompts(1.0, 0.3, 0.2, 0.3)),
}


def gains_without_a_true_gain(
    population: Population, num_test: int, *, repetitions: int, num_dev: int = NUM_DEV, seed: int = 0
) -> Iterator[Gain]:
    """The gain on test of what dev chose, whose true gain is 0."""
    generator = np.random.default_rng(seed)
    true_speeds = [arm.tokens_per_s for arm in population]
    num = population.base.tokens.shape[-1]
    for _ in range(repetitions):
        dev = generator.integers(num, size=num_dev)
        test = generator.integers(num, size=num_test)
        judged, speeds = [], []
        for arm, speed in zip(population, true_speeds, strict=True):
            best = int((arm.tokens[:, dev].sum(-1) / arm.seconds[:, dev].sum(-1)).argmax())
            judged.append(Throughput(arm.tokens[best, test], arm.seconds[best, test]))
            speeds.append(speed[best])
        base, own = judged
        yield gain_over(base, own._replace(seconds=own.seconds * (speeds[1] / speeds[0])))


def share_covering(gains: list[Gain]) -> float | None:
    """Share of intervals that hold the true gain of 0; None if there are no intervals."""
    ends = [(gain.low, gain.high) for gain in gains if gain.low is not None and gain.high is not None]
    return float(np.mean([low <= 0 <= high for low, high in ends])) if ends else None


def share_above_noise(gains: list[Gain]) -> float:
    """Share of false alarms: leads that are called more than noise."""
    return float(np.mean([gain.is_above_noise for gain in gains]))


def main(repetitions: int = 2000) -> None:
    rows = []
    for name, make in POPULATIONS.items():
        population = make()
        for num_test in NUMS_TEST:
            gains = list(gains_without_a_true_gain(population, num_test, repetitions=repetitions))
            share = share_covering(gains)
            covering = "no interval" if share is None else f"{share:.1%}"
            above = f"{share_above_noise(gains):.1%}"
            rows.append({"prompts": name, "test": str(num_test), "holds the truth": covering, "above noise": above})
    note = "holds the truth: 95 % is nominal; above noise: without a true gain, 2.5 % is nominal"
    Table(f"{repetitions} repetitions, settings chosen on {NUM_DEV} dev prompts", rows, note).print()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
