"""python -m evaluation tune: each head's best threshold for this hardware, by replay, beside the rule that needs none
(law 4.11).
"""

from collections.abc import Container, Iterator, Sequence
from dataclasses import asdict
from json import dumps as to_json
from pathlib import Path

from configs.load import accepts_yaml
from configs.schema import Config
from decode.experiment import Experiment
from decode.policies.registry import AUTO_TOKEN_PROB
from evaluation.competitor import CALIBRATED, competes, competitors_with, words_of
from evaluation.contest import Contest, Replays, fastest_on_dev, hold, replay_dataset, result_of
from evaluation.costs.machine import costs_for
from evaluation.report.conclusion import Range, conclude, near_best
from evaluation.report.evaluated import Evaluation
from evaluation.report.verdict import Record, publish_verdict, range_record, record_of, tell, verdict_sets
from evaluation.table import Table, announce, printing
from evaluation.times import LINE
from evaluation.traces.recording import join_splits, trace_folder
from evaluation.tuning.rule import Index
from heads.model.head import update_config
from store.progress import Bar

_RULE = (*LINE, "throughput", *Index._fields, "prior_profit", "prior_rounds")
"""Keys that `auto` reads back."""
_NUM_SHOWN = 5
"""Rows of the table, which has the fastest heads on dev."""
_NUM_BRIEF = 3
"""The same within `all`."""


@accepts_yaml
def tune(
    config: Config,
    *,
    write: bool | None = None,
    ratio: float | None = None,
    all: bool = False,
    json: bool = False,
    evaluation: Evaluation | None = None,
) -> None:
    """Run `acceptance-heads tune`; `configs.measuring` documents its flags.

    Args:
        evaluation: of the same config: its replays are read again instead of replaying the trace, unless a `ratio` asks
            for other times or decode.policies kept heads out of it.
    """
    if write is None:
        write = ratio is None
    experiment = Experiment(config) if evaluation is None else evaluation.experiment
    if not experiment.heads:
        raise FileNotFoundError(
            f"no heads in {experiment.exported}; run `acceptance-heads export`, or name some in decode.heads"
        )
    with printing(json) as publish:
        if evaluation is None or ratio is not None or not _has_every_head(evaluation):
            evaluation = _evaluated(experiment, ratio)
        contest = evaluation.contest
        verdict = evaluation.verdict
        tuned = tuned_heads(evaluation.replayed, contest, names=experiment.heads)
        for row in tuned:
            row["recommended"]["verdict"] = verdict["sentence"]
        if config.is_step:
            _brief(tuned, contest).print()
        else:
            threshold_table(tuned, contest, num_rows=len(tuned) if all else _NUM_SHOWN).print()
        if write:
            announce([*_write(experiment, tuned), *publish_verdict(verdict, experiment, experiment.directory)])
        tell(verdict, experiment, is_written=write)
        rows = [_in_json(row) for row in tuned]
        publish({"costs": asdict(contest.times), "tuned": rows, "verdict": verdict})


def _has_every_head(evaluation: Evaluation) -> bool:
    names = {arm.competitor.head for arm in evaluation.replayed.arms}
    return evaluation.experiment.heads.keys() <= names


def _evaluated(experiment: Experiment, ratio: float | None) -> Evaluation:
    """What tuning needs of an evaluation: the prompts of the verdict at one set of times, whether or not
    decode.policies names heads.
    """
    folder = trace_folder(experiment)
    competitors = competitors_with(experiment, experiment.heads, has_heads=True)
    folder.refuse_other()
    times = costs_for(experiment, ratio)
    folder.complete()
    names = verdict_sets(experiment)
    traces = join_splits(map(folder.load, names))
    replays = replay_dataset(
        traces, competitors, perfect_head=False, name="tune", has_token_rule=competes(AUTO_TOKEN_PROB, experiment)
    )
    contest = hold(replays, times, dataset=" + ".join(names))
    return Evaluation(
        experiment=experiment,
        replays={contest.dataset: replays},
        contests={contest.dataset: [contest]},
        contest=contest,
        replayed=replays,
        verdict=record_of(conclude(contest, replays.arms), experiment),
    )


def _write(experiment: Experiment, tuned: Sequence[Record]) -> Iterator[Path]:
    for row in tuned:
        path = Path(experiment.head_paths[row["head"]])
        if path.is_dir():
            update_config(str(path), recommended=row["recommended"])
            yield path / "config.json"
        else:
            print(f"{path} is on the hub, and nothing is written there: {to_json(row['recommended'])}")


def tuned_heads(replays: Replays, contest: Contest, *, names: Container[str]) -> list[Record]:
    """Every head of these names at the threshold that dev chose, the best threshold on test, and the rule of law 4.11
    with lambda from dev and learned online; gains over the best fixed length, on test. The fastest on dev first.
    """
    rows, times, baseline = [], contest.times, contest.baseline
    arms = [arm for arm in replays.arms if arm.competitor.head in names]
    for arm in Bar(arms, desc="tune: auto", unit="heads", leave=False):
        (head,) = arm.competitor.policy.heads
        [result] = fastest_on_dev([arm], times).values()
        [[rule, online]] = replays.autos(head, [times])
        ruled = result_of(rule, 0, times)
        recommended = {
            **result.setting,
            "tokens_per_s": result.on_dev,
            "auto_tokens_per_s": float(times.throughput(rule.dev).tokens_per_s[0]),
            "fixed_length": _fixed_length(contest),
            "fixed_tokens_per_s": baseline.on_dev,
            **{key: getattr(rule.competitor.policy, key) for key in _RULE},
            "costs": f"{times.origin}; {times.stop_origin}",
            "num_prompts": replays.traces.dev.num_prompts,
            "gain": list(result.over(baseline)[:3]),
        }
        row = {
            "head": arm.competitor.head,
            "timing": head.timing,
            "max_rejection_prob": result.setting["max_rejection_prob"],
            CALIBRATED: result.setting[CALIBRATED],
            "tokens_per_s_on_dev": result.on_dev,
            "tokens_per_s": result.tokens_per_s,
            "gain": result.over(baseline),
            "within_noise": near_best(result, times),
            "best_tokens_per_s": float(times.tokens_per_s(arm.test).max()),
            "auto_tokens_per_s": ruled.tokens_per_s,
            "auto_gain": ruled.over(baseline),
            "online_tokens_per_s": result_of(online, 0, times).tokens_per_s,
            "target_alone_tokens_per_s": 1 / times.alone_s,
            "recommended": recommended,
        }
        rows.append(row)
    return sorted(rows, key=lambda row: -row["tokens_per_s_on_dev"])


def threshold_table(tuned: Sequence[Record], contest: Contest, *, num_rows: int) -> Table:
    """The first `num_rows` of the tuned heads."""
    fixed = contest.baseline.tokens_per_s
    rows = [
        {
            "head": row["head"],
            "threshold": _threshold_text(row),
            "within noise": _range_text(row["within_noise"]),
            "dev tokens/s": f"{row['tokens_per_s_on_dev']:.1f}",
            "predicted gain": row["gain"].words,
            "auto": f"{row['auto_tokens_per_s'] / fixed - 1:+.1%}",
            "auto online": f"{row['online_tokens_per_s'] / fixed - 1:+.1%}",
        }
        for row in tuned[:num_rows]
    ]
    note = (
        f"{_order_text(tuned, num_rows)}. threshold: the probability of a rejection (max_rejection_prob) at which "
        "drafting stops, calibrated unless it says raw, chosen on dev; within noise: thresholds that are not slower "
        f"there by more than noise. predicted gain: on test, over the best fixed length, {_fixed_length(contest)}; "
        "auto: of the rule that needs no threshold"
    )
    return Table(f"thresholds for {contest.times.title}", rows, note)


def _brief(tuned: Sequence[Record], contest: Contest) -> Table:
    """The first columns of the fastest heads, with a short note: what `all` prints."""
    table = threshold_table(tuned, contest, num_rows=_NUM_BRIEF)
    rows = [{column: row[column] for column in table.columns[:5]} for row in table.rows]
    note = f"{_order_text(tuned, _NUM_BRIEF)}. gain: on test, over the best fixed length, {_fixed_length(contest)}"
    return Table("thresholds", rows, note)


def _order_text(tuned: Sequence[Record], num_rows: int) -> str:
    if len(tuned) <= num_rows:
        return "The fastest on dev first"
    return f"The {num_rows} of {len(tuned)} heads that are fastest on dev (`tune --all` prints every head)"


def _fixed_length(contest: Contest) -> int:
    return int(contest.baseline.setting["k"])


def _threshold_text(row: Record) -> str:
    value = f"{row['max_rejection_prob']:.4f}"
    return value if row[CALIBRATED] else f"{value} {words_of(CALIBRATED, value=False)}"


def _range_text(within_noise: Range | None) -> str:
    if within_noise is None:
        return ""
    _, values = within_noise
    return f"{values[0]:.3f}-{values[-1]:.3f}"


def _in_json(row: Record) -> Record:
    gains = {name: row[name]._asdict() for name in ("gain", "auto_gain")}
    return {**row, **gains, "within_noise": range_record(row["within_noise"])}
