"""python -m evaluation tune: each head's best threshold for this hardware, by replay, beside the rule that needs none
(law 4.11).
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from json import dumps as to_json
from pathlib import Path
from typing import Any

from configs.schema import Config
from decode.experiment import Experiment
from evaluation.competitor import competitors_with
from evaluation.contest import Replays, Result, fastest_on_dev, replay_dataset, result_of
from evaluation.costs.machine import costs_for
from evaluation.families import BASELINE
from evaluation.gain import Gain, Splits
from evaluation.report.recommended import pooled, recommend, write_verdict
from evaluation.table import Table, announce, printing, say
from evaluation.times import Times
from evaluation.traces.recording import trace_folder
from evaluation.traces.trace import join_traces
from heads.model.head import TIMING_LABELS, update_config
from store.progress import Bar

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
    """Best on dev, on the head's raw probabilities."""
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


def tune(config: Config, *, write: bool = True, ratio: float | None = None, json: bool = False) -> None:
    """Choose each head's threshold for this hardware by replay; write it into the head's config.json.

    Args:
        config: the experiment.
        write: put `recommended` into every head's config.json, and the verdict into decode.dir.
        ratio: t_target / t_draft of other hardware, in place of the measured times.
        json: print everything as one JSON document on stdout; tables and sentences then go to stderr.
    """
    experiment = Experiment(config)
    if not experiment.heads:
        raise FileNotFoundError(
            f"no heads in {experiment.exported}; run `acceptance-heads export`, or name some in decode.heads"
        )
    with printing(aside=json):
        folder, grids = trace_folder(experiment), competitors_with(experiment, experiment.heads, has_heads=True)
        folder.refuse_other()
        cost = costs_for(experiment, ratio)
        folder.complete()
        traces = Splits(*map(join_traces, zip(*map(folder.load, experiment.datasets), strict=True)))
        replays = replay_dataset(traces, grids, heads=experiment.heads, perfect_head=False, name="tune")
        baseline, tuned = tuned_heads(replays, cost)
        places = {result.head: written_to(experiment, result) if write else "" for result in tuned}
        threshold_sheet(tuned, cost, places=places, baseline=baseline, folder=experiment.exported).print()
        verdict = recommend(pooled([replays], cost), experiment)
        announce([write_verdict(verdict, experiment.directory)] if write else [])
        say(f"\n{verdict['sentence']}")
        print(f"next: acceptance-heads generate --config … --prompt …, which takes {verdict['policy']}")
    if json:
        found = [
            asdict(result) | {"gain": result.gain._asdict(), "auto_gain": result.auto_gain._asdict()}
            for result in tuned
        ]
        print(to_json({"costs": asdict(cost), "tuned": found, "verdict": verdict}))


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


def tuned_heads(replays: Replays, cost: Times) -> tuple[Result, list[Tuned]]:
    """(the best fixed length, every head at its best threshold on dev and under the rule, the fastest on dev first)."""
    baseline = fastest_on_dev(replays.arms, cost)[BASELINE]
    arms = {arm.competitor.head: arm for arm in replays.arms}
    found = []
    for name in Bar(replays.heads, desc="tune: auto", unit="heads"):
        [result] = fastest_on_dev([arms[name]], cost).values()
        found.append(tune_head(name, result, replays, cost=cost, baseline=baseline))
    return baseline, sorted(found, key=lambda tuned: -tuned.tokens_per_s_on_dev)


def tune_head(name: str, result: Result, replays: Replays, *, cost: Times, baseline: Result) -> Tuned:
    """One head at its threshold, and what the rule comes to."""
    assert result.arm is not None
    assert result.on_dev is not None
    head = replays.heads[name]
    rule, online = replays.autos(head, cost)
    ruled = result_of(rule, 0, cost)
    auto_on_dev = float(cost.spent(rule.dev).tokens_per_s[0])
    return Tuned(
        head=name,
        timing=head.timing,
        max_rejection_prob=result.setting["max_rejection_prob"],
        tokens_per_s_on_dev=result.on_dev,
        tokens_per_s=result.tokens_per_s,
        gain=result.over(baseline),
        best_tokens_per_s=float(cost.tokens_per_s(result.arm.test).max()),
        auto_tokens_per_s=ruled.tokens_per_s,
        auto_gain=ruled.over(baseline),
        online_tokens_per_s=result_of(online, 0, cost).tokens_per_s,
        target_alone_tokens_per_s=1 / cost.t_target_s[0],
        recommended={
            "is_calibrated": False,
            **result.setting,
            "tokens_per_s": result.on_dev,
            "auto_tokens_per_s": auto_on_dev,
            "fixed_length": int(baseline.setting["k"]),
            "fixed_tokens_per_s": baseline.on_dev,
            **{key: getattr(rule.competitor.policy, key) for key in _RULE},
            "costs": f"{cost.origin}; {cost.stop_origin}",
            "num_prompts": replays.traces.dev.num_prompts,
        },
    )


def threshold_sheet(
    tuned: Sequence[Tuned], cost: Times, *, places: Mapping[str, str], baseline: Result, folder: Path
) -> Table:
    """A line per head: the threshold, what it is predicted to gain, the rule beside it, and where it was written."""
    elsewhere = any(place not in ("", f"{name}/config.json") for name, place in places.items())
    fixed = baseline.tokens_per_s
    rows = [
        {
            "head": head.head,
            "what": TIMING_LABELS[head.timing],
            "threshold": f"{head.max_rejection_prob:.4f}",
            "predicted gain": head.gain.words,
            "tokens/s": f"{head.tokens_per_s:.1f}",
            "auto": f"{head.auto_tokens_per_s / fixed - 1:+.1%}",
            "auto online": f"{head.online_tokens_per_s / fixed - 1:+.1%}",
            **({"written to": places[head.head]} if elsewhere else {}),
        }
        for head in tuned
    ]
    written = f"Paths: below {folder}" if elsewhere else f"Written to HEAD/config.json below {folder}"
    written = written if any(places.values()) else "Nothing is written"
    note = (
        "threshold: max_rejection_prob, the risk of a rejection at which drafting stops, chosen on dev. Gains: on "
        f"test, over the best fixed length ({baseline.setting['k']}), predicted from counts and times. auto: the rule "
        f"that needs no threshold. Best on dev first. {written}"
    )
    return Table(f"thresholds for {cost.title}", rows, note, names=2)
