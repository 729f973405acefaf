"""sigma, eta and the cost model with three times (HSDDW; law 4.9)."""

from dataclasses import replace

import pytest

from decode import Counts, Generation, Round
from evaluation.hierarchies.generations import Decoded, Key, append_decoded, prompt_key, read_decoded
from evaluation.hierarchies.times import (
    TrioTimes,
    at_ratios,
    break_even,
    fit_times,
    redundancy,
    swapped,
    target_utilisation,
)


def counts(micro: int, draft: int, target: int, **more: int) -> Counts:
    return Counts(num_micro_forwards=micro, num_draft_forwards=draft, num_target=target, **more)


def decoded(micro: int, draft: int, target: int) -> Decoded:
    """Two rounds; the first reads the prompt and takes an hour, which no fit may see."""
    first = Round((), 0, (1,), "limit", counts(9, 9, 1), 3600.0, 0.0)
    second = Round((), 0, (2,), "limit", counts(micro, draft, target), 0.001 * micro + 0.004 * draft, 0.02 * target)
    return Decoded.of([Generation((1, 2), (first, second), Counts())])


def test_sigma_and_eta_of_the_papers_published_pair_fit_one_set_of_counts():
    """44.36 % and 14.46 %: 10.6 tokens handed over per round, 5.9 accepted, 6.9 emitted."""
    round_of = Counts(num_emitted=6916, num_drafted=10633, num_accepted=5916, num_target=1000)
    assert redundancy(round_of) == pytest.approx(0.4436, abs=1e-4)
    assert target_utilisation(round_of) == pytest.approx(0.1446, abs=1e-4)
    assert redundancy(Counts(num_emitted=3, num_target=3)) == 0.0


def test_the_three_times_are_found_again_from_generations_that_obey_them():
    generations = [decoded(5, 2, 1), decoded(0, 3, 2), decoded(7, 7, 1), decoded(1, 0, 5)]
    times = fit_times(generations, is_micro=[False] * 4)
    assert (times.t_micro_s, times.t_draft_s, times.t_target_s) == pytest.approx((0.001, 0.004, 0.02))
    assert times.r2 == pytest.approx(1.0)


def test_a_stop_is_paid_at_every_forward_of_the_models_that_it_stops():
    """2 ms a stop: HSDDW pays it at micro's forwards and at the draft's, plain speculation nowhere."""
    stops = {"micro": "entropy", "draft": "entropy"}
    stopped = [decoded(5, 2, 1), decoded(7, 7, 1), decoded(3, 9, 2)]
    dearer = [
        replace(one, later_draft_s=one.later_draft_s + 0.002 * number)
        for one, number in zip(stopped, (7, 14, 12), strict=True)
    ]
    generations = [decoded(0, 3, 2), decoded(6, 1, 2), decoded(1, 0, 5), *dearer]
    times = fit_times(generations, is_micro=[False] * 6, stops=[{}] * 3 + [stops] * 3)
    assert (times.t_micro_s, times.t_draft_s, times.t_stop_s["entropy"]) == pytest.approx((0.001, 0.004, 0.002))
    assert times.seconds(counts(5, 2, 1), stops) == pytest.approx(times.seconds(counts(5, 2, 1)) + 7 * 0.002)
    plain, hierarchy = counts(0, 50, 10, num_emitted=50), counts(60, 20, 10, num_emitted=54)
    there = replace(times, t_micro_s=times.t_draft_s * break_even(hierarchy, plain, times, stops))
    assert there.speedup(hierarchy, stops) == pytest.approx(there.speedup(plain))
    assert at_ratios(0.1, 0.5, {"entropy": 0.2}).t_stop_s == {"entropy": 0.1}


def test_a_stalled_generation_moves_no_time():
    generations = [
        decoded(5, 2, 1),
        decoded(0, 3, 2),
        decoded(7, 7, 1),
        decoded(1, 0, 5),
        decoded(2, 9, 3),
        decoded(8, 1, 4),
    ]
    stalled = replace(generations[4], later_draft_s=2.0, later_target_s=3.0)
    times = fit_times([*generations, *generations, stalled], is_micro=[False] * 13)
    assert (times.t_micro_s, times.t_draft_s, times.t_target_s) == pytest.approx((0.001, 0.004, 0.02), rel=0.02)
    assert times.r2 < 0.5


def test_the_speedup_is_over_a_target_forward_per_token():
    times = TrioTimes(t_micro_s=0.1, t_draft_s=0.5, t_target_s=1.0)
    assert times.speedup(counts(0, 0, 7, num_emitted=7)) == 1.0
    assert times.speedup(counts(10, 2, 2, num_emitted=8)) == pytest.approx(8 / 4)


def test_plain_speculation_with_the_micro_books_its_forwards_to_the_micro():
    moved = swapped(counts(0, 6, 2, num_drafted=6))
    assert (moved.num_micro_forwards, moved.num_draft_forwards, moved.num_micro, moved.num_drafted) == (6, 0, 6, 6)


def test_a_fit_from_too_few_generations_is_refused():
    with pytest.raises(ValueError, match="at least 4 generations"):
        fit_times([decoded(1, 1, 1)], is_micro=[False])


def test_at_the_break_even_both_take_the_same_time_per_token():
    plain, hierarchy = counts(0, 50, 10, num_emitted=50), counts(60, 20, 10, num_emitted=54)
    times = TrioTimes(t_micro_s=7.0, t_draft_s=0.3, t_target_s=1.0)
    there = TrioTimes(t_micro_s=0.3 * break_even(hierarchy, plain, times), t_draft_s=0.3, t_target_s=1.0)
    assert there.speedup(hierarchy) == pytest.approx(there.speedup(plain))
    assert break_even(counts(60, 60, 12, num_emitted=50), plain, times) < 0


def test_kept_generations_are_read_back_and_a_torn_line_is_cut_off(tmp_path):
    one, other = Key(prompt_key([1, 2]), "HSDDW", "K<=10"), Key(prompt_key([3]), "sd", "K=5 ab12")
    append_decoded(tmp_path, {one: decoded(5, 2, 1)})
    with (tmp_path / "decoded.jsonl").open("a") as file:
        file.write('{"key": {"prompt": "half')
    assert read_decoded(tmp_path) == {one: decoded(5, 2, 1)}
    append_decoded(tmp_path, {other: decoded(1, 1, 1)})
    assert read_decoded(tmp_path) == {one: decoded(5, 2, 1), other: decoded(1, 1, 1)}
    assert read_decoded(tmp_path / "nowhere") == {}


def test_a_repeated_generation_keeps_its_median(tmp_path):
    def taking(seconds: float) -> Generation:
        return Generation(
            (1, 2), tuple(Round((), 0, (token,), "limit", counts(1, 1, 1), seconds, 1.0) for token in (1, 2)), Counts()
        )

    one = Decoded.of([taking(seconds) for seconds in (2.0, 90.0, 3.0)])
    assert (one.seconds, one.later_draft_s, one.later_target_s, one.repeats) == (8.0, 3.0, 1.0, 3)
    append_decoded(tmp_path, {Key("ab", "HSDDW", "K<=10"): one})
    assert read_decoded(tmp_path) == {Key("ab", "HSDDW", "K<=10"): one}


@pytest.mark.parametrize("broken", ['{"key": {"prompt": "ha', '{"key": {}, "value": {"seconds": 1}}', "[]"])
def test_a_line_that_was_broken_by_hand_is_named(tmp_path, broken):
    append_decoded(tmp_path, {Key("ab", "HSDDW", "K<=10"): decoded(5, 2, 1)})
    with (tmp_path / "decoded.jsonl").open("a") as file:
        file.write(f"{broken}\n")
    with pytest.raises(ValueError, match=r"decoded\.jsonl:2: .*; delete the line"):
        read_decoded(tmp_path)
