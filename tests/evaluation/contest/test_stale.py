"""Where a clock contradicts a prediction, the stale times are named, and the contest by the clock decides."""

from dataclasses import replace

import numpy as np
import pytest

from decode.experiment import Experiment
from decode.policies import CumulativeTokenProb, FixedLength
from decode.policies.batch import Curve
from evaluation.clock import ClockReport, contradicted, contradiction, report_of, stale_times
from evaluation.competitor import Arm, Competitor
from evaluation.contest import Contest, Result, result_of
from evaluation.families import ALONE, BASELINE, PRODUCT
from evaluation.report.conclusion import conclude
from evaluation.report.verdict import record_by_the_clock, record_of
from evaluation.times import Times
from evaluation.traces.replay import replay_settings
from lm import Sampling
from tests.evaluation.commands import config_with
from tests.toys.small_pair import trace
from tests.toys.times import times_by_length

COST = times_by_length(0.002, (0.005, 0.006, 0.007, 0.008), "measured", {"token_prob": 0.0002})
TWICE = replace(COST.target, seconds=tuple(2 * seconds for seconds in COST.target.seconds))
POLICIES = {ALONE: FixedLength(0), BASELINE: FixedLength(4), PRODUCT: CumulativeTokenProb(0.3)}
SETTINGS = {ALONE: {"k": 0}, BASELINE: {"k": 4}, PRODUCT: {"min_token_prob": 0.3}}


@pytest.fixture(scope="module")
def runners() -> list[Result]:
    recorded = trace(Sampling(temperature=0.8), copies=3)
    made = []
    for name, policy in POLICIES.items():
        played = replay_settings(recorded, policy)
        made.append(
            result_of(Arm(Competitor(name, name, policy, (SETTINGS[name],)), played, played), 0, COST, on_dev=1.0)
        )
    return made


def clocked(runners: list[Result], true: Times) -> ClockReport:
    """The report of a clock on which these times are true."""
    on_clock = []
    for runner in runners:
        whole_s = true.time_s(runner.played)
        verifying_s = runner.played.lengths @ true.target_s(np.arange(runner.played.lengths.shape[-1]))
        seconds = {"whole_s": whole_s, "verifying_s": verifying_s, "drafting_s": whole_s - verifying_s}
        on_clock.append(replace(runner.played, seconds=seconds | {"first_token_s": whole_s}))
    return report_of(on_clock, runners, COST, dataset="made")


@pytest.mark.parametrize(
    ("changes", "stale"),
    [
        ({}, []),
        # twice as slow in all it does
        ({"draft": Curve.line(0.004), "target": TWICE, "t_stop_s": {"token_prob": 0.0004}}, []),
        ({"t_stop_s": {"token_prob": 0.008}}, ["the stop of product of token probabilities"]),
        ({"draft": Curve.line(0.008), "t_stop_s": {"token_prob": 0.0008}}, ["the draft step"]),
        ({"target": replace(TWICE, seconds=(0.005, *TWICE.seconds[1:]))}, ["the verification of drafted tokens"]),
    ],
)
def test_the_times_that_the_clock_contradicts_are_named_with_the_command_that_renews_them(runners, changes, stale):
    report = clocked(runners, replace(COST, **changes))
    assert stale_times(report) == stale
    sentence = contradiction(report)
    assert bool(contradicted(report)) == bool(stale)
    assert "`acceptance-heads costs --again`" in sentence
    assert all(name in sentence for name in stale)
    given = replace(report, predicted=replace(report.predicted, times=replace(COST, origin="given")))
    assert "leave out the given times" in contradiction(given)


def test_the_contest_by_the_clock_has_the_clocked_gains(runners):
    true = replace(COST, t_stop_s={"token_prob": 0.008})
    report = clocked(runners, true)
    contest = Contest("made", COST, {runner.family: runner for runner in runners[1:]})
    (row,) = (row for row in report.rows if row["family"] == PRODUCT)
    assert report.clocked.gain(PRODUCT) == row["clocked_gain"]
    assert report.clocked.gain(PRODUCT).value < contest.gain(PRODUCT).value
    alone, product = (true.tokens_per_s(runner.played)[0] for runner in (runners[0], runners[2]))
    assert report.speed_up(PRODUCT) == pytest.approx(product / alone)


def test_the_verdict_follows_a_clock_that_contradicts_the_prediction(runners):
    """Predicted, the product wins; its stop turns out to take three draft steps."""
    config = config_with(["--config=configs/tiny.yaml"], "evaluate")
    contest = Contest("made", COST, {runner.family: runner for runner in runners[1:]})
    report = clocked(runners, replace(COST, t_stop_s={"token_prob": 0.008}))
    predicted = record_of(conclude(contest), Experiment(config))
    record = record_by_the_clock(report, Experiment(config))
    assert predicted["policy"].startswith(PRODUCT)
    assert record["policy"].startswith(BASELINE)
    assert "contradict the predicted ones" in record["sentence"]
    assert record["speed"].startswith("on a clock")
    assert "the stop of product of token probabilities" in record["notes"][0]
