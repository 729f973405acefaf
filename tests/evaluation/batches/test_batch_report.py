"""Evaluation in batches (law 4.13): settings chosen on dev at each size; the rule against fixed lengths."""

from dataclasses import replace

import pytest
import torch

from configs.flag_types import sizes_of
from configs.schema import DecodeConfig
from decode.experiment import Experiment
from decode.policies.scores import ScoreHead
from evaluation.batches.load import load_at, queue_of, step_through
from evaluation.competitor import bounds, competitors_of
from evaluation.contest import Contest, Replays, fastest_on_dev, replay_arms
from evaluation.families import AUTO
from evaluation.gain import Splits
from evaluation.report import batches
from evaluation.report.batches import contests_of, in_batches, setups_of
from evaluation.table import flat
from evaluation.times import RECORDED, StopShares
from evaluation.traces.replay import replay_rounds
from evaluation.tuning.rule import batch_auto_for
from heads import AcceptanceHead
from lm import Sampling
from tests.toys.small_pair import trace
from tests.toys.times import flat_times, times_by_length

TIMES = flat_times(0.2, 1.0, elsewhere=StopShares("made up", {"entropy": 0.1}))


@pytest.fixture(scope="module")
def replays():
    splits = Splits(*(trace(Sampling(temperature=0.6), seed=seed) for seed in (1, 2)))
    competitors = competitors_of({}, {}, max_draft_length=5, policies=("token_prob", "entropy"))
    return Replays(splits, list(replay_arms([*competitors, *bounds()], splits)))


def rows_at(replays, setup, sizes):
    [rows] = contests_of(replays, [setup], sizes)
    return list(map(flat, rows))


def with_share(times, share):
    """Times of a batch in which a verified token costs this share of a draft step."""
    [(of_batch, _)] = setups_of([times], [share])
    return of_batch


def loads_of(competitor, trace, size):
    rounds = replay_rounds(trace, competitor.policy)
    return [load_at(rounds, number, len(trace.rows), size) for number in range(len(competitor.settings))]


def test_on_test_the_chosen_settings_alone_are_replayed(replays, monkeypatch):
    """So that the rounds of all settings are in memory for dev alone."""
    test, num_lanes = replays.traces.test, set()

    def counted(trace, policy):
        rounds = replay_rounds(trace, policy)
        if trace is test:
            num_lanes.add(int(rounds.lane.max()) + 1)
        return rounds

    monkeypatch.setattr(batches, "replay_rounds", counted)
    rows_at(replays, with_share(TIMES, 0.0), [1, 2])
    assert num_lanes == {len(test.rows)}


def test_the_setting_is_the_fastest_on_dev_at_its_size_and_a_batch_of_one_costs_what_one_sequence_costs(replays):
    setup = with_share(TIMES, 0.3)
    rows = rows_at(replays, with_share(TIMES, 0.0), [1]) + rows_at(replays, setup, [2, 6])
    base = {row["batch_size"]: row["tokens_per_s"] for row in rows if row["family"] == "fixed_length"}
    for row in rows:
        size = row["batch_size"]
        assert row["gain"] == pytest.approx(row["tokens_per_s"] / base[size] - 1)
        if row["family"] == "perfect_drawn":
            continue
        arm = next(arm for arm in replays.arms if arm.competitor.family == row["family"])
        if size == 1:
            best = int(TIMES.tokens_per_s(arm.dev).argmax())
            assert row["tokens_per_s"] == pytest.approx(TIMES.tokens_per_s(arm.test)[best])
        else:
            curves = setup.costs(arm.competitor.policy.stop_kind)
            loads = (loads_of(arm.competitor, split, size) for split in replays.traces)
            dev, test = ([load.throughput(curves) for load in of_split] for of_split in loads)
            best = max(range(len(dev)), key=lambda setting: dev[setting].tokens_per_s)
            assert (row["tokens_per_s"], row["request_s"]) == (test[best].tokens_per_s, test[best].request_s)
        assert row["setting"] == ", ".join(f"{key}={value}" for key, value in arm.competitor.settings[best].items())


def test_gains_in_batches_have_the_interval_of_resampled_prompts_which_a_batch_of_one_shares(replays):
    """A batch of one has the interval of one sequence after another; the rules of a whole batch have none."""
    contest = Contest("", TIMES, fastest_on_dev(replays.arms, TIMES))
    for row in rows_at(replays, with_share(TIMES, 0.0), [1, 4]):
        if row["family"] in ("fixed_length", "perfect_drawn"):
            assert row["gain_low"] == row["gain_high"] == (0.0 if row["family"] == "fixed_length" else None)
            continue
        assert row["gain_low"] < row["gain"] < row["gain_high"]
        if row["batch_size"] == 1:
            gain = contest.gain(row["family"])
            assert row["gain"] == pytest.approx(gain.value)
            assert row["gain_high"] - row["gain_low"] == pytest.approx(gain.high - gain.low, rel=0.3)
    few = Splits(*(split.select(range(9)) for split in replays.traces))
    competitors = [arm.competitor for arm in replays.arms]
    [*rows] = rows_at(Replays(few, list(replay_arms(competitors, few))), with_share(TIMES, 0.0), [2])
    assert {row["gain_low"] for row in rows} == {None}


@pytest.mark.parametrize("size", [1, 3, 8])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_the_rule_of_a_batch_is_no_worse_than_the_best_fixed_length_that_test_itself_chooses(replays, share, size):
    curves, (dev, test) = with_share(TIMES, share).costs(""), replays.traces
    rule = batch_auto_for(ScoreHead("perfect", "drawn"), dev, curves, size)
    ours = step_through(test, rule, queue_of(len(test.rows), size), size).throughput(curves).tokens_per_s
    lengths = next(arm.competitor for arm in replays.arms if arm.competitor.family == "fixed_length")
    assert ours >= 0.99 * max(load.throughput(curves).tokens_per_s for load in loads_of(lengths, test, size))


@pytest.mark.parametrize("share", [0.05, 5.0])
def test_the_rule_has_the_head_that_is_faster_in_the_batch_and_also_learns_while_decoding(replays, share):
    torch.manual_seed(0)
    heads = {name: AcceptanceHead(16, depth, "drawn", True).eval() for name, depth in (("cheap", 0), ("deep", 1))}
    shares = StopShares("made up", {"drawn+s-d0": 0.0, "drawn+s-d1": share})
    setup = with_share(flat_times(0.2, 1.0, elsewhere=shares), 0.3)
    grid = {"head": {"max_rejection_prob": [0.5]}}
    _, *competitors = competitors_of(grid, heads, max_draft_length=5, policies=("head",))
    arms = [*replays.arms, *replay_arms(competitors, replays.traces)]
    rows = {(row["family"], row["setting"]): row for row in rows_at(replace(replays, arms=arms), setup, [3])}
    of_dev = AUTO, "drawn-time head, lambda of dev"
    learning = AUTO, "drawn-time head, lambda learned online with the head"
    assert list(rows)[-3:] == [of_dev, learning, ("perfect_drawn", "")]
    dev, test = replays.traces
    rules = [batch_auto_for(head, dev, setup.costs(f"drawn+s-d{head.depth}"), 3) for head in heads.values()]
    rule = max(rules, key=lambda each: each.throughput)
    load = step_through(test, rule, queue_of(len(test.rows), 3), 3)
    assert rows[of_dev]["tokens_per_s"] == pytest.approx(load.throughput(rule.costs).tokens_per_s)


def test_measured_and_recorded_times_of_verification_are_taken_as_they_are():
    for origin in ("measured", RECORDED, "given"):
        setups = setups_of([times_by_length(0.1, (1.0, 1.1, 1.3), origin), TIMES], (0.0, 0.2))
        shares = [(times.origin, share) for times, share in setups]
        assert shares == [(origin, None), ("given", 0.0), ("given", 0.2)]
        seconds = [float(setups[0][0].target(tokens)) for tokens in (1, 2, 3, 4)]
        assert seconds == pytest.approx([1.0, 1.1, 1.3, 1.5])
        assert float(setups[2][0].target(6)) == pytest.approx(1.0 + 0.2 * 0.2 * 5)
        assert float(setups[2][0].costs("entropy").draft(4)) == pytest.approx(0.2 + 0.02)


def test_times_that_say_nothing_of_batches_are_refused():
    assert len(setups_of([times_by_length(0.1, (1.0, 1.1)), TIMES], ())) == 1
    with pytest.raises(ValueError, match=r"decode\.verify_shares is empty"):
        setups_of([TIMES], ())


def test_every_size_has_a_table_and_every_result_is_a_row(replays, monkeypatch):
    monkeypatch.setattr(batches, "kept_curves", lambda experiment: None)
    experiment = Experiment.__new__(Experiment)
    experiment.decode = DecodeConfig(verify_shares=(0.0, 0.2))
    rows, tables = in_batches(experiment, {"toys": replays}, [TIMES], [1, 44])
    assert (len(rows), len(tables)) == (2 * 2 * 4, 2 * 2)
    assert list(rows[0])[:6] == ["dataset", "ratio", "costs", "verify_share", "batch_size", "family"]
    assert [table.title.split(";")[0] for table in tables] == ["toys in batches of 1", "toys in batches of 44"] * 2
    without = [arm for arm in replays.arms if not arm.competitor.family.startswith("perfect")]
    _, others = in_batches(experiment, {"toys": replace(replays, arms=without)}, [TIMES], [1])
    lacking = "no perfect head: decode.perfect_head is false"
    assert [lacking in table.note for table in (*tables, *others)] == [False] * 4 + [True] * 2


def test_sizes_are_read_as_a_command_line_names_them_or_refused():
    for given, sizes in (("1,4,16", (1, 4, 16)), (4, (4,)), ((1, 4), (1, 4)), (None, None)):
        assert sizes_of(given) == sizes
    for given in ((4, 0), 0, (), "four", "[1, x]", "1,,4"):
        with pytest.raises(ValueError, match=r"--batch is .*; name sizes of at least 1"):
            sizes_of(given)
