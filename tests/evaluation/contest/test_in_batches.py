"""Evaluation in batches (law 4.13): settings chosen on dev at each size; a batch of one is no batch; the rule against
fixed lengths.
"""

from dataclasses import replace

import pytest
import torch

from evaluation.batches.load import queue_of
from evaluation.batches.lockstep import step_through
from evaluation.competitor import bounds, default_values, head_competitor, make_competitor
from evaluation.contest.arms import Replays, replay_arms
from evaluation.contest.in_batches import (
    BatchContest,
    Entry,
    Setup,
    batch_sheet,
    compare_in_batches,
    setups_of,
    sizes_of,
)
from evaluation.gain import Splits
from evaluation.times import RECORDED, StopShares, Times
from evaluation.traces.bounds import ScoreHead
from evaluation.tuning.rule import batch_auto_for
from heads import AcceptanceHead
from lm import Sampling
from tests.toys.small_pair import trace

COST = Times.constant(0.2, 1.0, elsewhere=StopShares("made up", {"entropy": 0.1}))


@pytest.fixture(scope="module")
def replays():
    splits = Splits(*(trace(Sampling(temperature=0.6), seed=seed) for seed in (1, 2)))
    grids = [make_competitor(name, name, default_values(5)[name]) for name in ("fixed_length", "token_prob", "entropy")]
    return Replays(traces=splits, arms=list(replay_arms([*grids, *bounds()], splits)), heads={})


def test_a_batch_of_one_costs_what_one_sequence_costs(replays):
    ((_, results),) = BatchContest(replays, [Setup(COST, 0.0)], [1]).results()
    for result in results[:-1]:
        arm = next(arm for arm in replays.arms if arm.grid.family == result.family)
        on_dev, on_test = COST.tokens_per_s(arm.dev), COST.tokens_per_s(arm.test)
        assert result.setting == arm.grid.settings[int(on_dev.argmax())]
        assert result.tokens_per_s == pytest.approx(on_test[int(on_dev.argmax())])


def test_the_reported_setting_is_fastest_on_dev_at_its_size_and_gains_are_over_the_fixed_length(replays):
    setup = Setup(COST, 0.3)
    ((_, results),) = BatchContest(replays, [setup], [2, 6]).results()
    for result in results:
        if result.family == "perfect_drawn":
            continue
        arm = next(arm for arm in replays.arms if arm.grid.family == result.family)
        costs = setup.curves(arm.grid.policy.stop_kind)
        dev, test = (
            [load.spent(costs) for load in Entry(arm.grid, split).loads(result.batch_size)] for split in replays.traces
        )
        best = max(range(len(dev)), key=lambda setting: dev[setting].tokens_per_s)
        assert result.setting == arm.grid.settings[best]
        assert (result.tokens_per_s, result.request_s) == (test[best].tokens_per_s, test[best].request_s)
        base = next(each for each in results if (each.batch_size, each.family) == (result.batch_size, "fixed_length"))
        assert result.gain == pytest.approx(result.tokens_per_s / base.tokens_per_s - 1)


@pytest.mark.parametrize("size", [1, 3, 8])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_the_rule_of_a_batch_is_no_worse_than_the_best_fixed_length_that_test_itself_chooses(replays, share, size):
    costs, (dev, test) = Setup(COST, share).curves(""), replays.traces
    rule = batch_auto_for(ScoreHead("perfect", "drawn"), dev, costs, size)
    ours = step_through(test, rule, queue_of(len(test.rows), size), size).spent(costs).tokens_per_s
    grid = next(arm.grid for arm in replays.arms if arm.grid.family == "fixed_length")
    assert ours >= 0.99 * max(load.spent(costs).tokens_per_s for load in Entry(grid, test).loads(size))


@pytest.mark.parametrize("dear", [0.05, 5.0])
def test_the_rule_has_the_head_that_is_faster_in_the_batch_and_also_learns_on_the_job(replays, dear):
    torch.manual_seed(0)
    heads = {name: AcceptanceHead(16, depth, "drawn", True).eval() for name, depth in (("cheap", 0), ("deep", 1))}
    cost = Times.constant(0.2, 1.0, elsewhere=StopShares("made up", {"drawn+s-d0": 0.0, "drawn+s-d1": dear}))
    arms = list(
        replay_arms(
            [head_competitor(name, head, {"max_rejection_prob": [0.5]}) for name, head in heads.items()], replays.traces
        )
    )
    contest = BatchContest(replace(replays, arms=[*replays.arms, *arms], heads=heads), [Setup(cost, 0.3)], [3])
    ((_, results),) = contest.results()
    assert [each.family for each in results[-4:]] == [
        "head_drawn",
        "auto_drawn",
        "auto_drawn_learning",
        "perfect_drawn",
    ]
    rules = [
        batch_auto_for(head, replays.traces.dev, Setup(cost, 0.3).curves(f"drawn+s-d{head.depth}"), 3)
        for head in heads.values()
    ]
    rule = max(rules, key=lambda each: each.throughput)
    load = step_through(replays.traces.test, rule, queue_of(len(replays.traces.test.rows), 3), 3)
    assert results[-3].tokens_per_s == pytest.approx(load.spent(rule.costs).tokens_per_s)


@pytest.mark.parametrize("origin", ["measured", RECORDED])
def test_measured_and_recorded_times_of_verification_are_taken_as_they_are(origin):
    measured = Times(0.1, (1.0, 1.1, 1.3), origin)
    setups = setups_of([measured, COST], (0.0, 0.2))
    assert [(setup.cost.origin, setup.verify_share) for setup in setups] == [
        (origin, None),
        ("given", 0.0),
        ("given", 0.2),
    ]
    assert [float(setups[0].curves("").target(tokens)) for tokens in (1, 2, 3, 4)] == pytest.approx(
        [1.0, 1.1, 1.3, 1.5]
    )
    assert float(setups[2].curves("entropy").target(6)) == pytest.approx(1.0 + 0.2 * 0.2 * 5)
    assert float(setups[2].curves("entropy").draft(4)) == pytest.approx(0.2 + 0.02)


def test_every_table_is_printed_and_every_result_is_a_row(replays, capsys):
    frame = compare_in_batches({"toys": replays}, [Setup(COST, 0.0), Setup(COST, 0.2)], [1, 44])
    assert len(frame) == 2 * 2 * 4
    assert list(frame.columns[:6]) == ["dataset", "ratio", "costs", "verify_share", "batch_size", "family"]
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.count("toys in batches") == 2
    assert "more than 40" in printed
    assert printed.count("No oracle: it knows of no other sequence") == 2
    assert "no perfect head" not in printed


def test_a_batch_without_a_perfect_head_says_why(replays):
    without = replace(replays, arms=[arm for arm in replays.arms if not arm.grid.family.startswith("perfect")])
    ((setup, results),) = BatchContest(without, [Setup(COST, 0.0)], [1]).results()
    assert batch_sheet(setup, results, dataset="toys").note.endswith("with decode.perfect_head false")


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ((4, 0), "--batch has 0"),
        (0, "--batch has 0"),
        ((), "names no size"),
        ("four", "--batch is four; name sizes"),
        ("[1, x]", "name sizes"),
    ],
)
def test_sizes_that_are_none_are_refused(sizes, says):
    with pytest.raises(ValueError, match=says):
        sizes_of(sizes)


@pytest.mark.parametrize(("asked", "sizes"), [("1,4,16", (1, 4, 16)), (4, (4,)), ((1, 4), (1, 4)), (None, None)])
def test_sizes_are_read_as_a_command_line_names_them(asked, sizes):
    assert sizes_of(asked) == sizes
