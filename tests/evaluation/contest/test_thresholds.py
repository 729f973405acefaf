"""Thresholds are on calibrated probabilities, those of SpecDec++'s own heads on raw ones; what was chosen is named."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from configs.schema import Config, DecodeConfig, HeadsConfig, ModelSource, PairConfig
from decode.experiment import Experiment
from decode.policies import HeadPolicy
from decode.policies.registry import LOGISTIC, parse_policy, registered
from evaluation.competitor import competitors_of, label_of, values_of
from evaluation.contest import Contest, fastest_on_dev, hold, replay_arms, replay_dataset, result_of
from evaluation.gain import MIN_PROMPTS, Splits
from evaluation.report.conclusion import conclude, near_best
from evaluation.report.plots import threshold_figures, thresholds
from evaluation.report.verdict import record_of
from evaluation.traces.replay import replay_settings
from heads import AcceptanceHead
from heads.model.head import Provenance
from lm import Sampling
from tests.toys.small_pair import trace
from tests.toys.times import flat_times

COST = flat_times(0.2, 1.0)


def biased(timing: str, *, scalars: bool = True) -> AcceptanceHead:
    """A random head that was trained with reject weight 6 at temperature 2."""
    torch.manual_seed(0)
    weights = Provenance(reject_weight=6.0, calibration_temperature=2.0)
    head = AcceptanceHead(16, 1, timing, scalars, provenance=weights).eval()
    torch.nn.init.normal_(head.out.weight)
    return head


HEADS = {
    "fed": biased("fed"),
    "own": biased("fed", scalars=False),
    "drawn": biased("drawn"),
    "prefix": biased("prefix"),
}
OWN_GRID = {"head": {"max_rejection_prob": [0.3, 0.6], "is_calibrated": [False, True]}}


def test_every_head_races_calibrated_thresholds_but_specdecs_own_and_values_of_the_yaml_replace_both():
    _, *grids = competitors_of({}, HEADS, max_draft_length=5, policies=("head",))
    is_calibrated = {grid.head: {setting["is_calibrated"] for setting in grid.settings} for grid in grids}
    assert is_calibrated == {"fed": {True}, "own": {False}, "drawn": {True}, "prefix": {True}}
    assert all([setting["max_rejection_prob"] for setting in grid.settings] == [*LOGISTIC] for grid in grids)
    _, *grids = competitors_of(OWN_GRID, HEADS, max_draft_length=5, policies=("head",))
    assert [len(grid.settings) for grid in grids] == [4] * 4


@pytest.mark.parametrize("name", HEADS)
def test_raw_and_calibrated_thresholds_side_by_side_are_each_replayed_as_alone(splits, name):
    (_, grid) = competitors_of(OWN_GRID, {name: HEADS[name]}, max_draft_length=5, policies=("head",))
    together = replay_settings(splits.test, grid.policy)
    for number, setting in enumerate(grid.settings):
        alone = replay_settings(splits.test, HeadPolicy(HEADS[name], **setting))
        assert np.array_equal(together.lengths[number], alone.lengths[0]), setting
    assert not np.array_equal(together.lengths[0], together.lengths[1])


def test_tables_plots_and_the_verdict_name_the_probability_and_the_verdict_decodes_by_it(splits, tmp_path):
    calibrated = {"max_rejection_prob": 0.731, "is_calibrated": True}
    assert label_of("head:a", calibrated) == "a: max_rejection_prob=0.731, calibrated"
    assert values_of(calibrated | {"is_calibrated": False}) == "0.731, raw"
    AcceptanceHead(96, 0, "drawn").save_pretrained(tmp_path / "exported" / "drawn")
    pair = PairConfig(**{name: ModelSource(path=f"checkpoints/tiny/{name}") for name in ("target", "draft")})
    dirs = {"heads": HeadsConfig(dir=str(tmp_path)), "decode": DecodeConfig(dir=str(tmp_path / "decode"))}
    arms = list(replay_arms(competitors_of({}, HEADS, max_draft_length=5), splits))
    contest = Contest("made", COST, fastest_on_dev(arms, COST))
    on = {name: [plot.caption for plot in thresholds(contest) if f">{name}<" in plot.svg] for name in LABELS}
    assert [len(captions) for captions in on.values()] == [1, 1]
    assert ["on raw probabilities" in caption for (caption,) in on.values()] == [True, False]
    head = contest.results["head_drawn"]
    seconds = {"whole_s": COST.time_s(head.played) / 100}
    winning = replace(head, played=replace(head.played, seconds=seconds), times=None, on_dev=1e9)
    contest = replace(contest, results=contest.results | {"head_drawn": winning})
    verdict = record_of(conclude(contest), Experiment(Config(pair=pair, **dirs)))
    assert f"head drawn at {head.setting['max_rejection_prob']:.3g}, calibrated" in verdict["sentence"]
    policy = parse_policy(verdict["policy"])
    assert (policy.max_rejection_prob, policy.is_calibrated) == (head.setting["max_rejection_prob"], True)


LABELS = ("SpecDec++", "best head, drawn-time")


@pytest.fixture(scope="module")
def drawn() -> tuple[Contest, dict[str, Figure]]:
    """A contest with enough prompts for intervals, and the figure of each threshold."""
    splits = Splits(*(trace(Sampling(temperature=0.6), copies=6, seed=seed) for seed in (1, 2)))
    heads = {name: HEADS[name] for name in ("own", "drawn")}
    replays = replay_dataset(splits, competitors_of({}, heads, max_draft_length=5), perfect_head=False, name="made")
    contest = hold(replays, flat_times(0.2, 1.0), dataset="made")
    assert contest.num_prompts >= MIN_PROMPTS
    return contest, threshold_figures(contest)


def test_threshold_plots_share_one_scale_and_name_the_parameter_and_the_policy_of_the_command_line(drawn):
    _, figures = drawn
    assert set(figures) == {
        "max_rejection_prob of head",
        "max_rejection_prob of head on raw probabilities",
        "max_sqrt_entropy of entropy",
        "min_max_prob of max_prob",
        "min_token_prob of cumulative_token_prob",
        "min_token_prob of token_prob",
    }
    for axis, figure in figures.items():
        parameter, _, policy = axis.partition(" on ")[0].partition(" of ")
        assert parameter in registered(policy).values(5), "so that YAML and --policy take it"
        assert figure.axes[0].get_xlabel() == axis
    assert len({figure.axes[0].get_ylim() for figure in figures.values()}) == 1
    low, high = figures["min_max_prob of max_prob"].axes[0].get_ylim()
    choices = [line for figure in figures.values() for line in figure.axes[0].lines if line.get_marker() == "o"]
    assert len(choices) >= len(figures)
    assert all(low < float(choice.get_ydata()[0]) < high for choice in choices)


def test_a_threshold_plot_has_the_gain_its_band_the_equal_thresholds_and_the_choice_of_dev(drawn):
    contest, figures = drawn
    axes = figures["min_max_prob of max_prob"].axes[0]
    result = contest.results["max_prob"]
    _, curve, equal, choice = axes.lines
    values = [setting["min_max_prob"] for setting in result.competitor.settings]
    gains = [result_of(result.arm, number, contest.times).over(contest.baseline) for number in range(len(values))]
    assert curve.get_xdata().tolist() == values == sorted(values)
    assert curve.get_ydata() == pytest.approx([100 * gain.value for gain in gains])
    assert equal.get_xdata().tolist() == near_best(result, contest.times)[1]
    assert choice.get_xydata()[0] == pytest.approx([result.setting["min_max_prob"], 100 * gains[result.number].value])
    (band,) = axes.collections
    corners = band.get_paths()[0].vertices
    for value, gain in zip(values, gains, strict=True):
        of_value = corners[corners[:, 0] == value][:, 1]
        assert (of_value.min(), of_value.max()) == pytest.approx((100 * gain.low, 100 * gain.high))
