"""What is chosen at home and judged elsewhere: the choice is home's, the figures are the foreign set's."""

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.optimize import minimize

from decode.policies.registry import LOGISTIC
from evaluation.competitor import default_values, head_competitor, make_competitor
from evaluation.contest.arms import Replays, picks_of, replay_dataset
from evaluation.contest.results import results_of, yardstick_of
from evaluation.contest.travel import Judged, calibrated_on, is_of_other_sampling, travel, travel_frame
from evaluation.gain import Splits
from evaluation.times import Times
from evaluation.traces.coupling import Recorder
from heads import AcceptanceHead
from heads.model.provenance import Provenance
from lm import Sampling
from tests.toys import small_pair
from tests.toys.small_pair import EOS, LENGTH, VOCAB, model, trace

COST = Times.constant(0.2, 1.0)
FAMILIES = ("fixed_length", "token_prob", "entropy")


@pytest.fixture(scope="module")
def sets() -> list[Replays]:
    """Home, and a set that is colder than it."""
    torch.manual_seed(0)
    head = AcceptanceHead(16, 1, "drawn", True).eval()
    values = default_values(5)
    grids = [make_competitor(name, name, values[name]) for name in FAMILIES] + [
        head_competitor("it", head, {"max_rejection_prob": LOGISTIC})
    ]
    every = [Splits(*(trace(Sampling(temperature=heat), seed=seed) for seed in (1, 2))) for heat in (0.9, 0.4)]
    return [replay_dataset(traces, grids, heads={"it": head}, perfect_head=True, name="") for traces in every]


def judged(replays: Replays, name: str) -> Judged:
    arms = [*replays.arms, *replays.auto_arms(COST)]
    picks = picks_of(arms, COST)
    yardstick = yardstick_of(picks, COST)
    results = results_of(picks, COST, yardstick)
    return Judged(dataset=name, arms=arms, picks=picks, yardstick=yardstick, results=results)


def test_what_travels_was_chosen_at_home_and_is_judged_there(sets):
    home = judged(sets[0], "home")
    there = judged(sets[1], "there")
    travelled = {each.result.family: each for each in travel(home, there, test=sets[1].traces.test, cost=COST)}
    tuned = {result.family: result for result in there.results}
    assert {"head_drawn", "auto_drawn_online", *FAMILIES} <= set(travelled)
    assert not {"oracle", "perfect_drawn"} & set(travelled)
    for at_home, arm in zip(home.results, home.arms, strict=True):
        if at_home.family in (*FAMILIES, "head_drawn"):
            setting = int(COST.tokens_per_s(arm.dev).argmax())
            moved = next(each for each in there.arms if each.grid.name == arm.grid.name)
            result, kept = travelled[at_home.family]
            assert result.setting == at_home.setting == arm.grid.settings[setting]
            assert result.tokens_per_s == pytest.approx(COST.tokens_per_s(moved.test)[setting])
            assert kept.value == pytest.approx(result.tokens_per_s / tuned[at_home.family].tokens_per_s - 1)
            assert kept.low <= kept.value <= kept.high
    frame = travel_frame(list(travelled.values()), home, there, COST)
    assert set(frame["chosen_on"]) == {"home"}
    assert set(frame["dataset"]) == {"there"}
    assert isinstance(frame, pd.DataFrame)


def test_a_setting_that_is_best_at_home_alone_costs_something_there(sets, monkeypatch):
    """There the draft is the target, and the longest draft is best."""
    monkeypatch.setattr(small_pair, "recorder", always_right)
    grid = make_competitor("fixed_length", "fixed_length", default_values(LENGTH)["fixed_length"])
    traces = Splits(*(trace(Sampling(temperature=0.9), seed=seed) for seed in (1, 2)))
    home = judged(sets[0], "home")
    there = judged(replay_dataset(traces, [grid], heads={}, perfect_head=False, name=""), "there")
    travelled = {each.result.family: each for each in travel(home, there, test=traces.test, cost=COST)}
    assert there.results[0].setting == {"k": LENGTH}
    result, kept = travelled["fixed_length"]
    assert (
        result.setting == next(each.setting for each in home.results if each.family == "fixed_length") != {"k": LENGTH}
    )
    assert result.gain.value == pytest.approx(kept.value)
    assert kept.high < -0.01
    assert travelled["entropy"].kept is None


def always_right(sampling: Sampling, length: int = LENGTH) -> Recorder:
    return Recorder(model(1, 2), model(1, 2), sampling, VOCAB, frozenset({EOS}), length)


def test_at_home_nothing_is_lost_on_the_way(sets):
    home = judged(sets[0], "home")
    for result, kept in travel(home, home, test=sets[0].traces.test, cost=COST):
        assert kept.value == pytest.approx(0, abs=1e-12)
        assert f"{result.gain.value:+.1%}" == home.gain(result.family)


@pytest.mark.parametrize("timing", ["fed", "drawn", "prefix"])
def test_a_head_of_another_sampling_is_calibrated_on_the_path_of_dev(sets, timing):
    torch.manual_seed(1)
    trained = Provenance(sampling=Sampling(temperature=0.9).as_dict(), reject_weight=3.0, calibration_temperature=1.4)
    head, dev = AcceptanceHead(16, 1, timing, True, provenance=trained).eval(), sets[1].traces.dev
    assert is_of_other_sampling(head, dev.sampling)
    assert not is_of_other_sampling(head, Sampling(temperature=0.9))
    assert not is_of_other_sampling(AcceptanceHead(16, 1), dev.sampling)
    (name, fitted), *others = calibrated_on(dev, {"it": head}).items()
    assert (name, others) == ("it calibrated here", [])
    path = np.array([at for at in range(dev.num_positions) if timing != "fed" or at not in dev.offsets])
    of = path - 1 if timing == "fed" else path
    logit, label = (
        head.calibrated_logit(dev.logit(head)[path]),
        (dev.acceptance_rate if timing == "prefix" else dev.signals["acceptance_prob"])[of],
    )

    def loss(weights):
        f = weights[0] * logit + weights[1]
        return (np.logaddexp(0, f) - label * f).mean()

    best = minimize(loss, [1.0, 0.0])
    now = fitted.calibrated_logit(dev.logit(fitted)[path])
    assert np.allclose(now, dev.logit(fitted)[path])
    assert (np.logaddexp(0, now) - label * now).mean() == pytest.approx(best.fun, abs=1e-5)
    assert np.allclose(now, best.x[0] * logit + best.x[1], atol=2e-2)
