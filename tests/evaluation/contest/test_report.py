"""The page is self-contained, and its slider switches between tables that Python computed."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from evaluation.competitor import bounds, default_values, make_competitor
from evaluation.contest.arms import picks_of, replay_arms
from evaluation.families import family
from evaluation.gain import Splits
from evaluation.report import page as page_module
from evaluation.report.command import write_plots
from evaluation.report.page import Page, Ranking, write_report
from evaluation.report.plots import entropies, pareto
from evaluation.table import Table
from evaluation.times import StopShares, Times
from lm import Sampling
from tests.toys.small_pair import trace

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

STOPS = {"entropy": 0.05, "token_prob": 0.02}
COST = Times.constant(0.2, 1.0, elsewhere=StopShares("given", STOPS))


@pytest.fixture(scope="module")
def arms():
    splits = Splits(*(trace(Sampling(temperature=0.6), copies=2, seed=seed) for seed in (1, 2)))
    grids = [
        make_competitor(name, name, values)
        for name, values in default_values(5).items()
        if name in {"fixed_length", "entropy", "token_prob"}
    ]
    return list(replay_arms([*grids, *bounds()], splits)), splits.test


def ranking(ratio: float, *, is_here: bool = False) -> Ranking:
    families = ["target_alone", "fixed_length", "entropy", "oracle"]
    rows = [{"policy": family(name).label, "setting": "x < 2"} for name in families]
    return Ranking(ratio, Table(f"at {ratio}", rows), families, "entropy", is_here=is_here)


@pytest.fixture(scope="module")
def page(arms, tmp_path_factory):
    directory = tmp_path_factory.mktemp("report")
    plots = [pareto(picks_of(arms[0], COST)), entropies(arms[1])]
    rankings = {"made": [ranking(3.0), ranking(5.0, is_here=True), ranking(20.0)]}
    write_report(Page(about="a < b", directory=directory, cost=COST, rankings=rankings, plots=plots))
    return directory / "report.html"


def test_the_page_fetches_nothing_and_is_small(page):
    text = page.read_text()
    assert len(text) < 6e6
    assert not re.search(r"""(src|href)\s*=\s*["'](https?:)?//|fetch\(|XMLHttpRequest|@import""", text)
    assert "a &lt; b" in text
    assert not re.search(r"\$(?!\{)[a-z]", text)


def batch_row(size: int, family: str, share: float, tokens_per_s: float, gain: float) -> dict[str, object]:
    named = {"dataset": "made", "ratio": 5.0, "costs": "given", "verify_share": share}
    named |= {"batch_size": size, "family": family, "name": family}
    return named | {"setting": f"x={size}", "tokens_per_s": tokens_per_s, "gain": gain, "request_s": 2.0}


def test_plots_of_two_datasets_lie_side_by_side(arms, tmp_path):
    plot = pareto(picks_of(arms[0], COST))
    write_plots(tmp_path, [plot.of("one"), plot.of("two")])
    assert {path.name for path in tmp_path.iterdir()} == {"pareto-one.svg", "pareto-two.svg"}
    assert plot.of("one").caption == f"one: {plot.caption}"


def test_the_slider_has_a_table_for_each_ratio_and_opens_at_the_times_of_the_evaluation(page):
    text = page.read_text()
    assert re.findall(r'data-step="(\d)"( hidden)?', text) == [("0", " hidden"), ("1", ""), ("2", " hidden")]
    assert '["3", "5 (here)", "20"]' in text
    assert 'max="2" step="1" value="1"' in text
    assert Path(page_module.__file__).with_suffix(".html").read_text().count("\n") < 120, "no cost model"


def test_every_ranking_has_the_rows_of_its_table_the_best_in_bold_and_bounds_pale(page):
    part = page.read_text().split('data-step="1">')[1].split("</div></div>")[0]
    rows = re.findall(r'<tr class="(\w*)" data-family="(\w+)">(.*?)</tr>', part)
    assert [family for _, family, _ in rows] == ["target_alone", "fixed_length", "entropy", "oracle"]
    assert [name for name, *_ in rows] == ["", "", "best", "bound"]
    assert [re.findall("<td.*?>(.*?)</td>", cells) for *_, cells in rows][2] == ["entropy (SVIP)", "x &lt; 2"]


def test_batches_have_a_table_for_each_share_of_a_verified_token(tmp_path):
    rows = [
        batch_row(size, family, share, tokens_per_s + size, gain)
        for size in (1, 4)
        for share in (0.0, 0.2)
        for family, tokens_per_s, gain in (("fixed_length", 10.0, 0.0), ("entropy", 12.0 + share, 0.2))
    ]
    write_report(Page(about="", directory=tmp_path, cost=COST, batches=rows))
    tables = (tmp_path / "report.html").read_text().split("In batches")[1].split("<table>")[1:]
    shown = [
        [re.findall(r"<td.*?>(.*?)</td>", row) for row in re.findall(r"<tr class.*?</tr>", part)] for part in tables
    ]
    fixed = ["best fixed length", "11.0, +0.0%, 2 s", "14.0, +0.0%, 2 s"]
    assert shown[1] == [fixed, ["entropy (SVIP)", "13.2, +20.0%, 2 s", "16.2, +20.0%, 2 s"]]
    assert len(shown) == 2


@pytest.mark.browser
@pytest.mark.skipif(BROWSER is None, reason="no headless browser here")
def test_the_page_shows_the_table_of_its_step(page):
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=3000", "--dump-dom"]
    asked = [BROWSER, *flags, page.as_uri()]
    dom = subprocess.run(asked, capture_output=True, text=True, timeout=120, check=True).stdout
    assert re.findall(r'data-step="(\d)"( hidden)?', dom) == [("0", " hidden"), ("1", ""), ("2", " hidden")]
    assert '<output id="step-value">5 (here)</output>' in dom
