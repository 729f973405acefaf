"""Offset and slope for each place of a draft: they are fitted to the tokens that drafts have there."""

import numpy as np
import pytest
from scipy.special import expit

from evaluation.flags.calibration import Seen, divergence, drawn_at, fit
from lm import Sampling
from tests.toys.small_pair import LENGTH, trace


@pytest.mark.parametrize("sampling", [Sampling(temperature=0), Sampling(temperature=0.8, top_k=8)])
def test_the_token_at_a_place_is_the_one_that_a_round_drafts_there(sampling):
    traced = trace(sampling)
    for place in range(LENGTH):
        found = dict(zip(*(each.tolist() for each in drawn_at(traced, place)), strict=True))
        for start in range(traced.num_positions):
            assert found.get(start) == walked(traced, start, place)


def walked(traced, start: int, place: int) -> int | None:
    """The flat index, by the definition that stands above `Trace`; None where the trace has no such token."""
    row = np.searchsorted(traced.offsets, start, side="right") - 1
    end = traced.offsets[row + 1]
    rejected = next((at for at in range(start, end) if traced.is_rejected[at]), None)
    at = start + place
    if rejected is None or at < rejected:
        return at if at < end else None
    number = int(traced.is_rejected[:rejected].sum())
    within = at - rejected
    if within >= traced.branch_lengths[number]:
        return None
    return int(traced.num_positions + traced.branch_lengths[:number].sum() + within)


def test_the_fit_finds_what_the_head_says_of_the_confidence():
    generator = np.random.default_rng(0)
    logit = generator.normal(1.0, 2.0, 4000)
    seen = Seen(logit, expit(-0.7 + 0.6 * logit), np.ones(4000))
    offset, slope = fit(seen)
    assert (offset, slope) == pytest.approx((-0.7, 0.6), abs=0.05)
    assert divergence([seen], [(offset, slope)]) < 0.001 < divergence([seen], [(0.0, 1.0)])


def test_few_tokens_leave_the_confidence_as_it_is():
    seen = Seen(np.array([2.0]), np.array([0.1]), np.ones(1))
    offset, slope = fit(seen)
    assert abs(offset) < 0.1
    assert abs(slope - 1) < 0.1
