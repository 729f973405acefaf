"""The sentence and the rows that decide have the figures of the table, say plainly where training does not pay, and are
the same on console and page; no plot needs more than eight colours.
"""

import html
import json
import re

import pytest
import torch

from decode.experiment import Experiment
from decode.policies import FixedLength
from evaluation.competitor import Competitor, competitors_of, default_values
from evaluation.contest.arms import replay_dataset
from evaluation.contest.results import lead_of
from evaluation.families import COLOURS, CUSTOM, GROUPS, TRAINING_FREE, families, family, styles_of
from evaluation.figure import INK, figure_of, legend_below, plot_of
from evaluation.gain import Gain, Splits
from evaluation.report.command import folder_of, judge, rankings
from evaluation.report.page import Page, has_heads, write_report
from evaluation.report.plots import all_plots, thresholds
from evaluation.report.verdict import _doubt, answer_of, deciding_families, explained
from evaluation.times import StopShares, Times
from heads import AcceptanceHead
from heads.model.provenance import Provenance
from lm import Sampling
from tests.toys.small_pair import trace

CURVE = Times(0.2, (1.0, 1.3, 1.5, 1.7, 1.9, 2.1), "measured", {"token_prob": 0.01}, elsewhere=StopShares("", {}))
"""Starting to verify costs .3, a verified token .2: neither is a position of the page's sliders."""


@pytest.fixture(scope="module")
def splits():
    return Splits(*(trace(Sampling(temperature=0.6), copies=2, seed=seed) for seed in (1, 2)))


@pytest.fixture(scope="module")
def heads():
    torch.manual_seed(0)
    made = {f"{timing}+s-d1-w1": AcceptanceHead(16, 1, timing, True).eval() for timing in ("fed", "drawn")}
    for head in made.values():
        torch.nn.init.normal_(head.out.weight)
    return made


def replayed(splits, heads):
    few = {"ada_edl": {"initial_lambda": [0.3], "target_rate": [0.7]}}
    return replay_dataset(
        splits, competitors_of(few, heads, max_draft_length=5), heads=heads, perfect_head=True, name="made"
    )


@pytest.fixture(scope="module")
def compared(splits, heads):
    """(replays, everything judged at CURVE, what it comes to)."""
    replays = replayed(splits, heads)
    judged = judge("made", replays, CURVE)
    return replays, judged, answer_of(judged, CURVE, heads=heads, num_prompts=replays.traces.test.num_prompts)


@pytest.mark.parametrize("t_draft_s", [0.2, 0.05])
def test_the_sentence_has_the_figures_of_the_rows(compared, heads, t_draft_s):
    cost = Times.constant(t_draft_s, 1.0, "measured")
    judged = judge("made", compared[0], cost)
    verdict = (answer := answer_of(judged, cost, heads=heads, num_prompts=80)).verdict
    results = {result.family: result for result in judged.results}
    own, free = (results[judged.yardstick.champions[group]] for group in ("heads", TRAINING_FREE))
    length, lead = results["fixed_length"].setting["k"], lead_of(judged.yardstick)
    assert verdict.startswith(f"On this machine (a target forward costs {1 / t_draft_s:.1f} draft forwards): head")
    assert f"predicted {own.gain.words} over the best fixed length ({length})" in verdict
    over = f", {lead.words} over the {family(free.family).label}, which needs no training"
    assert (over in verdict) == (free.family != "fixed_length")
    head = next(stage for stage in answer.stages if stage.family == own.family)
    assert head.result == own
    assert (head.added == lead) == (free.family != "fixed_length")


@pytest.mark.parametrize(
    ("lead", "says"),
    [
        (Gain(0.1, 0.02, 0.2, 0.0), ""),
        (
            Gain(0.1, -0.02, 0.2, 0.0),
            " With 7 test prompts this difference could be chance, and the entropy (SVIP) may be as fast; raise decode",
        ),
        (Gain(-0.1, -0.2, -0.02, 0.0), " No trained head is faster here: use the entropy (SVIP)."),
    ],
)
def test_a_lead_that_shows_nothing_is_called_so(lead, says):
    said = _doubt(lead, "entropy", 7)
    assert said.startswith(says)
    assert bool(said) == bool(says)


def test_without_heads_the_sentence_says_what_needs_no_training(splits):
    judged = judge("made", replayed(splits, {}), CURVE)
    answer = answer_of(judged, CURVE, heads={}, num_prompts=2)
    assert "no trained heads are compared" in answer.verdict or "no policy that needs no training" in answer.verdict
    assert answer.explained == ""


def test_one_row_of_each_kind_decides_and_bounds_stand_last(compared):
    _, judged, _ = compared
    shown = deciding_families(judged, CURVE)
    assert (shown[0], shown[-2:]) == ("fixed_length", ["perfect_drawn", "oracle"])
    kinds = [family(name).kind for name in shown[:-2]]
    assert len(set(kinds)) == len(kinds)
    assert {judged.yardstick.champions["heads"], judged.yardstick.champions[TRAINING_FREE]} <= set(shown)


def test_the_console_has_the_stages_and_if_wanted_every_row_with_the_best_in_bold(compared):
    *_, answer = compared
    assert [sheet.title for sheet in answer.printed(has_all=False)] == [answer.sheet.title]
    stages, whole = answer.printed(has_all=True)
    assert stages == answer.printed(has_all=False)[0]
    assert [row["gain"] for row in stages.rows[2:]] == [stage.result.gain.words for stage in answer.stages[1:]]
    others = len(whole.rows) - len(stages.rows)
    assert f"--all: {others} more rows" in stages.note
    assert [row["policy"] for row in whole.rows if "[bold]" in row["tokens/s"]] == [
        f"[bold]{family(answer.best).label}[/bold]"
    ]


def test_what_decides_but_is_no_stage_stands_in_the_note_with_its_gain(compared):
    _, judged, answer = compared
    beside_stages = set(answer.deciding) - {stage.family for stage in answer.stages}
    beside = [result for result in judged.results if result.family in beside_stages]
    assert beside
    for result in beside:
        assert family(result.family).label in answer.table.note
        assert result.gain.words in answer.table.note


def test_the_name_of_a_head_is_explained_in_words():
    head = AcceptanceHead(4, 2, "drawn", True, provenance=Provenance(reject_weight=6.0))
    assert explained(head) == (
        "a drawn-time head scores a token the moment it is drawn; this one reads the draft's hidden state, the token's "
        "log-probability and the entropy of the draft's distribution, and has 2 hidden layers, trained with rejections "
        "weighed 6 times"
    )


def test_every_family_has_the_colour_of_its_kind_and_a_line_and_marker_of_its_own():
    assert len(set(COLOURS.values())) <= 8
    styles = styles_of(names := [*families(), "mine", "yours"])
    assert {name: style.colour for name, style in styles.items()} == {
        name: COLOURS[family(name).kind] for name in names
    }
    deciding = [
        "fixed_length",
        "cumulative_token_prob",
        "entropy",
        "head_specdec",
        "head_drawn",
        "auto_drawn",
        "oracle",
    ]
    assert len({style.colour for style in styles_of(deciding).values()}) == len(deciding)
    assert len(set(styles_of(["token_prob", "cumulative_token_prob", "max_prob", "mine", "yours"]).values())) == 5
    assert (family("mine").kind, family("mine").label) == (CUSTOM, "mine")


def test_the_groups_and_the_need_of_training_follow_from_the_kind():
    heads = ["head_specdec", "head_fed", "head_drawn", "head_prefix"]
    assert [name for name in families() if GROUPS["heads"](name)] == heads
    assert {name for name in families() if GROUPS[TRAINING_FREE](name)} == set(default_values(5)) - {"head"}
    assert all(
        family(name).needs_training == (name in (*heads, "auto_fed")) for name in (*heads, "auto_fed", "entropy")
    )


def test_thresholds_of_two_meanings_are_on_two_axes(compared):
    plots = thresholds(compared[1].picks, CURVE)
    labels = {name: entry.label for name, entry in families().items()}
    by_family = {name: [plot.name for plot in plots if f">{label}<" in plot.svg] for name, label in labels.items()}
    assert by_family["head_fed"] == by_family["head_drawn"]
    meanings = ("head_drawn", "entropy", "token_prob", "cumulative_token_prob", "max_prob")
    assert len({tuple(by_family[family]) for family in meanings}) == len(plots) == len(meanings)


def test_a_legend_lies_below_the_axes():
    figure, axes = figure_of(3.0)
    axes.plot([0, 1], [0, 1], label="a line")
    legend_below(axes)
    svg = plot_of("p", "", figure).svg  # drawn, so that places are known
    (legend,) = figure.legends
    assert legend.get_window_extent().y1 <= axes.get_tightbbox().y0
    assert "a line" in svg


def test_a_plot_is_drawn_in_the_readers_own_ink(compared):
    replays, judged, answer = compared
    for plot in [answer.picture, *all_plots(replays, judged.picks, CURVE, shown=answer.deciding)]:
        assert "currentColor" in plot.svg
        assert "prefers-color-scheme:dark" in plot.svg
        assert INK not in plot.svg
        assert "#ffffff" not in plot.svg, "a white background would stand out on a dark page"


def written(directory, compared, about=""):
    replays, judged, answer = compared
    page = Page(about=about, directory=directory, cost=CURVE, answers={"made": [answer]})
    page.rankings["made"] = rankings(judged, replays, CURVE)
    write_report(page)
    return directory / "report.html"


def test_a_report_that_compares_heads_is_kept_where_there_are_none_now(compared, tmp_path, capsys):
    experiment = Experiment.__new__(Experiment)
    vars(experiment).update(heads={}, exported=tmp_path / "exported", directory=tmp_path)
    assert folder_of(experiment, []) == tmp_path
    said = " ".join(capsys.readouterr().out.split())
    assert "No trained heads in" in said
    assert "`acceptance-heads export" in said
    assert has_heads(written(tmp_path, compared))
    assert folder_of(experiment, []) == tmp_path / "no-heads"
    assert "is kept" in " ".join(capsys.readouterr().out.split())
    experiment.heads = {"it": None}
    assert folder_of(experiment, []) == tmp_path / "no-heads"
    assert "decode.policies names no head" in " ".join(capsys.readouterr().out.split())
    assert folder_of(experiment, [Competitor("head_drawn", "head:it", FixedLength(1), ({},))]) == tmp_path
    assert capsys.readouterr().out == ""


def test_the_page_opens_with_the_rows_and_the_sentence_of_the_console(compared, tmp_path):
    text, (_, _, answer) = written(tmp_path, compared).read_text(), compared

    def rows_of(part):
        return [
            [html.unescape(cell) for cell in re.findall(r"<td.*?>(.*?)</td>", row)]
            for row in re.findall(r"<tr.*?</tr>", part.split("<tbody>")[1].split("</tbody>")[0])
        ]

    assert html.escape(answer.verdict).replace(" %", "&nbsp;%") in text
    assert text.index('class="verdict"') < text.index("<svg") < text.index("<table") < text.index('id="step"')
    columns = answer.table.columns
    stages = [[row.get(column, "") for column in columns] for row in answer.table.rows]
    assert rows_of(text.split("<main>")[1]) == stages
    (here,) = re.findall(r'<div data-step="\d+">.*', text)
    assert rows_of(here) == [[str(cell) for cell in row.values()] for row in answer.sheet.rows]
    ratios = re.search(r"labels = (\[.*?\]);", text)[1]
    assert json.loads(ratios) == ["1.5", "2", "3", "4", "5 (here)", "5", "8", "12", "20", "30", "40"]
