"""How often a verdict recommends a head that gains nothing: python -m tests.evaluation.contest.null_verdicts [trials].

The prompts are drawn with replacement from the published record of Qwen2.5-Coder. The rule without training and two
heads are made exchangeable: for each prompt, the counts of the product of token probabilities and of the record's two
heads, at thresholds of the same rank, are given to the three at random. So no head gains anything over the rule, while
dev still chooses among 41 thresholds of the rule and 82 of the heads. Stops cost nothing, so that seconds depend on
counts alone. The fixed lengths keep their own counts, which are slower: nothing but the rule holds a head back.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from configs.schema import Config, DecodeConfig, ModelSource, PairConfig
from decode.experiment import Experiment
from decode.loop.counts import Counts
from decode.policies import FixedLength
from evaluation.competitor import Arm, Competitor, competitors_with
from evaluation.contest import Contest, fastest_on_dev, replay_arms
from evaluation.families import BASELINE, HEADS, PRODUCT, TRAINING_FREE
from evaluation.gain import Splits
from evaluation.played import Played, joined
from evaluation.report.conclusion import conclude
from evaluation.splits import repeated_splits
from evaluation.traces.recording import trace_folder
from evaluation.traces.trace import join_traces
from tests.toys.times import flat_times

SIZES = (2, 4, 8, 10, 16, 40, 80)
"""Test prompts."""
NUM_DEV = 40
TIMES = flat_times(0.2, 1.0)
ROOT = "checkpoints/coder"


def recorded() -> tuple[Played, list[Played]]:
    """The fixed lengths, and product and heads by threshold from the shortest drafts to the longest, on all prompts."""
    models = {name: ModelSource(path=f"/nowhere/{name}") for name in ("target", "draft")}
    names = ("drawn+s+e-d0-w1", "drawn+s-d0-w1")
    heads = tuple(f"{ROOT}/heads/{name}" for name in names)
    decode = DecodeConfig(dir=f"{ROOT}/record", as_recorded=True, policies=(PRODUCT, "head"), heads=heads)
    experiment = Experiment(Config(pair=PairConfig(**models), decode=decode))
    folder = trace_folder(experiment)
    parts = zip(*(folder.load(dataset) for dataset in experiment.datasets), strict=True)
    competitors = competitors_with(experiment, experiment.heads)
    fixed, *others = replay_arms(competitors, Splits(*map(join_traces, parts)))
    ranked = []
    for arm in others:
        values = [next(iter(setting.values())) for setting in arm.competitor.settings]
        order = np.argsort(values)
        if arm.competitor.family == PRODUCT:  # the lower its bound, the longer its drafts
            order = order[::-1]
        ranked.append(joined([arm.dev, arm.test]).select(order))
    return joined([fixed.dev, fixed.test]), ranked


def shares(num_trials: int, sizes: Sequence[int] = SIZES, *, seed: int = 0) -> Iterator[tuple[int, float, float]]:
    """Test prompts; shares of verdicts that recommend a head, and whose head is above noise over the rule, whatever the
    repeated splits say.
    """
    fixed, ranked = recorded()
    generator = np.random.default_rng(seed)
    for size in sizes:
        num_heads = 0
        num_above = 0
        for _ in range(num_trials):
            verdict = conclude(null_contest(fixed, ranked, size, generator))
            num_heads += verdict.group == HEADS
            num_above += verdict.gain(HEADS, TRAINING_FREE).is_above_noise
        yield size, num_heads / num_trials, num_above / num_trials


def null_contest(fixed: Played, ranked: Sequence[Played], num_test: int, generator: np.random.Generator) -> Contest:
    """A contest of the fixed lengths, a rule and two heads that are as good as the rule, with drawn prompts."""
    num_prompts = len(fixed.prompt_of_row)
    rows = generator.integers(num_prompts, size=NUM_DEV + num_test)
    owner = generator.permuted(np.tile(np.arange(len(ranked)), (len(rows), 1)), axis=1)
    every = [fixed_part(fixed, rows), *(mixed(ranked, rows, owner[:, number]) for number in range(len(ranked)))]
    families = (BASELINE, PRODUCT, "head_drawn", "head_fed")
    arms = []
    for family, played in zip(families, every, strict=True):
        name = f"head:{family}" if family.startswith("head") else family
        settings = tuple({"threshold": number} for number in range(len(played.lengths)))
        competitor = Competitor(family, name, FixedLength(), settings)
        at = range(len(settings))
        dev, test = (played.select(at, part) for part in (range(NUM_DEV), range(NUM_DEV, len(rows))))
        arms.append(Arm(competitor, dev, test))
    return Contest("null", TIMES, fastest_on_dev(arms, TIMES), repeated_splits(arms, TIMES))


def fixed_part(played: Played, rows: np.ndarray) -> Played:
    return numbered(played.select(range(len(played.lengths)), rows.tolist()))


def mixed(ranked: Sequence[Played], rows: np.ndarray, owner: np.ndarray) -> Played:
    """On each row the counts of the arm that owns it."""
    counts = {}
    for name in ("num_emitted", "num_target", "num_draft_forwards"):
        values = np.stack([getattr(played.counts, name) for played in ranked])
        counts[name] = values[owner, :, rows].T
    lengths = np.stack([played.lengths for played in ranked])[owner, :, rows].swapaxes(0, 1)
    return Played(Counts(**counts), lengths, np.arange(len(rows)))


def numbered(played: Played) -> Played:
    """Rows as prompts, even if one was drawn twice."""
    return replace(played, prompt_of_row=np.arange(len(played.prompt_of_row)), stop_kind="")


def main() -> None:
    """Print the table."""
    num_trials = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    print(f"{num_trials} verdicts each, no head gains anything; {NUM_DEV} dev prompts")
    print("test prompts   recommends a head   above noise, without the splits")
    for size, share, above in shares(num_trials):
        print(f"{size:12d}   {share:17.1%}   {above:31.1%}", flush=True)


if __name__ == "__main__":
    main()
