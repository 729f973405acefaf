"""When a third level pays, and which configuration runs on test."""

import pytest

from decode import Counts
from evaluation.hierarchies.command import play
from evaluation.hierarchies.decoded import Configuration, Decoded, Run, StoredLoop, chosen_on_dev
from evaluation.hierarchies.tables import paying, third_level_frame, third_level_verdict
from evaluation.hierarchies.times import TrioTimes

PLAIN = Configuration("sd", "K=3", lambda: None)
HSDDW = Configuration("HSDDW", "K<=10", lambda: None, 3)
SHORT, LONG = (Configuration("pre-verified", setting, lambda: None, 3) for setting in ("n=1 K=3", "n=4 K=10"))


def run_of(configuration: Configuration, micro: int, draft: int, target: int) -> Run:
    """Forty prompts: ten tokens, `target` rounds of five handed over, three accepted."""
    forwards = {"num_micro_forwards": micro, "num_draft_forwards": draft, "num_target": target}
    counts = Counts(num_emitted=10, num_drafted=5 * target, num_accepted=3 * target, **forwards)
    draft_s, target_s = 0.01 * micro + 0.1 * draft, 1.0 * target
    one = Decoded(counts=counts, seconds=1.0, later=counts, later_draft_s=draft_s, later_target_s=target_s)
    return Run(configuration, (one,) * 40)


def test_a_third_level_pays_exactly_between_its_break_evens():
    """Two runs of ten tokens: T = 4 c + 2 + 20 c m against 10 c + 3, equal at m = (6 c + 1) / 20 c, which is 0.55 for c
    = 0.2.
    """
    runs = [run_of(PLAIN, 0, 10, 3), run_of(HSDDW, 20, 4, 2)]
    gain = third_level_frame(runs, TrioTimes(t_micro_s=1.0, t_draft_s=0.2, t_target_s=1.0))
    here = gain[gain["is_here"]]
    assert paying(here) == "0.00-0.54"
    assert here["standard_error"].max() == pytest.approx(0.0)


def test_dev_chooses_the_fastest_configuration_of_a_name_and_the_last_of_equals():
    runs = [run_of(SHORT, 10, 4, 3), run_of(LONG, 20, 16, 2)]
    assert chosen_on_dev(runs, lambda run: run.counts.num_draft_forwards) == {SHORT.name: LONG}
    assert chosen_on_dev(runs, lambda run: -run.counts.num_draft_forwards) == {SHORT.name: SHORT}
    assert chosen_on_dev(runs, lambda run: 1.0) == {SHORT.name: LONG}


class Loop(StoredLoop):
    """Decodes nothing: the short setting takes more rounds."""

    def __init__(self):
        pass

    def play(self, configurations, prompts, **options):
        return [run_of(one, 9, 9 if one == LONG else 12, 2) for one in configurations]


def test_dev_chooses_what_runs_on_test_and_without_dev_the_first_setting_runs():
    members, prompts = [PLAIN, SHORT, LONG], [[1]]
    dev, runs = play(Loop(), members, prompts, prompts)
    assert len(dev) == 3
    assert [run.configuration for run in runs] == [PLAIN, LONG]
    assert [run.configuration for run in play(Loop(), members, [], prompts)[1]] == [PLAIN, SHORT]
    with pytest.raises(ValueError, match="no test prompts to compare"):
        play(Loop(), members, prompts, [])


def test_dev_chooses_both_sides_and_test_reports_them():
    dev = [run_of(PLAIN, 0, 10, 3), run_of(HSDDW, 20, 4, 2), run_of(SHORT, 20, 8, 2)]
    test = [run_of(PLAIN, 0, 10, 3), run_of(HSDDW, 20, 40, 9), run_of(SHORT, 2, 2, 1)]
    times = TrioTimes(t_micro_s=0.01, t_draft_s=0.1, t_target_s=1.0)
    verdict = third_level_verdict(test, dev, third_level_frame(dev, times), times=times)
    assert "the best hierarchy, HSDDW K<=10, is" in verdict
    assert "both chosen on dev." in verdict
    alone = third_level_verdict(test, [], third_level_frame(test, times), times=times)
    assert "pre-verified n=1 K=3, is" in alone
    assert "both chosen on the same prompts." in alone
