"""An evaluation as a value: every policy and threshold on one trace, chosen on dev, judged on test.

`evaluated` records the trace if need be, replays everything, and returns an `Evaluation`. It prints nothing but
progress bars and notes on stderr; `evaluation.report.evaluate` prints and writes what it returns.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from decode.experiment import Experiment
from decode.policies.base import Policy
from decode.policies.registry import AUTO_TOKEN_PROB
from evaluation.clock import ClockReport, contradicted
from evaluation.competitor import Competitor, competes, competitors_with, make_competitor
from evaluation.contest import Contest, Replays, Result, hold_each, replay_dataset
from evaluation.costs.machine import costs_for, kept_curves
from evaluation.families import BASELINE, LENGTH_HEAD
from evaluation.gain import Gain, Splits, prompts_needed
from evaluation.played import joined
from evaluation.report.batches import in_batches, setups_of
from evaluation.report.conclusion import conclude
from evaluation.report.frames import frame_of, parts_of, threshold_curve
from evaluation.report.replay import at_costs
from evaluation.report.tables import records_of, stage_rows
from evaluation.report.transfer import source_contests, transfer_records, with_transferred
from evaluation.report.verdict import Record, record_by_the_clock, record_of, together, verdict_sets
from evaluation.table import Table, flat
from evaluation.times import Times
from evaluation.traces.lengths import PredictedLength, fit_length, predict_length
from evaluation.traces.recording import trace_folder
from evaluation.traces.replay import replay_settings
from evaluation.traces.trace import Trace
from evaluation.tuning.calibration import calibrated_on

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, kw_only=True, repr=False)
class Evaluation:
    """What every policy and threshold did on the prompts of some datasets, and which one to use."""

    experiment: Experiment
    replays: Mapping[str, Replays]
    """By dataset."""
    contests: Mapping[str, Sequence[Contest]]
    """By dataset, at each of the evaluation's times, the first of this machine or as given."""
    contest: Contest
    """The contest of the verdict: that of the training set, or over all prompts of several."""
    replayed: Replays
    """What was replayed for the verdict's contest: traces, and arms with all settings."""
    verdict: Record
    """As verdict.json has it: `sentence`, `policy` as `--policy` takes it, `gain`, `notes` and others."""
    batches: Sequence[Record] = ()
    """The rows of batches.csv."""
    batch_tables: Sequence[Table] = ()
    clocks: Sequence[ClockReport] = ()
    """What a clock measured, by dataset."""

    @property
    def times(self) -> Times:
        """The evaluation's own times."""
        return self.contest.times

    @property
    def best(self) -> Result:
        """The fastest policy on dev that can be run, at its setting; `.setting`, `.policy`, `.tokens_per_s`."""
        return self.contest.best

    @property
    def pooled(self) -> Contest | None:
        """The verdict's contest, if it is over the prompts of several datasets."""
        return None if self.contest.dataset in self.contests else self.contest

    @property
    def all_contests(self) -> list[Contest]:
        """The contests of every dataset at all times, then the pooled contest if there is one."""
        contests = [*chain(*self.contests.values())]
        if self.pooled is not None:
            contests.append(self.pooled)
        return contests

    def __repr__(self) -> str:
        num_prompts = self.contest.num_prompts
        return f"Evaluation of {', '.join(self.contests)}, {num_prompts} test prompts: {self.verdict['sentence']}"

    def frame(self) -> pd.DataFrame:
        """A row for each dataset, times, family and split, as `evaluation.report.frames.frame_of` has it: `dataset`,
        `times`, `family`, `setting`, `split`, `tokens_per_s`, `gain`, `low` and `high`.
        """
        return frame_of(self.all_contests)

    def curve(self, family: str, *, dataset: str | None = None) -> pd.DataFrame:
        """The gain of a family by threshold, as `evaluation.report.frames.threshold_curve` has it; `is_equal` marks the
        range of thresholds that dev cannot tell from its choice.

        Raises:
            ValueError: a family or dataset that does not compete, or a family without a threshold.
        """
        return threshold_curve(self._contest_of(dataset), self._result(family, dataset))

    def plot(self, family: str, *, dataset: str | None = None) -> "Figure":
        """`curve` as a figure, with the 95 % interval as a band and the equal thresholds as a thick line."""
        contest = self._contest_of(dataset)
        result = self._result(family, dataset)
        threshold_curve(contest, result)  # refuses a family without a threshold
        from evaluation.report.plots import threshold_figure  # matplotlib takes long to import

        return threshold_figure(contest, [result])

    def by(self, by: str, *, dataset: str | None = None) -> pd.DataFrame:
        """Gains on parts of the test prompts: by category, prompt_length or response_position, as
        `evaluation.report.frames.parts_of` has them.
        """
        traces = [self.replays[name].traces.test for name in self._datasets_of(dataset)]
        return parts_of(self._contest_of(dataset), traces, by)

    def compare(
        self, policy: str | Policy | Result, base: str | Policy | Result, *, dataset: str | None = None
    ) -> Gain:
        """The gain of one policy over another on the same test prompts, with its 95 % interval: paired, predicted at
        the evaluation's times.

        Args:
            policy: a family, at the setting that dev chose; a spec as `--policy` takes it, such as
                entropy:max_sqrt_entropy=0.4 or head:PATH,max_rejection_prob=0.5; a policy; or a `Result`.
            base: the same, of the policy that it is compared with.
            dataset: one of the evaluation's; None: the prompts of the verdict.

        Raises:
            ValueError: no such policy, parameter or dataset, or a value out of range.
        """
        return self._result(policy, dataset).over(self._result(base, dataset))

    def prompts_needed(self, lead: float, *, family: str | None = None, base: str | None = None) -> int | None:
        """How many test prompts would settle a lead of this size, such as 0.03, between two families: its 95 % interval
        would then be above 0, if prompts differ as much as these do. None if the error of the times is as large.

        Args:
            lead: gain of one over the other, not 0.
            family: None: the fastest on dev.
            base: None: the best fixed length.

        Raises:
            ValueError: a lead of 0, or fewer than two test prompts.
        """
        gain = self._result(family or self.best.family, None).over(self._result(base or BASELINE, None))
        if lead == 0 or gain.standard_error is None:
            raise ValueError(
                f"lead is {lead} on {self.contest.num_prompts} test prompts; give another lead than 0, of at least two "
                "prompts (decode.num_test)"
            )
        return prompts_needed(gain._replace(value=lead), self.contest.num_prompts)

    def _contest_of(self, dataset: str | None) -> Contest:
        """The contest of a dataset at the evaluation's own times; None: the verdict's."""
        return self.contest if dataset is None else self.contests[self._datasets_of(dataset)[0]][0]

    def _datasets_of(self, dataset: str | None) -> list[str]:
        """The datasets of the verdict, or the one that is named."""
        if dataset is None:
            return verdict_sets(self.experiment) if self.pooled else [self.contest.dataset]
        if dataset not in self.contests:
            raise ValueError(f"{dataset!r} was not evaluated; the datasets are {', '.join(self.contests)}")
        return [dataset]

    def _result(self, policy: str | Policy | Result, dataset: str | None) -> Result:
        """A policy on the test prompts of a dataset, or of the verdict; a new one is replayed."""
        contest = self._contest_of(dataset)
        if isinstance(policy, Result):
            return policy
        if isinstance(policy, str) and policy in contest.results:
            return contest.results[policy]
        rule = self.experiment.policy(policy) if isinstance(policy, str) else policy
        rule = at_costs(rule, contest.times, self.experiment.decode.max_draft_length)
        traces = [self.replays[name].traces.test for name in self._datasets_of(dataset)]
        played = joined([replay_settings(trace, rule) for trace in traces])
        name = policy if isinstance(policy, str) else type(policy).__name__
        return Result(competitor=Competitor(name, name, rule, ({},)), number=0, played=played, times=contest.times)

    @cached_property
    def records(self) -> list[dict[str, Any]]:
        """The rows of results.csv."""
        rows = []
        for contest in self.all_contests:
            rows += records_of(contest.results, contest)
            rows += transfer_records(contest)
        return rows

    @cached_property
    def stages(self) -> list[dict[str, Any]]:
        """The rows of stages.csv."""
        return [
            {"dataset": contest.dataset, "costs": contest.times.title, **flat(stage)}
            for contest in self.all_contests
            for stage in stage_rows(contest)
        ]


def evaluated(
    experiment: Experiment,
    *,
    sizes: Sequence[int] = (),
    transfer_from: str | None = None,
) -> Evaluation:
    """Replay every policy and threshold of an experiment on its trace, which is recorded first, if need be.

    Args:
        experiment: names datasets, policies, heads and times.
        sizes: of continuous batches, in which every policy is replayed, too.
        transfer_from: decode.dir of an evaluation under another sampling; the settings chosen on its first dataset are
            also judged on every dataset of this one.

    Raises:
        ValueError: settings, heads, times or a trace that do not fit each other.
        FileNotFoundError: models, prompts or a recorded trace that do not exist.
    """
    evaluation = _replayed(experiment, transfer_from, has_batches=bool(sizes))
    if sizes:
        times = [contest.times for contest in next(iter(evaluation.contests.values()))]
        rows, tables = in_batches(experiment, evaluation.replays, times, sizes)
        evaluation = replace(evaluation, batches=rows, batch_tables=tables)
    return evaluation


def clocked(evaluation: Evaluation, *, num_prompts: int, repeats: int) -> Evaluation:
    """The evaluation with times of real generations: of every family at its best setting, in turns, on the first test
    prompts of each dataset. The verdict follows the clocked gains where they contradict the predicted ones.

    Raises:
        ValueError: no response of a dataset is decoded as it was replayed.
    """
    from evaluation.sources.primed import clock_dataset  # the loop takes seconds to import

    experiment = evaluation.experiment
    clocks = []
    for dataset, replays in evaluation.replays.items():
        contest = evaluation.contests[dataset][0]
        test = replays.traces.test
        clocks.append(clock_dataset(experiment, contest, test, num_prompts=num_prompts, repeats=repeats))
    verdict = evaluation.verdict
    report = next(filter(contradicted, clocks), None)
    if report is not None:
        verdict = record_by_the_clock(report, experiment)
    return replace(evaluation, clocks=clocks, verdict=verdict)


def _replayed(experiment: Experiment, transfer_from: str | None, *, has_batches: bool) -> Evaluation:
    competitors = competitors_with(experiment, experiment.heads)
    folder = trace_folder(experiment)
    folder.refuse_other()
    every_times = costs_for(experiment).at_ratios(experiment.decode.ratios)
    sources = source_contests(transfer_from, experiment, competitors, every_times) if transfer_from else {}
    if has_batches:
        setups_of(every_times, experiment.decode.verify_shares, kept_curves(experiment))  # refuses times of no batch
    folder.complete()  # may take hours, so heads, competitors and times were made, and checked, before it
    traces = {dataset: folder.load(dataset) for dataset in experiment.datasets}
    competitors = _competitors_on(traces, experiment)
    replays = {
        dataset: replay_dataset(
            of_dataset,
            competitors,
            perfect_head=experiment.decode.perfect_head,
            name=dataset,
            has_token_rule=competes(AUTO_TOKEN_PROB, experiment),
        )
        for dataset, of_dataset in traces.items()
    }
    contests = {dataset: hold_each(of, every_times, dataset=dataset) for dataset, of in replays.items()}
    contests = transferred_between(contests, experiment, replays, sources)
    contest, replayed = contest_of_verdict(experiment, replays, contests)
    return Evaluation(
        experiment=experiment,
        replays=replays,
        contests=contests,
        contest=contest,
        replayed=replayed,
        verdict=record_of(conclude(contest, replayed.arms), experiment),
    )


def _competitors_on(traces: Mapping[str, Splits[Trace]], experiment: Experiment) -> list[Competitor]:
    """All competitors, with those that are fitted to the dev prompts of the first dataset: heads of other samplings,
    and the length head of a draft of blocks, whose predictions become signals of the traces.
    """
    dev = next(iter(traces.values())).dev
    competitors = competitors_with(experiment, {**experiment.heads, **calibrated_on(dev, experiment.heads)})
    length_head = fit_length(dev)
    if length_head is not None:
        for trace in chain(*traces.values()):
            predict_length(trace, length_head)
        grid = {"extra": np.linspace(-3, dev.longest.max(), 41).tolist()}
        competitors.append(make_competitor(LENGTH_HEAD, LENGTH_HEAD, grid, kind=PredictedLength))
    return competitors


def transferred_between(
    contests: Mapping[str, Sequence[Contest]],
    experiment: Experiment,
    replays: Mapping[str, Replays],
    sources: Mapping[str, Contest],
) -> dict[str, list[Contest]]:
    """The contests of each dataset, with the choices of `sources` (title of times -> contest); without any, sets that
    no head was trained on have the choices of the first dataset.
    """
    first, *_ = contests.values()
    own_sources = {contest.times.title: contest for contest in first}
    result = {}
    for dataset, of_dataset in contests.items():
        result[dataset] = list(of_dataset)
        if sources or not (of_dataset is first or experiment.is_training_set(dataset)):
            for number, contest in enumerate(of_dataset):
                source = (sources or own_sources)[contest.times.title]
                result[dataset][number] = with_transferred(contest, source, replays[dataset])
    return result


def contest_of_verdict(
    experiment: Experiment, replays: Mapping[str, Replays], contests: Mapping[str, Sequence[Contest]]
) -> tuple[Contest, Replays]:
    """The contest of the training sets at the evaluation's own times, and its replays: one dataset's, or those over
    all prompts of several.
    """
    names = verdict_sets(experiment)
    own = contests[names[0]][0]
    if len(names) == 1:
        return own, replays[names[0]]
    return together({name: replays[name] for name in names}, own.times)
