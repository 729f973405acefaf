"""python -m evaluation tune: each head's best threshold for this hardware, by replay, beside the rule that needs none
(law 4.11).
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from json import dumps as to_json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from configs.schema import Config
from decode.experiment import Experiment
from decode.policies import FixedLength, HeadPolicy
from decode.policies.chosen import ranked, stop_of
from evaluation.costs.machine import costs_for
from evaluation.costs.model import CostModel
from evaluation.intervals import Gain, Spent, Splits, gain_over
from evaluation.sheet import Sheet, printing, say
from evaluation.traces.recording import trace_folder
from evaluation.traces.replay import replay_settings
from evaluation.traces.trace import Trace, join_traces
from evaluation.tuning.rule import auto_for
from heads.model.head import SAID, AcceptanceHead, update_config

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
    tokens_per_s_on_dev: float
    """Throughput on dev, by which thresholds and heads are chosen."""
    tokens_per_s: float
    """Throughput on test, at that threshold."""
    gain: Gain
    """Over the best fixed length, on test."""
    best_tokens_per_s: float
    """Throughput on test, at the threshold that would have been best there."""
    auto_tokens_per_s: float
    """Throughput on test, by the rule with lambda from dev."""
    auto_gain: Gain
    """The rule's over the best fixed length, on test."""
    online_tokens_per_s: float
    """Throughput on test, by the rule that learns lambda in each generation."""
    target_alone_tokens_per_s: float
    recommended: dict[str, Any]


class Baseline(NamedTuple):
    """The fixed length that gains are measured from."""

    length: int
    """Best on dev."""
    spent: Spent
    """On test."""

    @property
    def tokens_per_s(self) -> float:
        """Throughput on test."""
        return float(self.spent.tokens_per_s)


def tune(config: Config, *, write: bool = True, ratio: float | None = None, json: bool = False) -> None:
    """Choose each head's threshold for this hardware by replay; write it into the head's config.json.

    Args:
        config: the experiment.
        write: put `recommended` into every head's config.json.
        ratio: t_target / t_draft of other hardware, in place of the measured times.
        json: print everything as one JSON document on stdout; tables and sentences then go to stderr.
    """
    experiment = Experiment(config)
    if not experiment.heads:
        raise FileNotFoundError(
            f"no heads in {experiment.exported}; run `acceptance-heads export`, or name some in decode.heads"
        )
    with printing(aside=json):
        folder = trace_folder(experiment)
        folder.refuse_other()
        cost = costs_for(experiment, ratio)
        folder.complete()
        dev, test = (join_traces(traces) for traces in zip(*map(folder.load, experiment.datasets), strict=True))
        traces = Splits(dev, test)
        baseline = baseline_on(traces, cost)
        tuned = [
            tune_head(name, head, traces=traces, cost=cost, baseline=baseline)
            for name, head in experiment.heads.items()
        ]
        order = ranked({result.head: result.recommended for result in tuned})
        tuned.sort(key=lambda result: order.index(result.head))
        places = {result.head: written_to(experiment, result) if write else "" for result in tuned}
        threshold_sheet(tuned, cost, places=places, baseline=baseline, folder=experiment.exported).print()
        best = tuned[0]
        say(verdict_of(best, cost, baseline))
        policy, _ = stop_of(best.recommended)
        print(
            "next: acceptance-heads generate --config … --prompt …, which takes this head; by its name: --policy "
            f"{policy}:{experiment.head_paths[best.head]}"
        )
    if json:
        found = [
            asdict(result) | {"gain": result.gain._asdict(), "auto_gain": result.auto_gain._asdict()}
            for result in tuned
        ]
        print(to_json({"costs": asdict(cost), "tuned": found}))


def written_to(experiment: Experiment, result: Tuned) -> str:
    """Write the recommendation of one head; the file, below the folder of exported heads where it is there, or words
    where the head is on the hub and nothing is written.
    """
    path = Path(experiment.head_paths[result.head])
    if not path.is_dir():
        print(f"{path} is on the hub, and nothing is written there: {to_json(result.recommended)}")
        return "nowhere: on the hub"
    update_config(str(path), recommended=result.recommended)
    file = path / "config.json"
    return str(file.relative_to(experiment.exported) if file.is_relative_to(experiment.exported) else file)


def baseline_on(traces: Splits[Trace], cost: CostModel) -> Baseline:
    """The fixed length that is best on dev."""
    lengths = np.arange(traces.dev.max_draft_length + 1)
    dev, test = (cost.spent(replay_settings(trace, FixedLength(lengths))) for trace in traces)
    best = int(dev.tokens_per_s.argmax())
    return Baseline(int(lengths[best]), test.at(best))


def tune_head(name: str, head: AcceptanceHead, *, traces: Splits[Trace], cost: CostModel, baseline: Baseline) -> Tuned:
    """The best threshold on dev, and what it and the rule come to on test."""
    thresholds = 1 / (1 + np.exp(-np.linspace(-7, 7, FINE)))
    dev, test = (cost.spent(replay_settings(trace, HeadPolicy(head, thresholds))) for trace in traces)
    on_dev, on_test = dev.tokens_per_s, test.tokens_per_s
    best = int(on_dev.argmax())
    threshold = round(float(thresholds[best]), 5)
    rule, online = (auto_for(head, traces.dev, cost, is_online=is_online) for is_online in (False, True))
    ruled = Splits(*(cost.spent(replay_settings(trace, rule)).at(0) for trace in traces))
    return Tuned(
        head=name,
        timing=head.timing,
        max_rejection_prob=threshold,
        tokens_per_s_on_dev=float(on_dev[best]),
        tokens_per_s=float(on_test[best]),
        gain=gain_over(baseline.spent, test.at(best)),
        best_tokens_per_s=float(on_test.max()),
        auto_tokens_per_s=float(ruled.test.tokens_per_s),
        auto_gain=gain_over(baseline.spent, ruled.test),
        online_tokens_per_s=float(cost.speeds(traces.test, online)[0]),
        target_alone_tokens_per_s=1 / cost.t_target_s[0],
        recommended={
            "max_rejection_prob": threshold,
            "is_calibrated": False,
            "tokens_per_s": float(on_dev[best]),
            "auto_tokens_per_s": float(ruled.dev.tokens_per_s),
            **{name: getattr(rule, name) for name in _RULE},
            "costs": f"{cost.origin}; {cost.stop_origin}",
            "num_prompts": traces.dev.num_prompts,
        },
    )


def threshold_sheet(
    tuned: Sequence[Tuned], cost: CostModel, *, places: Mapping[str, str], baseline: Baseline, folder: Path
) -> Sheet:
    """A line per head: the threshold, what it is predicted to gain, the rule beside it, and where it was written."""
    elsewhere = any(place not in ("", f"{name}/config.json") for name, place in places.items())
    rows = [
        {
            "head": head.head,
            "what": SAID[head.timing],
            "threshold": f"{head.max_rejection_prob:.4f}",
            "predicted gain": head.gain.words,
            "tokens/s": f"{head.tokens_per_s:.1f}",
            "auto": f"{head.auto_tokens_per_s / baseline.tokens_per_s - 1:+.1%}",
            "auto online": f"{head.online_tokens_per_s / baseline.tokens_per_s - 1:+.1%}",
            **({"written to": places[head.head]} if elsewhere else {}),
        }
        for head in tuned
    ]
    written = f"Paths: below {folder}" if elsewhere else f"Written to HEAD/config.json below {folder}"
    written = written if any(places.values()) else "Nothing is written"
    note = (
        "threshold: max_rejection_prob, the risk of a rejection at which drafting stops, chosen on dev. Gains: on "
        f"test, over the best fixed length ({baseline.length}), predicted from counts and times. auto: the rule that "
        f"needs no threshold. Best on dev first. {written}"
    )
    return Sheet(f"thresholds for {cost.title}", rows, note, names=2)


def verdict_of(best: Tuned, cost: CostModel, baseline: Baseline) -> str:
    """The best head in a sentence, and a plain word where nothing shows that it pays."""
    policy, stops = stop_of(best.recommended)
    gain = best.auto_gain if policy == "auto" else best.gain
    doubt = "" if gain.low > 0 else " That is not beyond chance: more test prompts (decode.num_test) would tell."
    over = f"over the best fixed length ({baseline.length})"
    return f"{cost.where}: head {best.head} {stops}, predicted {gain.words} {over}.{doubt}"
