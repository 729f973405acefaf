"""Gains of a race are paired, over the fastest rival of each kind; dev chooses which arm is reported."""

import numpy as np
import pytest

from decode.loop.counts import Counts
from evaluation.bench.arms import CONSTANT, DEFAULT, HEURISTIC, UNASSISTED
from evaluation.bench.results import (
    MEAN,
    Cell,
    cell_table,
    competitor,
    contest_of,
    gain_tables,
    mean_gain,
    race_sentence,
)
from evaluation.families import ALONE
from evaluation.gain import Gain, Throughput, gain_over
from evaluation.sources.clock import Clocked
from tests.toys.times import flat_times

TOKENS = 10


def arm(family, *seconds, setting="", on_dev=None):
    counts = Counts(num_emitted=TOKENS)
    runs = [Clocked(counts=counts, whole_s=second, first_token_s=second / 10) for second in seconds]
    return competitor(family, setting or family), runs, on_dev


def cell_of(*arms, dataset="stories", sampling="greedy"):
    named = {f"{entry.family} {entry.name} {number}": arm for number, arm in enumerate(arms) for entry in arm[:1]}
    competitors, runs, on_dev = ({name: arm[part] for name, arm in named.items()} for part in range(3))
    contest = contest_of(dataset, flat_times(0.01, 0.05), competitors, runs, on_dev=on_dev)
    return Cell(contest=contest, sampling=sampling, num_tokens=10, run=0, default_schedule="")


OURS = [arm(ALONE, 4.0, 6.0), arm("fixed_length", 2.0, 3.0), arm("entropy", 1.0, 3.0), arm("max_prob", 2.5, 3.5)]
THEIRS = [arm(DEFAULT, 2.2, 3.1), arm(HEURISTIC, 2.0, 4.0), arm(CONSTANT, 5.0, 5.0)]
CELL = cell_of(*OURS, *THEIRS)
HEADS = [arm(family, 1.0, 1.0) for family in ("head", "head_drawn", "auto")]


def test_a_gain_is_that_of_totals_over_the_fastest_rival_of_its_kind_and_its_interval_is_paired():
    """Of policies without training, not a head that was named."""
    entropy = list(CELL.contest.results)[2]
    tokens = np.array([10, 10])
    base = Throughput(tokens, np.array([2.0, 3.0]))
    assert CELL.over(entropy, "fixed_length") == gain_over(base, Throughput(tokens, np.array([1.0, 3.0])))
    assert CELL.over(entropy, "fixed_length").value == pytest.approx(0.25)
    assert CELL.median_over(entropy, "fixed_length") == pytest.approx(0.5)
    assert CELL.over(entropy, ALONE).value == pytest.approx(1.5)
    for extra, rival, number, gain in (
        (arm("fixed_length", 1.0, 1.0), "fixed_length", 1, -0.6),
        (arm(UNASSISTED, 2.0, 3.0), ALONE, 1, 0.0),
        (arm(CONSTANT, 2.0, 2.0), CONSTANT, 1, -0.2),
        (arm("head", 1.0, 1.0), "training-free", -1, 1.0),
    ):
        cell = cell_of(*OURS, *THEIRS, extra)
        assert cell.over(list(cell.contest.results)[number], rival).value == pytest.approx(gain), rival


ON_DEV = {"fixed_length": 5.0, "entropy": 6.0, "max_prob": 7.0}
ON_DEV_SLOWER = cell_of(*((entry, runs, ON_DEV.get(entry.family)) for entry, runs, _ in (*OURS, *THEIRS)))
VERDICTS = {
    "dev chose what is slower on test": (ON_DEV_SLOWER, "dev chose largest probability: -"),
    "named policies": (CELL, "fastest of the named policies on these prompts: entropy (SVIP): +"),
    "too few prompts": (CELL, ". 2 test prompts are too few for an interval (at least 10 are needed); about "),
    "no schedule": (cell_of(*OURS, *HEADS), "% over best fixed length; no schedule of transformers"),
}


@pytest.mark.parametrize(("cell", "part"), VERDICTS.values(), ids=VERDICTS)
def test_the_verdict_names_what_dev_chose(cell, part):
    assert part in race_sentence(cell)


def test_a_cell_has_a_row_per_arm_and_a_column_per_rival():
    table = cell_table(cell_of(*OURS, *THEIRS, *HEADS))
    assert [row["policy"] for row in table.rows][-2:] == ["best head, drawn-time", "auto, with a head"]
    assert [row["over best training-free"] for row in table.rows][-2:] == ["+100.0 +100.0"] * 2
    headings = cell_table(cell_of(*OURS, *HEADS)).columns
    assert table.rows[0]["request s"] == "5, 5.9"
    assert table.rows[0]["first token s"] == "0.5, 0.59"
    assert headings[-2:] == ["over best fixed length", "over best training-free"]


def test_two_datasets_have_a_mean_over_transfer_sets_whose_error_is_smaller_than_each():
    fixed = [arm("fixed_length", *10 * [4.0]), arm("fixed_length", *10 * [2.0], setting="k=2")]
    arms = [arm(ALONE, *10 * [8.0]), *fixed]
    cells = [cell_of(*arms), cell_of(*arms, dataset="news")]
    tables = {table.title: table for table in gain_tables(cells)}
    assert list(tables) == ["over best fixed length", "over target alone"], "no product and no schedule ran"
    gain, names = "+300.0% (+300.0%, +300.0%)", ("stories, greedy", "news, greedy", f"{MEAN}, greedy")
    assert tables["over target alone"].rows == [{"policy": "best fixed length"} | dict.fromkeys(names, gain)]
    gains = [Gain(0.1, 0.04, 0.2, 0.03), Gain(0.3, 0.22, 0.4, 0.04)]
    assert mean_gain(gains)[:4] == pytest.approx((0.2, 0.15, 0.2 + 0.05 * 2**0.5, 0.025))
    assert mean_gain([*gains, Gain(0.5, None, None, None)])[:4] == (pytest.approx(0.3), None, None, None)
