"""python -m evaluation tune: each head's best threshold for this hardware, by replay, beside the rule that needs none
(law 4.11).
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from configs.schema import Config
from decode.experiment import Experiment
from decode.policies import HeadPolicy
from evaluation.costs.machine import costs_for
from evaluation.costs.model import CostModel
from evaluation.intervals import Splits
from evaluation.sheet import Sheet
from evaluation.traces.recording import trace_folder
from evaluation.traces.trace import Trace, join_traces
from evaluation.tuning.rule import auto_for
from heads.model.head import AcceptanceHead, update_config

FINE = 201
_RULE = (
    "t_draft_s",
    "t_target_s",
    "t_verify_s",
    "t_start_s",
    "throughput",
    "next_mean",
    "index_offset",
    "index_slope",
    "first_index",
    "prior_profit",
    "prior_rounds",
)
"""Keys that `auto` reads back."""


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """The best threshold of one head at one cost, and what it reaches."""

    head: str
    timing: str
    max_rejection_prob: float
    """The best of a fine grid on dev, on the head's raw probabilities."""
    tokens_per_s: float
    """Throughput on test, at that threshold."""
    best_tokens_per_s: float
    """Throughput on test, at the threshold that would have been best there."""
    auto_tokens_per_s: float
    """Throughput on test, by the rule with lambda from dev."""
    online_tokens_per_s: float
    """Throughput on test, by the rule that learns lambda in each generation."""
    target_alone_tokens_per_s: float
    recommended: dict[str, Any]


def tune(config: Config, *, write: bool = True, ratio: float | None = None) -> None:
    """Choose each head's threshold for this hardware by replay; write it into the head's config.json.

    Args:
        config: the experiment.
        write: put `recommended` into every head's config.json.
        ratio: t_target / t_draft of other hardware, in place of the measured times.
    """
    experiment = Experiment(config)
    if not experiment.heads:
        raise FileNotFoundError(
            f"no heads in {experiment.exported}; run `python -m heads export`, or name some in decode.heads"
        )
    folder, cost = trace_folder(experiment), costs_for(experiment, ratio)
    folder.complete()
    dev, test = (join_traces(traces) for traces in zip(*map(folder.load, experiment.datasets), strict=True))
    tuned = [tune_head(name, head, traces=Splits(dev, test), cost=cost) for name, head in experiment.heads.items()]
    threshold_sheet(tuned, cost).print()
    for result in tuned if write else []:
        path = experiment.head_paths[result.head]
        if not Path(path).is_dir():
            print(f"{path} is on the hub, and nothing is written there: {json.dumps(result.recommended)}")
            continue
        update_config(path, recommended=result.recommended)
        print(f"wrote recommended into {Path(path) / 'config.json'}")
    print(json.dumps({"costs": asdict(cost), "tuned": [asdict(result) for result in tuned]}))


def tune_head(name: str, head: AcceptanceHead, *, traces: Splits[Trace], cost: CostModel) -> Tuned:
    """The best threshold on dev, and what it and the rule come to on test."""
    thresholds = 1 / (1 + np.exp(-np.linspace(-7, 7, FINE)))
    on_dev, on_test = (cost.speeds(trace, HeadPolicy(head, thresholds)) for trace in traces)
    best = int(on_dev.argmax())
    threshold = round(float(thresholds[best]), 5)
    rule, online = (auto_for(head, traces.dev, cost, is_online=is_online) for is_online in (False, True))
    auto_s, online_s = (float(cost.speeds(traces.test, policy)[0]) for policy in (rule, online))
    return Tuned(
        head=name,
        timing=head.timing,
        max_rejection_prob=threshold,
        tokens_per_s=float(on_test[best]),
        best_tokens_per_s=float(on_test.max()),
        auto_tokens_per_s=auto_s,
        online_tokens_per_s=online_s,
        target_alone_tokens_per_s=1 / cost.t_target_s[0],
        recommended={
            "max_rejection_prob": threshold,
            "is_calibrated": False,
            **{name: getattr(rule, name) for name in _RULE},
            "costs": f"{cost.origin}; {cost.stop_origin}",
            "num_prompts": traces.dev.num_prompts,
        },
    )


def threshold_sheet(tuned: Sequence[Tuned], cost: CostModel) -> Sheet:
    """Threshold and rule side by side, each rule against the threshold that would have been best on test."""

    def over_best(speed: float, head: Tuned) -> str:
        return f"{speed:.2f} ({speed / head.best_tokens_per_s - 1:+.2%})"

    rows = [
        {
            "head": head.head,
            "max_rejection_prob": f"{head.max_rejection_prob:.4f}",
            "tokens/s": f"{head.tokens_per_s:.2f}",
            "best on test": f"{head.best_tokens_per_s:.2f}",
            "auto (against best)": over_best(head.auto_tokens_per_s, head),
            "auto online (against best)": over_best(head.online_tokens_per_s, head),
        }
        for head in sorted(tuned, key=lambda head: -head.tokens_per_s)
    ]
    return Sheet(f"thresholds for {cost.title}; tokens/s on test", rows)
