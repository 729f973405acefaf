"""Thresholds are on calibrated probabilities, those of SpecDec++'s own heads on raw ones; what was chosen is named."""

import numpy as np
import pytest
import torch

from decode.policies import HeadPolicy
from decode.policies.registry import LOGISTIC
from evaluation.competitor import competitors_of
from evaluation.times import Times
from evaluation.traces.replay import replay_settings
from heads import AcceptanceHead
from heads.model.head import Provenance

COST = Times.constant(0.2, 1.0)


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
