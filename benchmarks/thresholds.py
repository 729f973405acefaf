"""What a head's threshold gains over the product, on recorded traces: `python -m benchmarks.thresholds`.

Thresholds bound raw or calibrated probabilities; `auto` is law 4.11's rule on calibrated q(y), without a head. Dev and
test are redrawn 200 times among the prompts of a record (`evaluation.splits`), at four ratios of t_target to t_draft.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.signals import RECORDS
from configs.command import run
from configs.schema import Config, DecodeConfig, HeadsConfig, ModelSource, PairConfig
from decode.experiment import Experiment
from decode.policies.registry import AUTO_TOKEN_PROB, LOGISTIC
from evaluation.competitor import CALIBRATED, Competitor, competitors_of, words_of
from evaluation.contest import Replays, replay_arms
from evaluation.costs.machine import costs_for
from evaluation.gain import Splits
from evaluation.splits import NUM_SPLITS, RepeatedSplits, repeated_splits
from evaluation.traces.recording import trace_folder
from evaluation.traces.trace import join_traces

RATIOS = (2.85, 5.0, 10.0, 20.0)
_PRODUCT = "cumulative_token_prob"


def competitors(experiment: Experiment) -> list[Competitor]:
    """Fixed lengths, the product, and the raw and calibrated thresholds of every head, each a family of its own."""
    longest = experiment.decode.max_draft_length
    entries = competitors_of({}, {}, max_draft_length=longest, policies=(_PRODUCT,))
    for is_calibrated in (False, True):
        grid = {"head": {"max_rejection_prob": LOGISTIC, CALIBRATED: [is_calibrated]}}
        of_heads = competitors_of(grid, experiment.heads, max_draft_length=longest, policies=("head",))
        word = words_of(CALIBRATED, value=is_calibrated)
        for entry in of_heads:
            if entry.head:
                entries.append(replace(entry, family=f"{entry.head} {word}"))
    return entries


def experiment_of(folder: Path) -> Experiment:
    """The experiment of a record, with the heads beside it. No model is loaded."""
    absent = PairConfig(target=ModelSource(path="absent/target"), draft=ModelSource(path="absent/draft"))
    heads = sorted(str(path) for path in (folder / "heads").iterdir())
    decode = DecodeConfig(dir=str(folder / "record"), as_recorded=True, heads=heads)
    return Experiment(Config(pair=absent, decode=decode, heads=HeadsConfig(dir="absent/heads")))


def splits_of(experiment: Experiment, ratios: Sequence[float] = RATIOS) -> dict[float, RepeatedSplits]:
    """Ratio -> every competitor, and `auto` without a head, in 200 splits."""
    of_sets = trace_folder(experiment)
    loaded = [of_sets.load(dataset) for dataset in experiment.datasets]
    traces = Splits(*map(join_traces, zip(*loaded, strict=True)))
    arms = list(replay_arms(competitors(experiment), traces))
    every = [costs_for(experiment).with_ratio(ratio) for ratio in ratios]
    rules = Replays(traces, arms).token_rules(every)
    splits = {}
    for ratio, times, rule in zip(ratios, every, rules, strict=True):
        splits[ratio] = repeated_splits([*arms, rule], times)
    return splits


def race_thresholds(*, folders: tuple[str, ...] = RECORDS) -> None:
    """Print a table for each folder.

    Args:
        folders: directories with record/trace and heads.
    """
    for name in folders:
        print(f"{name}: dev and test prompts redrawn {NUM_SPLITS} times")
        print(f"{'ratio':>6} {'':32} {'gain':>13} {'over product':>15} {'ahead':>7}")
        for ratio, splits in splits_of(experiment_of(Path(name))).items():
            for family in (_PRODUCT, AUTO_TOKEN_PROB, *(key for key in splits.gains if " " in key)):
                lead = 100 * splits.lead(family, _PRODUCT)
                gain = f"{100 * splits.median(family):+.1f} ± {100 * splits.spread(family):.1f} %"
                over = f"{np.mean(lead):+.2f} ± {np.std(lead, ddof=1):.2f} %"
                ahead = f"{splits.share_ahead(family, _PRODUCT):.0%}"
                print(f"{ratio:6} {family:32} {gain:>13} {over:>15} {ahead:>7}")


if __name__ == "__main__":
    run({"thresholds": race_thresholds}, default="thresholds")
