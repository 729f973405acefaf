"""When a third level pays, and which setting of a competitor runs on test."""

import pytest

from decode import Counts
from evaluation.hierarchies.built import Competitor, Setting
from evaluation.hierarchies.generations import Decoded
from evaluation.hierarchies.runs import Candidate, at_settings, best_on_dev
from evaluation.hierarchies.tables import paying, third_level_frame, third_level_verdict
from evaluation.hierarchies.times import TrioTimes

SHORT, LONG = (Setting(label, lambda: None) for label in ("n=1 K=3", "n=4 K=10"))
HSDDW = Competitor("HSDDW", 3, (Setting("K<=10", lambda: None),))
FIXED = Competitor("pre-verified, fixed lengths", 3, (SHORT, LONG))


def run_of(
    competitor: Competitor, setting: Setting, micro: int, draft: int, target: int, *, num_prompts: int = 40
) -> Candidate:
    """Every prompt: ten tokens, `target` rounds of five handed over, three accepted."""
    counts = Counts(
        num_emitted=10,
        num_drafted=5 * target,
        num_accepted=3 * target,
        num_target=target,
        num_micro_forwards=micro,
        num_draft_forwards=draft,
    )
    decoded = Decoded(
        counts=counts, lengths=(5,) * target, seconds=1.0, later=counts, later_draft_s=0.5, later_target_s=0.5
    )
    return Candidate(competitor, setting, (decoded,) * num_prompts)


HIERARCHY = run_of(HSDDW, HSDDW.settings[0], 20, 4, 2)


def test_a_third_level_pays_exactly_between_its_break_evens():
    """Two runs of ten tokens: T = 4 c + 2 + 20 c m against 10 c + 3, equal at m = (6 c + 1) / 20 c, which is 0.55 for c
    = 0.2.
    """
    plain = run_of(Competitor("sd", 2, (SHORT,)), SHORT, 0, 10, 3)
    gain = third_level_frame([plain, HIERARCHY], TrioTimes(t_micro_s=1.0, t_draft_s=0.2, t_target_s=1.0))
    here = gain[gain["is_here"]]
    assert paying(here) == "0.00-0.54"
    assert here["standard_error"].max() == pytest.approx(0.0)


def test_dev_decides_and_without_dev_the_first_setting_stands():
    runs = [run_of(FIXED, SHORT, 10, 4, 3), run_of(FIXED, LONG, 20, 16, 2)]
    best = best_on_dev(runs, lambda run: run.counts.num_draft_forwards)
    assert [one.settings for one in at_settings([FIXED], best)] == [(LONG,)]
    assert [one.settings for one in at_settings([FIXED], {})] == [(SHORT,)]


def test_dev_chooses_both_sides_and_test_reports_them():
    plain = Competitor("sd", 2, (SHORT,))
    dev = [run_of(plain, SHORT, 0, 10, 3), run_of(HSDDW, SHORT, 20, 4, 2), run_of(FIXED, SHORT, 20, 8, 2)]
    test = [run_of(plain, SHORT, 0, 10, 3), run_of(HSDDW, SHORT, 20, 40, 9), run_of(FIXED, SHORT, 2, 2, 1)]
    times = TrioTimes(t_micro_s=0.01, t_draft_s=0.1, t_target_s=1.0)
    said = third_level_verdict(test, dev, third_level_frame(dev, times), times=times)
    assert "the best hierarchy, HSDDW n=1 K=3, is" in said
    assert "both chosen on dev." in said
    alone = third_level_verdict(test, [], third_level_frame(test, times), times=times)
    assert "pre-verified, fixed lengths n=1 K=3, is" in alone
    assert "both chosen on these very prompts." in alone
