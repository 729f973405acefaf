"""The page is self-contained, and a browser ranks policies as Python does, at every position of its slider."""

import base64
import html
import json
import re
import shutil
import subprocess

import numpy as np
import pytest

from evaluation.contest.arms import picks_of, replay_arms
from evaluation.contest.grids import bounds, default_values, make_grid
from evaluation.contest.results import results_of, yardstick_of
from evaluation.contest.tables import NAMES
from evaluation.costs.model import CostModel, StopShares
from evaluation.intervals import Splits
from evaluation.report.command import write_plots
from evaluation.report.page import Page, _packed, write_report
from evaluation.report.plots import entropies, pareto
from lm import Sampling
from tests.toys.small_pair import trace

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

STOPS = {"entropy": 0.05, "token_prob": 0.02}
COST = CostModel.constant(0.2, 1.0, elsewhere=StopShares("given", STOPS))


@pytest.fixture(scope="module")
def arms():
    splits = Splits(*(trace(Sampling(temperature=0.6), copies=2, seed=seed) for seed in (1, 2)))
    grids = [
        make_grid(name, name, values)
        for name, values in default_values(5).items()
        if name in {"fixed_length", "entropy", "token_prob"}
    ]
    return list(replay_arms([*grids, *bounds()], splits)), splits.test


@pytest.fixture(scope="module")
def page(arms, tmp_path_factory):
    directory = tmp_path_factory.mktemp("report")
    plots = [pareto(picks_of(arms[0], COST)), entropies(arms[1])]
    page = Page(about="a < b", directory=directory, cost=COST, datasets={"made": arms[0]}, plots=plots)
    write_report(page)
    return directory / "report.html"


def test_the_page_fetches_nothing_and_is_small(page):
    text = page.read_text()
    assert len(text) < 6e6
    assert not re.search(r"""(src|href)\s*=\s*["'](https?:)?//|fetch\(|XMLHttpRequest|@import""", text)
    assert "__DATA__" not in text


def batch_row(size: int, family: str, share: float, tokens_per_s: float, gain: float) -> dict[str, object]:
    named = {
        "dataset": "made",
        "ratio": 5.0,
        "costs": "given",
        "verify_share": share,
        "batch_size": size,
        "family": family,
        "name": family,
    }
    return named | {"setting": f"x={size}", "tokens_per_s": tokens_per_s, "gain": gain, "request_s": 2.0}


def test_plots_of_two_datasets_lie_side_by_side(arms, tmp_path):
    plot = pareto(picks_of(arms[0], COST))
    write_plots(tmp_path, [plot.of("one"), plot.of("two")])
    assert {path.name for path in tmp_path.iterdir()} == {"pareto-one.svg", "pareto-two.svg"}
    assert plot.of("one").caption == f"one: {plot.caption}"


@pytest.mark.parametrize("most", [9, 2**16 - 1, 2**16, 10**6])
def test_counts_of_any_size_fit_into_the_page(most):
    values = np.array([[0, 1], [most, 2]])
    packed = _packed(values)
    assert np.frombuffer(base64.b64decode(packed["numbers"]), f"<{packed['form']}").tolist() == values.ravel().tolist()


def dom_of(url: str) -> str:
    """The page once its scripts have run."""
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=3000", "--dump-dom"]
    return subprocess.run([BROWSER, *flags, url], capture_output=True, text=True, timeout=120, check=True).stdout


@pytest.mark.browser
@pytest.mark.skipif(BROWSER is None, reason="no headless browser here")
def test_the_page_reads_what_was_packed(page, tmp_path):
    reader = next(line for line in page.read_text().splitlines() if line.startswith("const numbers"))
    packed = json.dumps([_packed(np.array([1, most])) for most in (9, 2**16)] + [_packed(np.array([0.5]))])
    path = tmp_path / "packed.html"
    shown = f"document.querySelector('p').textContent = {packed}.map((each) => [...numbers(each)]).join()"
    path.write_text(f"<p></p><script>{reader}\n{shown}</script>")
    assert "<p>1,9,1,65536,0.5</p>" in dom_of(path.as_uri())


@pytest.mark.browser
@pytest.mark.skipif(BROWSER is None, reason="no headless browser here")
@pytest.mark.parametrize(("ratio", "stop"), [(3, 0.0), (20, 0.0), (5, 0.2)])
def test_the_page_ranks_as_python_does(page, arms, ratio, stop):
    dom = dom_of(f"{page.as_uri()}#ratio={ratio}&stop={stop}")
    table = dom.split('id="ranking"')[1].split("</table>")[0]
    rows = [
        [html.unescape(cell) for cell in re.findall(r"<td>(.*?)</td>", row)]
        for row in re.findall(r"<tr[^>]*data-family.*?</tr>", table)
    ]
    shown = float(re.search(r'id="ratio-value"[^>]*>([\d.]+)<', dom)[1])
    assert shown == pytest.approx(ratio, rel=0.01)
    dearest = max(STOPS.values())
    shares = StopShares("given", {kind: stop * share / dearest for kind, share in STOPS.items()})
    cost = CostModel.constant(1 / shown, 1.0, elsewhere=shares)
    picks = picks_of(arms[0], cost)
    expected = results_of(picks, cost, yardstick_of(picks, cost))
    assert [row[0] for row in rows] == [NAMES[result.family] for result in expected]
    for row, result in zip(rows, expected, strict=True):
        assert row[1] == result.label
        assert float(row[3]) == pytest.approx(result.speed_up, abs=0.011)
        assert float(row[5]) == pytest.approx(result.discard_rate, abs=6e-4)


@pytest.mark.browser
@pytest.mark.skipif(BROWSER is None, reason="no headless browser here")
def test_the_page_shows_every_family_at_the_batch_size_that_is_picked(arms, tmp_path):
    rows = [
        batch_row(size, family, share, tokens_per_s + size, gain)
        for size in (1, 4)
        for share in (0.0, 0.2)
        for family, tokens_per_s, gain in (("fixed_length", 10.0, 0.0), ("entropy", 12.0 + share, 0.2))
    ]
    write_report(Page(about="", directory=tmp_path, cost=COST, datasets={"made": arms[0]}, batches=rows))
    dom = dom_of(f"{(tmp_path / 'report.html').as_uri()}#batch=4")
    table = dom.split('id="batched"')[1].split("</table>")[0]
    shown = [re.findall(r"<td>(.*?)</td>", row) for row in re.findall(r"<tr.*?</tr>", table.split("<tbody>")[1])]
    assert shown == [
        ["best fixed length", "x=4", "14.0", "", "2.00"],
        ["entropy (SVIP)", "x=4", "16.0", "+20.0%", "2.00"],
    ]
    assert [
        re.findall(r"<option[^>]*>(.*?)<", part) for part in re.findall(r'id="batch-share">(.*?)</select>', dom)
    ] == [["0 t_draft", "0.2 t_draft"]]
