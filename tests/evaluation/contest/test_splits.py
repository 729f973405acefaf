"""With dev and test redrawn, dev of every split chooses each family's setting and test of that split judges it."""

import numpy as np
import pytest

from evaluation.families import BASELINE
from evaluation.gain import Throughput
from evaluation.played import joined
from evaluation.splits import draw_splits, repeated_splits
from tests.evaluation.contest.conftest import CURVE


def speed_of(part: Throughput, prompts: np.ndarray) -> np.ndarray:
    """Tokens per second of every setting on some prompts."""
    return part.tokens[:, prompts].sum(axis=1) / part.seconds[:, prompts].sum(axis=1)


def test_every_split_chooses_on_its_dev_prompts_and_judges_on_its_test_prompts(replays):
    splits = repeated_splits(replays.arms, CURVE, num_splits=20, seed=5)
    every = {arm.competitor.family: CURVE.throughput(joined([arm.dev, arm.test])) for arm in replays.arms}
    num_dev = len(np.unique(replays.arms[0].dev.prompt_of_row))
    for number, is_dev in enumerate(draw_splits(every[BASELINE].tokens.shape[1], num_dev, num_splits=20, seed=5)):
        speeds = {}
        for name, throughput in every.items():
            on_dev = speed_of(throughput, is_dev)
            assert splits.on_dev[name][number] == pytest.approx(on_dev.max())
            speeds[name] = speed_of(throughput, ~is_dev)[on_dev.argmax()]
        for name, speed in speeds.items():
            assert splits.gains[name][number] == pytest.approx(speed / speeds[BASELINE] - 1, abs=1e-9), name
