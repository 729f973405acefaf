"""Transfer: the setting is the source set's choice, the figures are the target set's."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from decode.experiment import Experiment
from evaluation.competitor import competitors_of
from evaluation.contest import Contest, Replays, hold, replay_dataset
from evaluation.gain import Splits
from evaluation.report.evaluated import transferred_between
from evaluation.report.transfer import transfer_records, transfer_table, with_transferred
from evaluation.tuning.calibration import calibrated_on, is_of_other_sampling
from heads import AcceptanceHead
from heads.model.head import Provenance
from lm import Sampling
from tests.toys.small_pair import trace
from tests.toys.times import flat_times

TIMES = flat_times(0.2, 1.0)
FAMILIES = ("fixed_length", "token_prob", "entropy")


@pytest.fixture(scope="module")
def sets() -> list[Replays]:
    """A source set, and a target set that is colder than it."""
    torch.manual_seed(0)
    head = AcceptanceHead(16, 1, "drawn", True).eval()
    competitors = competitors_of({}, {"it": head}, max_draft_length=5, policies=(*FAMILIES, "head"))
    every = [Splits(*(trace(Sampling(temperature=heat), seed=seed) for seed in (1, 2))) for heat in (0.9, 0.4)]
    return [replay_dataset(traces, competitors, perfect_head=True, name="") for traces in every]


@pytest.fixture(scope="module")
def source(sets) -> Contest:
    return hold(sets[0], TIMES, dataset="source")


def test_the_setting_is_chosen_on_the_source_set_and_judged_on_the_target_set(sets, source):
    target = hold(sets[1], TIMES, dataset="target")
    target = with_transferred(target, source, sets[1])
    results = target.transferred
    assert {"head_drawn", "auto", *FAMILIES} <= set(results)
    assert not {"oracle", "perfect_drawn"} & set(results)
    records = {record["family"]: record for record in transfer_records(target)}
    tests = {arm.competitor.family: arm.test for arm in sets[1].arms}
    for name in (*FAMILIES, "head_drawn"):
        assert results[name].setting == source.results[name].setting
        speed = TIMES.tokens_per_s(tests[name])[source.results[name].number]
        assert results[name].tokens_per_s == pytest.approx(speed)
        record = records[name]
        assert record["over_tuned_low"] <= record["over_tuned"] <= record["over_tuned_high"]
        assert record["over_tuned"] == pytest.approx(speed / target.results[name].tokens_per_s - 1)
        assert (record["chosen_on"], record["dataset"]) == ("source", "target")
    same = transfer_records(with_transferred(source, source, sets[0]))
    assert [record["over_tuned"] for record in same] == pytest.approx([0] * len(same), abs=1e-12), "the same set"
    *rows, perfect = transfer_table(target).rows
    assert [row["transferred"] for row in rows] == [result.over(target.baseline).text for result in results.values()]
    assert perfect["policy"] == "perfect head"


@pytest.mark.parametrize(
    ("training_sets", "has_sources", "expected"),
    [
        (["first"], False, [("first", "second")]),
        (["first", "second"], False, []),
        ([], False, [("first", "second")]),  # the first set is not transferred to itself
        (["first"], True, [("other", "first"), ("other", "second")]),
    ],
)
def test_the_first_set_or_another_evaluation_transfers_its_choices(sets, training_sets, has_sources, expected):
    contests = {name: [hold(sets[0], TIMES, dataset=name)] for name in ("first", "second")}
    experiment = Experiment.__new__(Experiment)
    vars(experiment).update(
        datasets={name: name for name in contests}, training_sets={name: name for name in training_sets}
    )
    sources = {TIMES.title: hold(sets[0], TIMES, dataset="other")} if has_sources else {}
    every = transferred_between(contests, experiment, dict.fromkeys(contests, sets[0]), sources)
    pairs = [(contest.source.dataset, contest.dataset) for (contest,) in every.values() if contest.source]
    assert pairs == expected
    assert [contest.dataset for (contest,) in every.values() if contest.transferred] == [name for _, name in expected]


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
    logit = head.calibrated_logit(dev.logit(head)[path])
    label = (dev.positions["acceptance_rate"] if timing == "prefix" else dev.signal("acceptance_prob"))[of]

    def loss(weights):
        f = weights[0] * logit + weights[1]
        return (np.logaddexp(0, f) - label * f).mean()

    best = minimize(loss, [1.0, 0.0])
    now = fitted.calibrated_logit(dev.logit(fitted)[path])
    assert np.allclose(now, dev.logit(fitted)[path])
    assert (np.logaddexp(0, now) - label * now).mean() == pytest.approx(best.fun, abs=1e-5)
    assert np.allclose(now, best.x[0] * logit + best.x[1], atol=2e-2)
