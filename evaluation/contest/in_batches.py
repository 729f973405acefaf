"""Every policy in continuous batches of several sizes: settings chosen on dev at each size and cost, reported on test
(laws 4.10, 4.13).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch

from decode.policies.batch import BatchAuto, BatchCosts, Curve
from evaluation.batches.load import Load, LoadSpent, load_of, queue_of
from evaluation.batches.lockstep import step_through
from evaluation.competitor import Competitor
from evaluation.contest.arms import Replays, by_family, fastest_on_dev
from evaluation.families import BASELINE, BOUNDS, PERFECT, families, family
from evaluation.flag_types import Sizes
from evaluation.gain import Splits
from evaluation.table import Table, crossed, flat, wide_console
from evaluation.times import RECORDED, Times
from evaluation.traces.bounds import ScoreHead
from evaluation.traces.replay import Rounds, replay_rounds
from evaluation.traces.trace import CONFIDENCE, Trace
from evaluation.tuning.rule import batch_auto_for
from heads.measures.histogram import observe
from heads.measures.scores import fit_logistic
from heads.model.head import AcceptanceHead, Timing
from store.progress import Bar


@dataclass(frozen=True, kw_only=True)
class BatchResult:
    """One family at one batch size: its setting of the highest throughput on dev, on test."""

    batch_size: int
    family: str
    name: str
    setting: Mapping[str, Any]
    tokens_per_s: float
    """Throughput of the whole batch."""
    gain: float
    """Throughput over that of the best fixed length, less 1."""
    request_s: float
    """Mean seconds from a request's first round to its end."""


class Setup(NamedTuple):
    """Costs of batches: of a cost model, with what a verified token takes."""

    cost: Times
    verify_share: float | None
    """Seconds that each further verified token takes, over those of a draft step; None: it was measured."""
    measured: BatchCosts | None = None
    """Curves of the batched loop without stops; where there are none, t_target(k) of one sequence stands for
    t_target(tokens).
    """

    def curves(self, stop_kind: str) -> BatchCosts:
        """The curves of law 4.13 for policies of one kind of stop; unless measured, a draft step takes the same for any
        number.
        """
        stop_s = self.cost.stop_s(stop_kind)
        if self.measured is not None:
            return BatchCosts(self.measured.draft.plus(stop_s), self.measured.target)
        draft = Curve.line(self.cost.t_draft_s + stop_s)
        if self.verify_share is not None:
            return BatchCosts(draft, Curve.line(self.cost.t_target_s[0], self.verify_share * self.cost.t_draft_s))
        seconds = self.cost.t_target_s
        return BatchCosts(draft, Curve(tuple(float(k) for k in range(1, len(seconds) + 1)), seconds))

    @property
    def title(self) -> str:
        """Name of the setup in titles of tables."""
        measured_on = "batches" if self.measured is not None else "one sequence"
        verifying = (
            f"curves of {measured_on}"
            if self.verify_share is None
            else f"a verified token costs {self.verify_share:g} t_draft"
        )
        return f"{self.cost.title}; {verifying}"


@dataclass(frozen=True)
class Entry:
    """A grid, round by round on one split, as it would run in batches."""

    grid: Competitor
    trace: Trace

    @cached_property
    def rounds(self) -> Rounds:
        """Rounds of every setting and row."""
        return replay_rounds(self.trace, self.grid.policy)

    def loads(self, size: int) -> list[Load]:
        """The batch's load under every setting."""
        return [self.load(setting, size) for setting in range(len(self.grid.settings))]

    def load(self, setting: int, size: int) -> Load:
        """The batch's load under one setting."""
        num_rows = len(self.trace.rows)
        first, end = self.rounds.lane.searchsorted([setting * num_rows, (setting + 1) * num_rows])
        rounds = Rounds(*(column[first:end] for column in self.rounds))
        return load_of(rounds._replace(lane=rounds.lane - setting * num_rows), queue_of(num_rows, size), size)


class BatchContest:
    """The comparison of all families on one dataset in batches."""

    def __init__(self, replays: Replays, setups: Sequence[Setup], sizes: Sequence[int]) -> None:
        """Args:
        replays: of the dataset, one sequence at a time: of each family of heads, the head that is fastest there
            competes here.
        setups: costs to compare at; the first decides about heads.
        sizes: of batches.
        """
        self._replays, self._setups, self._sizes = replays, setups, sizes

    def results(self) -> Iterator[tuple[Setup, list[BatchResult]]]:
        """Results of every setup in turn, all sizes and families."""
        cost, traces = self._setups[0].cost, self._replays.traces
        # a bound knows of no other sequence, and bounds nothing in a batch; a perfect head in the batch's rule does
        grids = [
            fastest_on_dev(arms, cost).arm.grid
            for name, arms in by_family(self._replays.arms).items()
            if name not in BOUNDS
        ]
        entries = [Splits(Entry(grid, traces.dev), Entry(grid, traces.test)) for grid in grids]
        members = [(grid, dev, size) for grid, (dev, _) in zip(grids, entries, strict=True) for size in self._sizes]
        loads = {
            (grid.family, size): dev.loads(size)
            for grid, dev, size in Bar(members, desc="batches: replay on dev", unit="loads")
        }
        for setup in self._setups:
            found = []
            for size in Bar(self._sizes, desc=f"batches: ratio {setup.cost.ratio:.3g}", unit="sizes"):
                chosen = [self._best(dev, test, loads[dev.grid.family, size], setup, size) for dev, test in entries]
                chosen += list(self._autos(setup, size))
                baseline = next(spent.tokens_per_s for grid, _, spent in chosen if grid.family == BASELINE)
                found += [
                    BatchResult(
                        batch_size=size,
                        family=grid.family,
                        name=grid.name,
                        setting=setting,
                        tokens_per_s=spent.tokens_per_s,
                        gain=spent.tokens_per_s / baseline - 1,
                        request_s=spent.request_s,
                    )
                    for grid, setting, spent in chosen
                ]
            yield setup, found

    def _best(
        self, dev: Entry, test: Entry, loads: Sequence[Load], setup: Setup, size: int
    ) -> tuple[Competitor, Mapping[str, Any], LoadSpent]:
        costs = setup.curves(dev.grid.policy.stop_kind)
        on_dev = [load.spent(costs).tokens_per_s for load in loads]
        best = on_dev.index(max(on_dev))
        return dev.grid, dev.grid.settings[best], test.load(best, size).spent(costs)

    def _autos(self, setup: Setup, size: int) -> Iterator[tuple[Competitor, Mapping[str, Any], LoadSpent]]:
        """The batch's rule, with a head of each timing: lambda from dev, or learned online with the head; then with the
        draft's own confidence where it has one, last with a perfect head.
        """
        traces, variants = self._replays.traces, {}
        for timing, heads in self._rivals(setup.cost).items():
            kinds = [BatchAuto(head, setup.curves("")).stop_kind for head in heads]
            rules = [
                batch_auto_for(head, traces.dev, setup.curves(kind), size)
                for head, kind in zip(heads, kinds, strict=True)
            ]
            fastest = max(rules, key=lambda rule: rule.throughput or 0.0)
            variants[f"auto_{timing}"] = fastest
            if fastest.can_learn:
                variants[f"auto_{timing}_learning"] = _learning(fastest)
        if CONFIDENCE in traces.dev.signals:
            own = batch_auto_for(ScoreHead("confidence"), traces.dev, setup.curves(""), size)
            variants |= {"auto_confidence": own, "auto_confidence_learning": _learning(own)}
        if traces.dev.block_size is not None:
            estimator = batch_auto_for(estimator_of(traces.dev), traces.dev, setup.curves(""), size)
            variants |= {"auto_max_prob": estimator, "auto_max_prob_learning": _learning(estimator)}
        if PERFECT in by_family(self._replays.arms):
            variants[PERFECT] = batch_auto_for(ScoreHead("perfect", "drawn"), traces.dev, setup.curves(""), size)
        for name, rule in variants.items():
            load = step_through(traces.test, rule, queue_of(len(traces.test.rows), size), size)
            yield Competitor(name, name, rule, ({},)), {}, load.spent(rule.costs)

    def _rivals(self, cost: Times) -> dict[Timing, list[AcceptanceHead]]:
        """Two heads of each timing: the fastest for one sequence, and the fastest of the cheapest, since in a batch a
        head gains less.
        """
        best = self._replays.best(cost)
        rivals = {timing: [head] for timing, head in best.items()}
        for timing, head in self._replays.cheapest(cost).items():
            if head is not best[timing]:
                rivals[timing].append(head)
        return rivals


def estimator_of(trace: Trace) -> ScoreHead:
    """The estimator of logit(max q) as all that verification reveals on a trace of blocks has taught it."""
    assert trace.num_passing is not None, "blocks are a feature draft's"
    lengths, drafts = trace.branch_lengths, slice(trace.num_positions, None)
    place = np.arange(lengths.sum()) - np.repeat(lengths.cumsum() - lengths, lengths)
    is_revealed = torch.from_numpy(place <= np.repeat(trace.num_passing, lengths))
    logit = torch.from_numpy(trace.logit(ScoreHead("max_prob"))[drafts])[is_revealed]
    prob = torch.from_numpy(trace.signals["acceptance_prob"][drafts])[is_revealed]
    slope, offset = map(float, fit_logistic(observe(logit[None], prob[None])))
    return ScoreHead("max_prob", calibration_shift=offset / slope, temperature=1.0 / slope)


def _learning(rule: BatchAuto) -> BatchAuto:
    """The rule that learns lambda and its head's calibration on the job."""
    return replace(rule, throughput=None, is_learning=True)


def sizes_of(asked: Sizes | None) -> tuple[int, ...] | None:
    """The sizes of batches that a command line asks for; None where it asks for no batches.

    Raises:
        ValueError: what is no list of numbers, no size at all, a batch of no sequence.
    """
    if asked is None:
        return None
    listed = asked.split(",") if isinstance(asked, str) else [asked] if isinstance(asked, int) else asked
    try:
        sizes = tuple(int(size) for size in listed)
    except ValueError:
        raise ValueError(f"--batch is {asked}; name sizes of batches as numbers, such as 1,4,16") from None
    if not sizes:
        raise ValueError("--batch names no size; give some, such as 1,4,16, or leave it out")
    for size in sizes:
        if size < 1:
            raise ValueError(f"--batch has {size}; a batch is of at least 1 sequence")
    return sizes


def setups_of(
    costs: Sequence[Times], verify_shares: Sequence[float], measured: BatchCosts | None = None
) -> list[Setup]:
    """Every cost with every share of a verified token; of measured or recorded times one setup, with the curves of
    batches if there are any.
    """
    return [
        setup
        for cost in costs
        for setup in (
            [Setup(cost, None, measured)]
            if cost.origin in ("measured", RECORDED)
            else [Setup(cost, share) for share in verify_shares]
        )
    ]


def compare_in_batches(
    replays_of: Mapping[str, Replays], setups: Sequence[Setup], sizes: Sequence[int]
) -> pd.DataFrame:
    """Print one table per dataset and setup, each as soon as it is there; all of them as one frame."""
    frames = []
    for dataset, replays in replays_of.items():
        num_rows = len(replays.traces.test.rows)
        if max(sizes) > num_rows:
            wide_console().print(
                f"{dataset}: a batch of more than {num_rows} has some of its {num_rows} test responses twice; raise "
                "decode.num_test"
            )
        for setup, results in BatchContest(replays, setups, sizes).results():
            batch_sheet(setup, results, dataset=dataset).print()
            frames.append(batch_frame(setup, results, dataset=dataset))
    return pd.concat(frames)


def batch_frame(setup: Setup, results: Sequence[BatchResult], *, dataset: str) -> pd.DataFrame:
    """Results as rows of batches.csv."""
    where = {
        "dataset": dataset,
        "ratio": setup.cost.ratio,
        "costs": setup.cost.origin,
        "verify_share": setup.verify_share,
    }
    settings = (", ".join(f"{key}={value}" for key, value in result.setting.items()) for result in results)
    return pd.DataFrame(
        [{**where, **flat(result), "setting": setting} for result, setting in zip(results, settings, strict=True)]
    )


def batch_sheet(setup: Setup, results: Sequence[BatchResult], *, dataset: str) -> Table:
    """Families down, batch sizes across."""
    names = list(families())
    ordered = sorted(results, key=lambda result: (names.index(result.family), result.batch_size))
    return Table(
        f"{dataset} in batches, settings chosen on dev at each size; {setup.title}",
        crossed(
            "policy", ((family(result.family).label, f"batch {result.batch_size}", _cell(result)) for result in ordered)
        ),
        (
            "setting; tokens/s of the whole batch, over the best fixed length's; seconds of a request. Predicted (law "
            "4.13). No oracle: it knows of no other sequence, so that it bounds nothing in a batch"
            + (
                ""
                if any(result.family == PERFECT for result in results)
                else "; no perfect head: the trace was recorded with decode.perfect_head false"
            )
        ),
    )


def _cell(result: BatchResult) -> str:
    value = " ".join(f"{value:g}" for value in result.setting.values())
    gain = "" if result.family == BASELINE else f" {result.gain:+.1%}"
    return f"{value + '; ' if value else ''}{result.tokens_per_s:.1f}{gain}; {result.request_s:.3g} s"
