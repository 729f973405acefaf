"""sigma, eta and the cost model with three times (HSDDW; law 4.9)."""

import pytest

from decode import Counts, Generation, Round
from decode.hierarchy_costs import Times, fit_times, redundancy, swapped, target_utilisation


def counts(micro: int, draft: int, target: int, **more: int) -> Counts:
    return Counts(num_micro_forwards=micro, num_draft_forwards=draft, num_target=target, **more)


def generation(micro: int, draft: int, target: int) -> Generation:
    """Two rounds; the first reads the prompt and takes an hour, which no fit may see."""
    seconds = 0.001 * micro + 0.004 * draft + 0.02 * target
    first = Round((), 0, (1,), "limit", counts(9, 9, 1), 3600.0, 0.0)
    return Generation((1, 2), (first, Round((), 0, (2,), "limit", counts(micro, draft, target), 0.0, seconds)), Counts())


def test_sigma_and_eta_of_the_papers_published_pair_fit_one_set_of_counts():
    """44.36 % and 14.46 %: 10.6 tokens handed over per round, 5.9 accepted, 6.9 emitted."""
    round_of = Counts(num_emitted=6916, num_drafted=10633, num_accepted=5916, num_target=1000)
    assert redundancy(round_of) == pytest.approx(0.4436, abs=1e-4)
    assert target_utilisation(round_of) == pytest.approx(0.1446, abs=1e-4)
    assert redundancy(Counts(num_emitted=3, num_target=3)) == 0.0


def test_the_three_times_are_found_again_from_generations_that_obey_them():
    generations = [generation(5, 2, 1), generation(0, 3, 2), generation(7, 7, 1), generation(1, 0, 5)]
    times = fit_times(generations, is_micro=[False] * 4)
    assert (times.t_micro_s, times.t_draft_s, times.t_target_s) == pytest.approx((0.001, 0.004, 0.02))
    assert times.r2 == pytest.approx(1.0)


def test_the_speedup_is_over_a_target_forward_per_token():
    times = Times(t_micro_s=0.1, t_draft_s=0.5, t_target_s=1.0)
    assert times.speedup(counts(0, 0, 7, num_emitted=7)) == 1.0
    assert times.speedup(counts(10, 2, 2, num_emitted=8)) == pytest.approx(8 / 4)


def test_plain_speculation_with_the_micro_books_its_forwards_to_the_micro():
    moved = swapped(counts(0, 6, 2, num_drafted=6))
    assert (moved.num_micro_forwards, moved.num_draft_forwards, moved.num_micro, moved.num_drafted) == (6, 0, 6, 6)


def test_a_fit_from_too_few_generations_is_refused():
    with pytest.raises(ValueError, match="at least 4 generations"):
        fit_times([generation(1, 1, 1)], is_micro=[False])
