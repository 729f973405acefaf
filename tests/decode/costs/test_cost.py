"""What rounds cost (law 4.9)."""

import numpy as np
import pytest
from toy_traces import traced

from decode import Counts
from decode.costs.measure import costs_of, fit_costs
from decode.costs.model import CostModel
from decode.loop.decoder import Generation, Round
from decode.policies import FixedLength
from decode.traces.replay import replay_settings


def played(num_drafted: int, *, draft_s: float, target_s: float) -> Round:
    counts = Counts(num_emitted=1, num_drafted=num_drafted, num_target=1, num_draft_forwards=num_drafted)
    return Round((0,) * num_drafted, 0, (0,), "limit", counts, draft_s, target_s)


def generations(t_draft_s: float, t_target_s: float, slope_s: float = 0.0) -> list[Generation]:
    """Rounds with exactly those times; the first of each reads a prompt and is slow."""
    made = []
    for length in (0, 1, 3, 6):
        rounds = [played(length, draft_s=9.0, target_s=9.0)]
        rounds += [played(length, draft_s=length * t_draft_s, target_s=t_target_s + slope_s * length) for _ in range(4 + length)]
        made.append(Generation((), tuple(rounds), Counts()))
    return made


def test_latency_per_token_is_the_papers_sum_of_two_rates():
    _, trace = traced("plain", 3, 3, (2,))
    replayed = replay_settings(trace, FixedLength(2))
    t_draft, t_target = 0.0234, 0.112
    counts = replayed.counts
    tokens = counts.num_emitted.sum()
    discard_rate, verification_rate = counts.num_discarded.sum() / tokens, counts.num_target.sum() / tokens
    latency = CostModel.constant(t_draft, t_target).time_s(replayed).sum() / tokens
    assert latency == pytest.approx(t_draft + t_draft * discard_rate + (t_target - t_draft) * verification_rate)


def test_a_verification_costs_what_its_length_costs():
    _, trace = traced("plain", 3, 3, (2,))
    replayed = replay_settings(trace, FixedLength(3))
    cost = CostModel(0.01, (1.0, 1.5, 2.5))
    expected = 0.01 * replayed.counts.num_draft_forwards + replayed.lengths @ np.array([1.0, 1.5, 2.5, 2.5])
    assert cost.time_s(replayed) == pytest.approx(expected)


def test_costs_are_found_in_rounds_that_have_them():
    cost = costs_of(generations(0.02, 0.1, 0.005), 6)
    assert cost.t_draft_s == pytest.approx(0.02)
    assert cost.t_target_s == pytest.approx([0.1 + 0.005 * length for length in range(7)])


def test_a_verification_never_gets_cheaper_with_length():
    cost = costs_of(generations(0.02, 0.1, -0.004), 6)
    assert list(cost.t_target_s) == sorted(cost.t_target_s)


def test_regression_finds_both_times_with_r2_1_where_they_are_exact():
    fit = fit_costs(generations(0.02, 0.1))
    assert [fit.t_draft_s, fit.t_target_s, fit.r2, fit.num_generations] == pytest.approx([0.02, 0.1, 1.0, 4])


def test_another_ratio_keeps_the_target_and_changes_the_draft():
    other = CostModel(0.02, (0.1, 0.2)).with_ratio(10.0)
    assert other.t_draft_s == pytest.approx(0.01)
    assert other.t_target_s == (0.1,)


@pytest.mark.parametrize("times", [(0.0, (1.0,)), (1.0, ()), (1.0, (1.0, -1.0)), (float("inf"), (1.0,))])
def test_times_that_are_no_times_are_refused(times):
    with pytest.raises(ValueError, match="positive number of seconds"):
        CostModel(*times)
