"""With dev and test redrawn, dev of every split chooses each family's setting and test of that split judges it."""

from dataclasses import replace

import numpy as np
import pytest

from evaluation.contest import Contest
from evaluation.families import BASELINE, HEADS, PRODUCT, TRAINING_FREE, family
from evaluation.gain import Throughput
from evaluation.played import joined
from evaluation.report.tables import records_of, result_table, stage_table
from evaluation.report.verdict import pooled
from evaluation.splits import RepeatedSplits, draw_splits, repeated_splits
from tests.evaluation.contest.conftest import CURVE


def test_each_split_has_as_many_dev_prompts_as_the_evaluation_and_every_prompt_is_one_as_often():
    is_dev = draw_splits(30, 10, num_splits=3000, seed=0)
    assert set(is_dev.sum(axis=1)) == {10}
    # a prompt is dev in a third of the splits; of 30 prompts one is 5 standard errors off with probability 2e-5
    assert np.abs(is_dev.mean(axis=0) - 1 / 3).max() < 5 * np.sqrt(2 / 9 / 3000)
    assert not np.array_equal(is_dev, draw_splits(30, 10, num_splits=3000, seed=1))


def speed_of(part: Throughput, prompts: np.ndarray) -> np.ndarray:
    """Tokens per second of every setting on some prompts."""
    return part.tokens[:, prompts].sum(axis=1) / part.seconds[:, prompts].sum(axis=1)


def test_every_split_chooses_on_its_dev_prompts_and_judges_on_its_test_prompts(replays):
    """The reference goes through splits and families one by one."""
    splits = repeated_splits(replays.arms, CURVE, num_splits=20, seed=5)
    every = {arm.competitor.family: CURVE.throughput(joined([arm.dev, arm.test])) for arm in replays.arms}
    num_dev = len(np.unique(replays.arms[0].dev.prompt_of_row))
    num_prompts = every[BASELINE].tokens.shape[1]
    assert len(every) == len(replays.arms), "one competitor of each family, so that the reference is that simple"
    for number, is_dev in enumerate(draw_splits(num_prompts, num_dev, num_splits=20, seed=5)):
        speeds = {}
        for name, throughput in every.items():
            on_dev = speed_of(throughput, is_dev)
            assert splits.on_dev[name][number] == pytest.approx(on_dev.max())
            speeds[name] = speed_of(throughput, ~is_dev)[on_dev.argmax()]
        for name, speed in speeds.items():
            assert splits.gains[name][number] == pytest.approx(speed / speeds[BASELINE] - 1, abs=1e-9), name


def test_competitors_of_one_family_choose_together_and_rows_of_one_prompt_are_divided_together(replays):
    arms = {arm.competitor.family: arm for arm in replays.arms}
    product, entropy = arms[PRODUCT], arms["entropy"]
    as_product = replace(entropy, competitor=replace(entropy.competitor, family=PRODUCT))
    some = [arms[BASELINE], product, entropy]
    apart, together = (repeated_splits(members, CURVE) for members in (some, [*some[:2], as_product]))
    assert np.array_equal(together.on_dev[PRODUCT], np.maximum(apart.on_dev[PRODUCT], apart.on_dev["entropy"]))

    def of_one_prompt(arm):
        """Rows 2 k and 2 k + 1 are of prompt k."""
        halves = [replace(part, prompt_of_row=np.arange(len(part.prompt_of_row)) // 2) for part in (arm.dev, arm.test)]
        return replace(arm, dev=halves[0], test=halves[1])

    def summed(arm):
        """The same with one row for each prompt."""
        parts = []
        for part in (arm.dev, arm.test):
            counts = {name: part.per_prompt(values) for name, values in part._counted()}
            lengths = np.stack([part.per_prompt(column) for column in np.moveaxis(part.lengths, -1, 0)], axis=-1)
            prompts = np.unique(part.prompt_of_row)
            parts.append(replace(part, counts=replace(part.counts, **counts), lengths=lengths, prompt_of_row=prompts))
        return replace(arm, dev=parts[0], test=parts[1])

    conversations = [of_one_prompt(arm) for arm in some]
    by_row, by_prompt = (
        repeated_splits(members, CURVE) for members in (conversations, [summed(arm) for arm in conversations])
    )
    assert by_row.gains[PRODUCT] == pytest.approx(by_prompt.gains[PRODUCT], abs=1e-9)
    assert by_row.gains[PRODUCT] != pytest.approx(apart.gains[PRODUCT], abs=1e-9)


NAMES = (BASELINE, PRODUCT, "entropy", "head_drawn", "oracle")
GAINS = [[0, 0, 0, 0], [0.1, 0.2, 0.3, 0.4], [0.2, 0.1, 0.1, 0.1], [0.15, 0.25, 0.35, 0.1 + 1e-15], [1, 1, 1, 1]]
ON_DEV = [[1, 1, 1, 9], [1, 2, 2, 2], [2, 1, 1, 1], [1, 1, 1, 1], [9, 9, 9, 9]]
SPLITS = RepeatedSplits(
    # split 4: the head's sum equals that of entropy, but for rounding
    gains=dict(zip(NAMES, np.array(GAINS), strict=True)),
    on_dev=dict(zip(NAMES, np.array(ON_DEV, dtype=np.float64), strict=True)),
)


def test_a_group_is_its_member_that_is_fastest_on_dev_and_bounds_are_no_rivals():
    assert SPLITS.gain(TRAINING_FREE).tolist() == [0.2, 0.2, 0.3, 0.0]
    assert SPLITS.share_ahead(HEADS, TRAINING_FREE) == 0.75
    assert SPLITS.share_ahead("head_drawn", PRODUCT) == 0.75
    assert SPLITS.share_ahead(TRAINING_FREE, HEADS) == 0.25
    assert SPLITS.share_ahead("head_drawn", "entropy") == 0.5
    assert [SPLITS.share_leading(name) for name in (PRODUCT, "entropy", "head_drawn")] == [0.25, 0.25, 0.5]
    assert SPLITS.share_leading("oracle") == 1.0
    assert (SPLITS.median(PRODUCT), SPLITS.spread(PRODUCT)) == pytest.approx((0.25, np.sqrt(0.05 / 3)))
    assert SPLITS.lead("head_drawn", PRODUCT)[0] == pytest.approx(1.15 / 1.1 - 1)
    without = RepeatedSplits({BASELINE: np.zeros(1)}, {BASELINE: np.ones(1)})
    assert np.isnan(without.spread(BASELINE))
    with pytest.raises(KeyError, match="no family of heads competes"):
        without.gain(HEADS)


def test_a_contest_has_the_splits_of_all_its_families_also_over_several_datasets(replays, contest: Contest):
    assert contest.splits is not None
    assert contest.splits.gains.keys() == contest.results.keys()
    both = repeated_splits(pooled([replays.arms, replays.arms]), CURVE)
    # of twice the prompts, each there twice
    assert both.spread(PRODUCT) < contest.splits.spread(PRODUCT)


def test_tables_and_csv_have_the_splits_beside_the_one_split_and_rows_without_any_are_empty(contest: Contest):
    splits = contest.splits
    assert splits is not None
    text = f"{splits.median(PRODUCT):+.1%} ± {100 * splits.spread(PRODUCT):.1f}"
    (record,) = (row for row in records_of(contest.results, contest) if row["family"] == PRODUCT)
    shown = [record[name] for name in ("splits_median_gain", "splits_spread", "splits_leading")]
    assert shown == [splits.median(PRODUCT), splits.spread(PRODUCT), splits.share_leading(PRODUCT)]
    (row,) = (row for row in result_table(contest).rows if row["policy"] == family(PRODUCT).label)
    assert (row["200 splits"], row["leads"]) == (text, f"{splits.share_leading(PRODUCT):.0%}")
    (stage,) = (row for row in stage_table(contest).rows if row["stage"].startswith(family(PRODUCT).label))
    assert stage["200 splits"] == text
    bare = replace(contest, splits=None)
    assert "splits_spread" not in records_of(bare.results, bare)[0]
    assert not any("200 splits" in row for row in stage_table(bare).rows)
    assert not any(row["200 splits"] for row in result_table(bare).rows)
