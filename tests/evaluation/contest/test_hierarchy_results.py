"""Decoded hierarchies beside replayed policies: settings follow the costs, times are the three-time model's, the page
computes the same.
"""

import html
import re
import shutil
import subprocess
from dataclasses import replace

import numpy as np
import pytest

from decode import Counts
from evaluation.competitors import Competitor, Setting
from evaluation.contest.arms import replay_arms
from evaluation.contest.decoded import DecodedHierarchies
from evaluation.contest.grids import bounds, make_grid
from evaluation.contest.results import results_of, yardstick_of
from evaluation.costs.model import CostModel
from evaluation.hierarchies.generations import Decoded
from evaluation.hierarchies.runs import Candidate, at_settings, best_on_dev
from evaluation.hierarchies.tables import paying, third_level_frame
from evaluation.hierarchies.times import Times
from evaluation.intervals import Splits
from evaluation.report.page import Page, write_report
from lm import Sampling
from tests.toys.small_pair import trace

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
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


def hierarchies(num_prompts: int = 40) -> DecodedHierarchies:
    """Of FIXED, the short setting asks the target often, the long one the draft; which is faster depends on the
    ratio.
    """
    runs = [
        run_of(HSDDW, HSDDW.settings[0], 20, 4, 2, num_prompts=num_prompts),
        run_of(FIXED, SHORT, 10, 4, 3, num_prompts=num_prompts),
        run_of(FIXED, LONG, 20, 16, 2, num_prompts=num_prompts),
    ]
    return DecodedHierarchies(runs, runs, 0.25, np.arange(num_prompts))


@pytest.fixture(scope="module")
def arms():
    splits = Splits(*(trace(Sampling(temperature=0.6), seed=seed) for seed in (1, 2)))
    return list(replay_arms([make_grid("fixed_length", "fixed_length", {"k": range(5)}), *bounds()], splits))


@pytest.mark.parametrize(("ratio", "label"), [(2, "n=1 K=3"), (40, "n=4 K=10")])
def test_each_cost_has_the_setting_that_is_fastest_for_it(ratio, label):
    assert hierarchies().picks(CostModel.constant(1 / ratio, 1.0))["decoded_pre_verified"].label == label


def test_the_time_of_a_round_grows_with_what_it_verifies():
    growing = CostModel(0.1, tuple(1 + 0.2 * k for k in range(6)))
    run = hierarchies().dev[0]
    assert hierarchies().spent(run, growing).seconds[0] == pytest.approx(0.1 * (0.25 * 20 + 4) + 2 * (1 + 0.2 * 5))


def test_a_decoded_row_compares_throughputs(arms):
    cost = CostModel.constant(0.1, 1.0)
    yardstick = yardstick_of(arms, cost)
    replayed = results_of(arms, cost, yardstick)
    rows = {row.family: row for row in hierarchies().results(cost, yardstick)}
    fixed = next(row for row in replayed if row.family == "fixed_length")
    row = rows["decoded_hsddw"]
    assert row.tokens_per_s == pytest.approx(10 / (0.1 * (0.25 * 20 + 4) + 2))
    assert row.gain.value == pytest.approx(row.tokens_per_s / fixed.tokens_per_s - 1)
    assert row.gain.low < row.gain.value < row.gain.high
    assert (row.verification_rate, row.acceptance_length, row.label) == (0.2, 4.0, "K<=10")


def test_a_third_level_pays_exactly_between_its_break_evens():
    """Two runs of ten tokens: T = 4 c + 2 + 20 c m against 10 c + 3, equal at m = (6 c + 1) / 20 c, which is 0.55 for c
    = 0.2.
    """
    plain = run_of(Competitor("sd", 2, (SHORT,)), SHORT, 0, 10, 3)
    gain = third_level_frame([plain, hierarchies().dev[0]], Times(t_micro_s=1.0, t_draft_s=0.2, t_target_s=1.0))
    here = gain[gain["is_here"]]
    assert paying(here) == "0.00-0.54"
    assert here["standard_error"].max() == pytest.approx(0.0)


def test_dev_decides_and_without_dev_the_first_setting_stands():
    runs = hierarchies().dev
    best = best_on_dev(runs[1:], lambda run: run.counts.num_draft_forwards)
    assert [one.settings for one in at_settings([FIXED], best)] == [(LONG,)]
    assert [one.settings for one in at_settings([FIXED], {})] == [(SHORT,)]


@pytest.mark.browser
@pytest.mark.skipif(BROWSER is None, reason="no headless browser here")
@pytest.mark.parametrize(("anchor", "slope"), [("#ratio=3", 0.0), ("#ratio=30", 0.0), ("", 0.2)])
def test_the_page_ranks_hierarchies_as_python_does(arms, tmp_path, anchor, slope):
    path, decoded = tmp_path / "report.html", hierarchies()
    cost = CostModel(0.2, tuple(1 + slope * k for k in range(6)))
    page = Page(about="", directory=tmp_path, cost=cost, datasets={"made": arms}, hierarchies={"made": decoded})
    write_report(page, names={})
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=3000", "--dump-dom"]
    dom = subprocess.run(
        [BROWSER, *flags, f"{path.as_uri()}{anchor}"], capture_output=True, text=True, timeout=120, check=True
    ).stdout
    shown = float(re.search(r'id="ratio-value"[^>]*>([\d.]+)<', dom)[1])
    table = dom.split('id="ranking"')[1].split("</table>")[0]
    rows = {
        family: [html.unescape(cell) for cell in re.findall(r"<td>(.*?)</td>", row)]
        for family, row in re.findall(r'<tr[^>]*data-decoded="(.*?)"[^>]*>(.*?)</tr>', table)
    }
    cost = replace(cost, t_draft_s=1 / shown)
    results = {result.family: result for result in decoded.results(cost, yardstick_of(arms, cost))}
    assert rows.keys() == results.keys()
    for family, result in results.items():
        assert rows[family][:2] == [family, decoded.picks(cost)[family].label]
        gain, speed, discard, verify, length = (float(rows[family][place].rstrip("%")) for place in (2, 3, 5, 6, 7))
        assert (gain, speed) == pytest.approx((100 * result.gain.value, result.tokens_per_s), rel=5e-3, abs=0.06)
        assert (discard, verify) == pytest.approx((result.discard_rate, result.verification_rate), abs=6e-4)
        assert length == pytest.approx(result.acceptance_length, abs=6e-3)
    assert dom.count("<table") == 2, "the ranking, and batches"
