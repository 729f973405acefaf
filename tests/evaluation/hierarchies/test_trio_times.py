"""sigma, eta, the times of three models (HSDDW; law 4.9), and stored generations."""

from dataclasses import replace

import pytest

from decode import Counts, Generation, Round
from evaluation.hierarchies.decoded import Configuration, Decoded, Key, Run, append_decoded, prompt_key, read_decoded
from evaluation.hierarchies.times import TrioTimes, at_ratios, break_even, fit_times, redundancy

FREE = Configuration("sd", "K=5", lambda: None)
STOPPED = replace(FREE, stops={"micro": "entropy", "draft": "entropy"})
TRIO = (5, 2, 1), (0, 3, 2), (7, 7, 1), (1, 0, 5)


def counts(micro: int, draft: int, target: int, **more: int) -> Counts:
    return Counts(num_micro_forwards=micro, num_draft_forwards=draft, num_target=target, **more)


def decoded(micro: int, draft: int, target: int, *, stop_s: float = 0.0, stall: float = 1.0) -> Decoded:
    """Two rounds at 1, 4 and 20 ms a forward; the first reads the prompt and takes an hour, which no fit may see."""
    draft_s = stall * (0.001 * micro + 0.004 * draft + stop_s * (micro + draft))
    first = Round((), 0, (1,), "limit", counts(9, 9, 1), 3600.0, 0.0)
    second = Round((), 0, (2,), "limit", counts(micro, draft, target), draft_s, stall * 0.02 * target)
    return Decoded.of([Generation((1, 2), (first, second), Counts())])


def fitted(*runs: Run) -> tuple[TrioTimes, tuple[float, ...]]:
    times = fit_times(runs)
    return times, (times.t_micro_s, times.t_draft_s, times.t_target_s)


def test_sigma_and_eta_of_the_papers_published_pair_fit_one_set_of_counts():
    """44.36 % and 14.46 %: 10.6 tokens handed over per round, 5.9 accepted, 6.9 emitted."""
    round_of = Counts(num_emitted=6916, num_drafted=10633, num_accepted=5916, num_target=1000)
    assert redundancy(round_of) == pytest.approx(0.4436, abs=1e-4)
    assert round_of.verification_rate == pytest.approx(0.1446, abs=1e-4)
    assert redundancy(Counts(num_emitted=3, num_target=3)) == 0.0


def test_the_fit_recovers_the_three_times():
    times, three = fitted(Run(FREE, tuple(decoded(*of) for of in TRIO)))
    assert three == pytest.approx((0.001, 0.004, 0.02))
    assert times.r2 == pytest.approx(1.0)


def test_a_stop_is_paid_at_every_forward_of_the_models_that_it_stops():
    """2 ms a stop: HSDDW pays it at micro's forwards and at the draft's, plain speculation nowhere."""
    free = tuple(decoded(*of) for of in ((0, 3, 2), (6, 1, 2), (1, 0, 5)))
    slower = tuple(decoded(*of, stop_s=0.002) for of in ((5, 2, 1), (7, 7, 1), (3, 9, 2)))
    times, three = fitted(Run(FREE, free), Run(STOPPED, slower))
    assert (*three, times.t_stop_s["entropy"]) == pytest.approx((0.001, 0.004, 0.02, 0.002))
    stops = STOPPED.stops
    assert times.seconds(counts(5, 2, 1), stops) == pytest.approx(times.seconds(counts(5, 2, 1)) + 7 * 0.002)
    assert at_ratios(0.1, 0.5, {"entropy": 0.2}).t_stop_s == {"entropy": 0.1}


def test_a_stalled_generation_changes_no_time():
    of = [decoded(*each) for each in (*TRIO, (2, 9, 3), (8, 1, 4))]
    times, three = fitted(Run(FREE, (*of, *of, decoded(2, 9, 3, stall=60.0))))
    assert three == pytest.approx((0.001, 0.004, 0.02), rel=0.02)
    assert times.r2 < 0.5


def test_the_speedup_is_over_a_target_forward_per_token():
    times = TrioTimes(t_micro_s=0.1, t_draft_s=0.5, t_target_s=1.0)
    assert times.speedup(counts(0, 0, 7, num_emitted=7)) == 1.0
    assert times.speedup(counts(10, 2, 2, num_emitted=8)) == pytest.approx(8 / 4)


def test_forwards_of_the_micro_alone_count_as_micros():
    one = replace(decoded(0, 6, 2), counts=counts(0, 6, 2, num_drafted=6))
    total = Run(replace(FREE, is_micro=True), (one, one)).counts
    assert (total.num_micro_forwards, total.num_draft_forwards) == (12, 0)
    assert (total.num_micro, total.num_drafted) == (12, 12)
    with pytest.raises(ValueError, match="at least 4 generations"):
        fit_times([Run(FREE, (one,))])


@pytest.mark.parametrize("stop_s", [0.0, 0.05])
def test_at_the_break_even_both_take_the_same_time_per_token(stop_s):
    plain, hierarchy = counts(0, 50, 10, num_emitted=50), counts(60, 20, 10, num_emitted=54)
    times = TrioTimes(t_micro_s=7.0, t_draft_s=0.3, t_target_s=1.0, t_stop_s={"entropy": stop_s})
    there = replace(times, t_micro_s=0.3 * break_even(hierarchy, plain, times, STOPPED.stops))
    assert there.speedup(hierarchy, STOPPED.stops) == pytest.approx(there.speedup(plain))
    assert break_even(counts(60, 60, 12, num_emitted=50), plain, times) < 0


def test_stored_generations_are_read_back_and_a_torn_line_is_cut_off(tmp_path):
    one, other = Key(prompt_key([1, 2]), "HSDDW", "K<=10"), Key(prompt_key([3]), "sd", "K=5 ab12")
    append_decoded(tmp_path, {one: decoded(5, 2, 1)})
    with (tmp_path / "decoded.jsonl").open("a") as file:
        file.write('{"key": {"prompt": "half')
    assert read_decoded(tmp_path) == {one: decoded(5, 2, 1)}
    append_decoded(tmp_path, {other: decoded(1, 1, 1)})
    assert read_decoded(tmp_path) == {one: decoded(5, 2, 1), other: decoded(1, 1, 1)}
    assert read_decoded(tmp_path / "nowhere") == {}


def test_a_repeated_generation_has_the_median_of_its_seconds():
    rounds = [
        tuple(Round((), 0, (token,), "limit", counts(1, 1, 1), seconds, 1.0) for token in (1, 2))
        for seconds in (2.0, 90.0, 3.0)
    ]
    one = Decoded.of([Generation((1, 2), each, Counts()) for each in rounds])
    assert (one.seconds, one.later_draft_s, one.later_target_s, one.repeats) == (8.0, 3.0, 1.0, 3)


@pytest.mark.parametrize("broken", ['{"key": {"prompt": "ha', '{"key": {}, "value": {"seconds": 1}}', "[]"])
def test_the_error_for_a_broken_line_names_it(tmp_path, broken):
    append_decoded(tmp_path, {Key("ab", "HSDDW", "K<=10"): decoded(5, 2, 1)})
    with (tmp_path / "decoded.jsonl").open("a") as file:
        file.write(f"{broken}\n")
    with pytest.raises(ValueError, match=r"decoded\.jsonl:2: .*; delete the line"):
        read_decoded(tmp_path)
