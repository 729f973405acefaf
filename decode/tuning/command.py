"""python -m decode tune: each head's best threshold for this hardware, by replay, beside the rule that needs none (law 4.11)."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from configs.schema import Config
from decode.console import wide_console
from decode.costs.command import costs_for
from decode.costs.model import CostModel
from decode.evaluation.grids import load_heads
from decode.evaluation.results import throughput
from decode.policies import HeadPolicy
from decode.traces.command import datasets_of, load_trace, record
from decode.traces.replay import replay_settings
from decode.traces.trace import Trace, join
from decode.tuning.rule import auto_for
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
"""What `auto` reads back."""


@dataclass(frozen=True)
class Tuned:
    """One head for one cost."""

    head: str
    timing: str
    max_rejection_prob: float
    """The best of a fine grid on dev, on the head's raw probabilities."""
    tokens_per_s: float
    """On test, at that threshold."""
    best_tokens_per_s: float
    """On test, at the threshold that would have been best there."""
    auto_tokens_per_s: float
    """On test, by the rule with lambda from dev."""
    online_tokens_per_s: float
    """On test, by the rule that is told no lambda and learns it in each generation."""
    target_alone_tokens_per_s: float
    recommended: dict[str, Any]


def tune(config: Config, *, write: bool = True, ratio: float | None = None) -> None:
    """Choose each head's threshold for this hardware by replay; write it into the head's config.json.

    Args:
        config: the experiment.
        write: put `recommended` into every head's config.json.
        ratio: t_target / t_draft of other hardware, in place of the measured times.
    """
    record(config)
    cost = costs_for(config, ratio)
    heads, paths = load_heads(config), head_paths(config)
    if not heads:
        raise FileNotFoundError(
            f"no heads in {Path(config.heads.dir) / 'exported'}; run `python -m heads export`, or name some in decode.heads"
        )
    dev, test = (join([load_trace(config, name, split) for name in datasets_of(config)]) for split in ("dev", "test"))
    tuned = [tune_head(name, head, dev, test, cost=cost) for name, head in heads.items()]
    wide_console().print(table_of(tuned, cost))
    if write:
        for each in tuned:
            update_config(paths[each.head], recommended=each.recommended)
            print(f"wrote recommended into {Path(paths[each.head]) / 'config.json'}")
    print(json.dumps({"costs": asdict(cost), "tuned": [asdict(each) for each in tuned]}))


def tune_head(name: str, head: AcceptanceHead, dev: Trace, test: Trace, *, cost: CostModel) -> Tuned:
    """The best threshold on dev, and what it and the rule come to on test."""
    thresholds = 1 / (1 + np.exp(-np.linspace(-7, 7, FINE)))
    policy = HeadPolicy(head, thresholds)
    on_dev, on_test = (throughput(replay_settings(trace, policy), cost) for trace in (dev, test))
    best = int(on_dev.argmax())
    rule, online = auto_for(head, dev, cost), auto_for(head, dev, cost, is_online=True)
    auto_s, online_s = (float(throughput(replay_settings(test, each), cost)[0]) for each in (rule, online))
    recommended = {
        "max_rejection_prob": round(float(thresholds[best]), 5),
        "is_calibrated": False,
        **{name: getattr(rule, name) for name in _RULE},
        "costs": cost.origin,
        "num_prompts": len(dev.rows),
    }
    alone = 1 / cost.t_target_s[0]
    return Tuned(
        name,
        head.timing,
        round(float(thresholds[best]), 5),
        float(on_test[best]),
        float(on_test.max()),
        auto_s,
        online_s,
        alone,
        recommended,
    )


def table_of(tuned: list[Tuned], cost: CostModel) -> Table:
    """Threshold and rule side by side."""
    table = Table(title=f"thresholds for t_target/t_draft = {cost.ratio:.2f} ({cost.origin}); tokens/s on test")
    columns = ("head", "max_rejection_prob", "tokens/s", "best on test", "auto", "against best", "auto online", "against best")
    for column in columns:
        table.add_column(column, justify="left" if column == "head" else "right")
    for each in sorted(tuned, key=lambda each: -each.tokens_per_s):
        best = each.best_tokens_per_s
        table.add_row(
            each.head,
            f"{each.max_rejection_prob:.4f}",
            f"{each.tokens_per_s:.2f}",
            f"{best:.2f}",
            f"{each.auto_tokens_per_s:.2f}",
            f"{each.auto_tokens_per_s / best - 1:+.2%}",
            f"{each.online_tokens_per_s:.2f}",
            f"{each.online_tokens_per_s / best - 1:+.2%}",
        )
    return table


def head_paths(config: Config) -> dict[str, str]:
    """Directory of each head by the name that `load_heads` gives it."""
    exported = Path(config.heads.dir) / "exported"
    if config.decode.heads:
        return {Path(path).name: path for path in config.decode.heads}
    return {str(path.parent.relative_to(exported)): str(path.parent) for path in exported.glob("**/config.json")}
