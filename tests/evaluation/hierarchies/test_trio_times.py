"""sigma, eta, the times of three models (HSDDW; law 4.9), when a third level pays, and what runs on test."""

from dataclasses import replace

import pytest

from decode import Counts, Generation, Round
from decode.policies import Entropy, FixedLength
from evaluation.competitor import Competitor
from evaluation.hierarchies.command import play
from evaluation.hierarchies.decoded import MICRO_ALONE, Decoded, StoredLoop, stored_of
from evaluation.hierarchies.tables import paying, third_level_frame, third_level_verdict
from evaluation.hierarchies.times import at_ratios, break_even, fit_times, redundancy
from evaluation.times import Times

FREE = Competitor("sd", "sd", FixedLength(0), ({"k": 3},))
STOPPED = Competitor("HSDDW", "HSDDW", Entropy(), ({"window": 10},), micro_policy=Entropy())
FIXED = Competitor("pre-verified", "pre-verified", FixedLength(0), ({"n": 1}, {"n": 4}))
TRIO = (5, 2, 1), (0, 3, 2), (7, 7, 1), (1, 0, 5)


def counts(micro: int, draft: int, target: int, **more: int) -> Counts:
    return Counts(num_micro_forwards=micro, num_draft_forwards=draft, num_target=target, **more)


def stored(micro: int, draft: int, target: int, *, stop_s: float = 0.0, stall: float = 1.0, **more: int):
    """Two rounds at 1, 4 and 20 ms a forward; the first reads the prompt and takes an hour, which no fit may see."""
    draft_s = stall * (0.001 * micro + 0.004 * draft + stop_s * (micro + draft))
    first = Round((), 0, (1,), "limit", counts(9, 9, 1), 3600.0, 0.0)
    second = Round((), 0, (2,), "limit", counts(micro, draft, target), draft_s, stall * 0.02 * target)
    return stored_of([Generation((1, 2), (first, second), counts(micro, draft, target, **more))])


def decoded(competitor: Competitor, *settings: list) -> Decoded:
    return Decoded.of(competitor, settings)


def three(times: Times) -> tuple[float, ...]:
    return times.t_micro_s, times.t_draft_s, *times.t_target_s


def test_sigma_and_eta_of_the_papers_published_pair_fit_one_set_of_counts():
    """44.36 % and 14.46 %: 10.6 tokens handed over per round, 5.9 accepted, 6.9 emitted."""
    round_of = Counts(num_emitted=6916, num_drafted=10633, num_accepted=5916, num_target=1000)
    assert (redundancy(round_of), round_of.verification_rate) == pytest.approx((0.4436, 0.1446), abs=1e-4)
    assert redundancy(Counts(num_emitted=3, num_target=3)) == 0.0


def test_the_fit_recovers_the_three_times_and_a_stalled_generation_changes_none():
    times, r2 = fit_times([decoded(FREE, [stored(*of) for of in TRIO])])
    assert (*three(times), r2) == pytest.approx((0.001, 0.004, 0.02, 1.0))
    of = [stored(*each) for each in (*TRIO, (2, 9, 3), (8, 1, 4))]
    times, r2 = fit_times([decoded(FREE, [*of, *of, stored(2, 9, 3, stall=60.0)])])
    assert three(times) == pytest.approx((0.001, 0.004, 0.02), rel=0.02)
    assert r2 < 0.5
    with pytest.raises(ValueError, match="at least 4 generations"):
        fit_times([decoded(FREE, of[:1])])


def test_a_stop_is_paid_at_every_forward_of_the_models_that_it_stops():
    """2 ms a stop: HSDDW pays it at micro's forwards and at the draft's, plain speculation nowhere."""
    free = decoded(FREE, [stored(*of) for of in ((0, 3, 2), (6, 1, 2), (1, 0, 5))])
    slower = decoded(STOPPED, [stored(*of, stop_s=0.002) for of in ((5, 2, 1), (7, 7, 1), (3, 9, 2))])
    times, _ = fit_times([free, slower])
    kind = Entropy().stop_kind
    assert (*three(times), times.t_stop_s[kind]) == pytest.approx((0.001, 0.004, 0.02, 0.002))
    plain = replace(slower.played, stop_kind="", micro_stop_kind="")
    more_s = times.time_s(slower.played) - times.time_s(plain)
    assert more_s.tolist()[0] == pytest.approx([0.002 * forwards for forwards in (7, 14, 12)])
    assert at_ratios(0.1, 0.5, {kind: 0.2}).t_stop_s == {kind: 0.1}


def test_forwards_of_the_micro_alone_count_as_micros():
    one = stored(0, 6, 2, num_drafted=6)
    total = decoded(replace(FREE, family=MICRO_ALONE), [one, one]).played.total()
    assert (total.num_micro_forwards, total.num_draft_forwards) == (12, 0)
    assert (total.num_micro, total.num_drafted) == (12, 12)


@pytest.mark.parametrize("stop_s", [0.0, 0.05])
def test_at_the_break_even_both_take_the_same_time_per_token(stop_s):
    plain, hierarchy, slow = (
        decoded(one, [stored(*of, num_emitted=num)]).played
        for one, of, num in ((FREE, (0, 50, 10), 50), (STOPPED, (60, 20, 10), 54), (FREE, (60, 60, 12), 50))
    )
    times = Times(0.3, (1.0,), t_stop_s={Entropy().stop_kind: stop_s}, t_micro_s=7.0)
    there = replace(times, t_micro_s=0.3 * break_even(hierarchy, plain, times))
    assert there.tokens_per_s(hierarchy) == pytest.approx(there.tokens_per_s(plain))
    assert break_even(slow, plain, times) < 0


def test_a_repeated_generation_has_the_median_of_its_seconds():
    rounds = [
        tuple(Round((), 0, (token,), "limit", counts(1, 1, 1), seconds, 1.0) for token in (1, 2))
        for seconds in (2.0, 90.0, 3.0)
    ]
    one = stored_of([Generation((1, 2), each, Counts()) for each in rounds])
    assert [one[name] for name in ("seconds", "later_draft_s", "later_target_s", "repeats")] == [8.0, 3.0, 1.0, 3]


def forty(competitor: Competitor, *settings: tuple[int, int, int]) -> Decoded:
    """Forty prompts: ten tokens, `target` rounds of five handed over, three accepted."""
    more = [{"num_emitted": 10, "num_drafted": 5 * of[2], "num_accepted": 3 * of[2]} for of in settings]
    return decoded(competitor, *([stored(*of, **each)] * 40 for of, each in zip(settings, more, strict=True)))


def test_a_third_level_pays_exactly_between_its_break_evens():
    """Two runs of ten tokens: T = 4 c + 2 + 20 c m against 10 c + 3, equal at m = (6 c + 1) / 20 c, which is 0.55 for c
    = 0.2.
    """
    free = replace(STOPPED, policy=FixedLength(0), micro_policy=None)
    gain = third_level_frame([forty(FREE, (0, 10, 3)), forty(free, (20, 4, 2))], Times(0.2, (1.0,), t_micro_s=1.0))
    here = gain[gain["is_here"]]
    assert paying(here) == "0.00-0.54"
    assert here["standard_error"].max() == pytest.approx(0.0)


class Loop(StoredLoop):
    """Decodes nothing: the short setting takes more rounds."""

    def __init__(self):
        pass

    def play(self, competitors, prompts, **options):
        forwards = {1: (9, 12, 2), 4: (9, 9, 2), None: (9, 12, 2)}
        return [forty(one, *(forwards[setting.get("n")] for setting in one.settings)) for one in competitors]


def test_dev_chooses_what_runs_on_test_and_without_dev_the_first_setting_runs():
    dev, test = play(Loop(), [FREE, FIXED], [[1]], [[1]])
    assert [one.seconds.shape for one in dev] == [(1, 40), (2, 40)]
    assert [one.competitor for one in test] == [FREE, FIXED.at(1)]
    assert [one.competitor for one in play(Loop(), [FREE, FIXED], [], [[1]])[1]] == [FREE, FIXED.at(0)]
    with pytest.raises(ValueError, match="no test prompts to compare"):
        play(Loop(), [FREE, FIXED], [[1]], [])


def test_dev_chooses_both_sides_and_test_reports_them():
    dev = [forty(FREE, (0, 10, 3)), forty(STOPPED, (20, 4, 2)), forty(FIXED.at(0), (20, 8, 2))]
    test = [forty(FREE, (0, 10, 3)), forty(STOPPED, (20, 40, 9)), forty(FIXED.at(0), (2, 2, 1))]
    times = Times(0.1, (1.0,), t_micro_s=0.01)
    verdict = third_level_verdict(test, dev, third_level_frame(dev, times), times=times)
    assert "the best hierarchy, HSDDW window=10, is" in verdict
    assert "both chosen on dev." in verdict
    alone = third_level_verdict(test, [], third_level_frame(test, times), times=times)
    assert "pre-verified n=1, is" in alone
    assert "both chosen on the same prompts." in alone
