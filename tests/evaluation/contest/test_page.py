"""The page is self-contained, has the figures of the console, and its slider switches between finished tables."""

import html
import json
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
import torch

from data_gen.store.manifest import git_commit
from decode.experiment import Experiment
from evaluation.clock import clock_table, report_of
from evaluation.competitor import bounds
from evaluation.families import REPLAYED, family
from evaluation.gain import Splits
from evaluation.keys import made
from evaluation.report import page as page_module
from evaluation.report.evaluated import contest_of_verdict
from evaluation.report.page import write_report
from evaluation.report.plots import all_plots, stage_plot
from evaluation.report.tables import result_table, stage_table
from evaluation.report.verdict import sentence_at
from tests.evaluation.contest.made import evaluation_of

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

SENTENCE = "Use fixed length 5: no head is faster, -1.0 % (-2.0, -0.3) for a < b."
VERDICT = {"sentence": SENTENCE, "notes": ["One.", "Two."]}
COMMAND = "acceptance-heads generate --config 'my file.yaml' --prompt 'Why is the sky blue?'"


@pytest.fixture(scope="module")
def clocked(contest):
    """As if every generation of the first test prompts took a second."""
    runners = [result for name, result in contest.results.items() if name not in REPLAYED]
    seconds = dict.fromkeys(("whole_s", "first_token_s", "drafting_s", "verifying_s"), np.ones((1, 4)))
    on_clock = [replace(result.played.select([0], range(4)), seconds=seconds) for result in runners]
    return report_of(on_clock, runners, contest.times, dataset="made", about="4 test prompts, made")


@pytest.fixture(scope="module")
def page(contest, replays, clocked, tmp_path_factory):
    directory = tmp_path_factory.mktemp("report")
    evaluation = evaluation_of({"made": [contest]}, {"made": replays}, clocks=[clocked], verdict=VERDICT)
    write_report(evaluation, directory)
    return directory / "report.html"


def cells(part: str) -> list[list[str]]:
    rows = re.findall(r"(?s)<tr class.*?</tr>", part)
    return [[html.unescape(cell) for cell in re.findall(r"(?s)<td.*?>(.*?)</td>", row)] for row in rows]


def test_the_page_fetches_nothing_and_opens_with_the_sentence_and_the_rows_of_the_console(page, contest):
    text = page.read_text()
    assert len(text) < 6e6
    assert not re.search(r"""(src|href)\s*=\s*["'](https?:)?//|fetch\(|XMLHttpRequest|@import""", text)
    assert "a &lt; b" in text
    assert not re.search(r"\$(?!\{)[a-z]", text)
    assert Path(page_module.__file__).with_suffix(".html").read_text().count("\n") < 120, "no cost model"
    shown = text.split("<main>")[1]
    first, command, *notes = re.findall(r"<(?:p|pre|li)[^>]*>(.*?)</(?:p|pre|li)>", shown)[:4]
    assert html.unescape(first).replace("\xa0", " ") == SENTENCE
    assert html.unescape(command) == COMMAND
    assert notes == VERDICT["notes"]
    assert text.index('class="verdict"') < text.index("<svg") < text.index("<table") < text.index('id="step"')
    assert cells(text.split("<main>")[1].split("</table>")[0]) == stage_table(contest).cells


def test_the_page_says_when_where_and_by_which_command_it_was_made(contest, replays, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["program", "evaluate", "--config", "my file.yaml"])
    evaluation = evaluation_of({"made": [contest]}, {"made": replays})
    experiment = evaluation.experiment
    experiment.models = replace(experiment.models, num_threads=3)
    write_report(evaluation, tmp_path)
    footer = (tmp_path / "report.html").read_text().split("<footer>")[1]
    shown = dict(zip(re.findall("<dt>(.*?)</dt>", footer), re.findall("<dd>(.*?)</dd>", footer), strict=True))
    assert list(shown) == ["date", "versions", "commit", "host", "command"]
    age = datetime.now(UTC) - datetime.strptime(shown["date"], "%Y-%m-%d %H:%M UTC").replace(tzinfo=UTC)
    assert timedelta(0) <= age < timedelta(minutes=5)
    assert f"torch {torch.__version__}" in shown["versions"]
    assert shown["commit"] == (git_commit() or "unknown")
    assert shown["host"].startswith(f"{platform.node()}: ")
    assert shown["host"].endswith(", 3 threads")
    assert html.unescape(shown["command"]) == "acceptance-heads evaluate --config 'my file.yaml'"
    experiment.arguments = ()
    assert made(experiment)["command"] == "called from Python"


def test_the_page_has_what_the_clock_measured(page, clocked):
    section = page.read_text().split("<h2>On a clock</h2>")[1].split("</table>")
    assert cells(section[0]) == clock_table(clocked).cells
    assert html.escape(clocked.about) in section[0]
    assert html.escape(clocked.verdict) in section[1]


def test_the_slider_has_a_table_for_each_ratio_and_opens_at_the_times_of_the_evaluation(page, contest):
    text = page.read_text()
    steps = re.findall(r'data-step="(\d+)"( hidden)?', text)
    assert [step for step, hidden in steps if not hidden] == ["4"]
    labels = json.loads(re.search(r"labels = (\[.*?\]);", text)[1])
    ratios = ("1.5", "2", "3", "4", "5", "5", "8", "12", "20", "30", "40")
    assert labels == [f"{ratio} draft forwards{', as in this evaluation' * (n == 4)}" for n, ratio in enumerate(ratios)]
    assert 'max="10" step="1" value="4"' in text
    part = text.split('data-step="4">')[1].split("</div></div>")[0]
    assert cells(part) == result_table(contest).cells
    assert dict(re.findall(r'<tr class="(\w+)"><td.*?>(.*?)</td>', part))["best"] == family(contest.best.family).label
    assert len(re.findall('class="bound"', part)) == len(list(bounds()))


def test_plots_of_two_datasets_are_two_files(contest, replays, tmp_path):
    contests = {name: [replace(contest, dataset=name)] for name in ("one", "two")}
    of_sets = dict.fromkeys(contests, replays)
    (tmp_path / "plots").mkdir()
    (tmp_path / "plots" / "of-an-earlier-evaluation.svg").touch()
    write_report(evaluation_of(contests, of_sets), tmp_path)
    names = {plot.name for plot in (stage_plot(contest), *all_plots(replays, contest))}
    assert {"gain-here", "draft_lengths", "reliability", "thresholds-1"} <= names
    files = {f"{plot}-{name}.svg" for plot in names for name in contests}
    assert {path.name for path in (tmp_path / "plots").iterdir()} == files
    text = (tmp_path / "report.html").read_text()
    assert "<figcaption>one: Draft lengths" in text
    for name in contests:
        sentence = html.escape(sentence_at(contests[name][0])).replace(" %", "&nbsp;%")
        assert f"<h2>{name}</h2><p>{sentence}</p>" in text


def test_several_training_sets_have_one_more_table_with_the_contest_of_the_verdict(contest, replays, tmp_path):
    two = [replace(part, rows=tuple(replace(row, dataset="two") for row in part.rows)) for part in replays.traces]
    of_sets = {"one": replays, "two": replace(replays, traces=Splits(*two)), "transfer": replays}
    contests = {name: [replace(contest, dataset=name)] for name in of_sets}
    experiment = Experiment.__new__(Experiment)
    vars(experiment).update(datasets={name: name for name in of_sets}, training_sets={"one": "one", "two": "two"})
    pooled, joint = contest_of_verdict(experiment, of_sets, contests)
    assert (pooled.dataset, pooled.num_prompts) == ("one + two", 2 * contest.num_prompts)
    assert {arm.test.prompt_of_row.max() + 1 for arm in joint.arms} == {2 * contest.num_prompts}
    evaluation = evaluation_of(contests, of_sets, contest=pooled, verdict=VERDICT)
    assert evaluation.pooled is pooled
    for rows in (evaluation.records, evaluation.stages):
        assert {row["dataset"] for row in rows} == {"one", "two", "transfer", "one + two"}
    title = stage_table(pooled).title
    write_report(evaluation, tmp_path)
    text = (tmp_path / "report.html").read_text()
    assert text.index(SENTENCE[:30]) < text.index(f"<h3>{html.escape(title)}</h3>") < text.index("<h2>one</h2>")
    vars(experiment)["datasets"] = {"one": "one", "transfer": "transfer"}
    assert contest_of_verdict(experiment, of_sets, contests) == (contests["one"][0], replays)
    assert evaluation_of(contests, of_sets).pooled is None


@pytest.mark.browser
@pytest.mark.skipif(BROWSER is None, reason="no headless browser here")
def test_the_page_shows_the_table_of_its_step(page):
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=3000", "--dump-dom"]
    command = [BROWSER, *flags, page.as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    assert [step for step, hidden in re.findall(r'data-step="(\d+)"( hidden)?', dom) if not hidden] == ["4"]
    assert '<output id="step-value">5 draft forwards, as in this evaluation</output>' in dom
