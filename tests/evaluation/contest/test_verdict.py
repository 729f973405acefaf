"""The sentence and the stages have the figures of the results and say plainly where training does not pay; a head is
recommended only where test shows that it wins, whatever dev says of it.
"""

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from configs.command import run
from configs.schema import Config, DecodeConfig, HeadsConfig, ModelSource, PairConfig, SamplingConfig
from decode.experiment import LEVELS, Experiment
from decode.loop.counts import Counts
from decode.policies import FixedLength, TokenProb
from decode.policies.registry import AUTO_TOKEN_PROB, POLICIES, Registered
from evaluation.competitor import Arm, Competitor, competitors_of
from evaluation.contest import fastest_on_dev, hold
from evaluation.families import (
    AUTO,
    BASELINE,
    COLOURS,
    CUSTOM,
    GROUPS,
    HEADS,
    PERFECT,
    PRODUCT,
    TRAINING_FREE,
    families,
    family,
    styles_of,
)
from evaluation.gain import Splits
from evaluation.played import Played
from evaluation.report.conclusion import conclude
from evaluation.report.page import folder_of
from evaluation.report.plots import all_plots, stage_plot, thresholds
from evaluation.report.tables import deciding_families, result_table, stage_rows, stage_table
from evaluation.report.verdict import (
    generate_command,
    notes_of,
    pooled,
    publish_verdict,
    record_of,
    sentence_at,
    sentence_of,
    tell,
    together,
    verdict_sets,
)
from evaluation.splits import RepeatedSplits
from heads import AcceptanceHead
from heads.measures.figure import INK, figure_of, plot_of
from heads.model.head import update_config
from tests.evaluation.contest.made import contest_at, evaluation_of
from tests.toys.times import flat_times


@pytest.mark.parametrize("t_draft_s", [0.2, 0.05])
def test_the_sentence_of_every_contest_is_its_verdict_with_the_figures_of_its_results(replays, t_draft_s):
    contest = hold(replays, flat_times(t_draft_s, 1.0, "measured"), dataset="made")
    verdict = conclude(contest)
    sentence = sentence_of(verdict)
    ratio = f"On made, on this machine, where a target forward costs {1 / t_draft_s:.1f} draft forwards "
    ratio += "however many tokens it verifies: "
    assert sentence_at(contest) == ratio + sentence[0].lower() + sentence[1:]
    groups = list(verdict.candidates)
    for group in groups[groups.index(verdict.group) + 1 :]:
        assert verdict.gain(group, verdict.group).words in sentence
    for group in groups[: groups.index(verdict.group)]:
        assert verdict.gain(verdict.group, group).words in sentence


def test_one_row_of_each_kind_decides_the_note_has_the_others_and_the_console_every_row_on_request(contest):
    shown, stages, note = deciding_families(contest), stage_rows(contest), stage_table(contest).note
    assert (shown[0], shown[-2:]) == (BASELINE, ["perfect_drawn", "oracle"])
    kinds = [family(name).kind for name in shown[:-2]]
    assert len(set(kinds)) == len(kinds)
    assert {contest.leaders[group].family for group in ("heads", TRAINING_FREE)} <= set(shown)
    beside = set(shown) - {stage["family"] for stage in stages}
    assert beside
    assert all(f"{family(name).label}" in note and contest.gain(name).words in note for name in beside)
    console, whole = stage_table(contest), result_table(contest)
    assert console.title == whole.title
    assert [row["gain"] for row in console.rows[2:]] == [stage["gain"].words for stage in stages[1:]]
    bold = [row["policy"] for number, row in enumerate(whole.rows) if whole.marks.get(number) == "best"]
    assert bold == [family(contest.best.family).label]


def test_every_family_has_the_colour_of_its_kind_and_its_own_line():
    assert len(set(COLOURS.values())) <= 8
    styles = styles_of(names := [*families(), "mine", "yours"])
    assert all(styles[name][0] == COLOURS[family(name).kind] for name in names)
    deciding = [BASELINE, PRODUCT, "entropy", "head_specdec", "head_drawn", AUTO, "oracle"]
    assert len({colour for colour, _ in styles_of(deciding).values()}) == len(deciding)
    assert len(set(styles_of(["token_prob", PRODUCT, "max_prob", "mine", "yours"]).values())) == 5
    assert (family("mine").kind, family("mine").label) == (CUSTOM, "mine")
    heads = ["head_specdec", "head_fed", "head_drawn", "head_prefix"]
    assert [name for name in families() if GROUPS["heads"](name)] == heads
    free = {entry.family for entry in competitors_of({}, {}, max_draft_length=5)}
    assert {name for name in families() if GROUPS[TRAINING_FREE](name)} == free | {AUTO_TOKEN_PROB}
    assert [family(name).needs_training for name in (*heads, AUTO, "entropy")] == [True] * 5 + [False]


def test_a_custom_policy_that_reads_a_trained_network_competes_with_heads(monkeypatch):
    @dataclass(frozen=True)
    class Trained(TokenProb):
        is_trained = True

    for kind, group in ((TokenProb, TRAINING_FREE), (Trained, "heads")):
        monkeypatch.setitem(POLICIES, "mine:Unsure", Registered(kind, "mine", lambda _: {}))
        assert [name for name, belongs in GROUPS.items() if belongs("mine:Unsure")] == [group]
        assert family("mine:Unsure").needs_training == (group == "heads")
        assert family("mine:Unsure").kind == CUSTOM


def test_plots_have_the_readers_ink_a_legend_below_and_two_axes_for_thresholds_of_two_meanings(replays, contest):
    for plot in [stage_plot(contest), *all_plots(replays, contest)]:
        assert "currentColor" in plot.svg
        assert "prefers-color-scheme:dark" in plot.svg
        assert INK not in plot.svg
        assert "#ffffff" not in plot.svg, "a white background would stand out on a dark page"
    plots, labels = thresholds(contest), {name: entry.label for name, entry in families().items()}
    on = {name: [plot.name for plot in plots if f">{label}<" in plot.svg] for name, label in labels.items()}
    assert on["head_fed"] == on["head_drawn"]
    meanings = ("head_drawn", "entropy", "token_prob", PRODUCT, "max_prob")
    assert len({tuple(on[name]) for name in meanings}) == len(plots) == len(meanings)
    for plot in plots:
        (axis,) = re.findall(r"(\w+ of \w+)<", plot.svg)
        assert axis in plot.caption
    assert {re.findall(r"(\w+) of \w+<", plot.svg)[0] for plot in plots} == {
        "max_rejection_prob",
        "max_sqrt_entropy",
        "min_token_prob",
        "min_max_prob",
    }
    figure, axes = figure_of(3.0)
    axes.plot([0, 1], [0, 1], label="a line")
    assert "a line" in plot_of("p", "", figure, xlabel="x").svg  # drawn, so that positions are known
    assert figure.legends[0].get_window_extent().y1 <= axes.get_tightbbox().y0


def test_a_report_that_compares_heads_is_kept_where_none_compete_now(tmp_path, capsys):
    experiment = Experiment.__new__(Experiment)
    vars(experiment).update(heads={}, exported=tmp_path / "exported", directory=tmp_path)
    for families_before, heads, policies, directory, message in (
        ([], {}, (), tmp_path, "No trained heads in"),
        (["fixed_length", "entropy"], {}, (), tmp_path, "`acceptance-heads export"),
        (["fixed_length", "head_drawn"], {}, (), tmp_path / "no-heads", "is kept"),
        (["fixed_length", "head_drawn"], {"it": None}, ("entropy",), tmp_path / "no-heads", "names no head"),
        (["fixed_length", "head_drawn"], {"it": None}, ("entropy", "head"), tmp_path, ""),
        (["fixed_length", "head_drawn"], {"it": None}, (), tmp_path, ""),
    ):
        if families_before:
            (tmp_path / "results.csv").write_text("\n".join(["family", *families_before]))
        vars(experiment).update(heads=heads, decode=DecodeConfig(policies=policies))
        assert folder_of(experiment) == directory
        printed = " ".join(capsys.readouterr().out.split())
        assert message in printed if message else not printed


SPEEDS = {BASELINE: 100.0, PRODUCT: 120.0, "entropy": 118.0, "head_drawn": 130.0, PERFECT: 150.0, "oracle": 200.0}
PREFERRED = {PRODUCT: 220.0}


def test_stages_go_from_the_best_fixed_length_to_the_oracle_and_share_its_whole_gain():
    contest = contest_at(SPEEDS, on_dev=PREFERRED)
    first, *stages = stage_rows(contest)
    assert [stage["family"] for stage in (first, *stages)] == [BASELINE, PRODUCT, "head_drawn", PERFECT, "oracle"]
    assert [stage["percent_of_oracle_gain"] for stage in stages] == pytest.approx([20, 10, 20, 50])
    assert first["tokens_per_s"][:3] == pytest.approx((100, 100, 100))
    assert ("added" in first, first["percent_of_oracle_gain"]) == (False, None)
    before = BASELINE
    for stage in stages:
        speeds, gain, added = (stage[name] for name in ("tokens_per_s", "gain", "added"))
        assert speeds[:3] == pytest.approx([100 * (1 + part) for part in gain[:3]])
        assert speeds.value == pytest.approx(SPEEDS[stage["family"]])
        assert added == contest.results[stage["family"]].over(contest.results[before])
        assert all(each.low < each.value < each.high for each in (speeds, gain, added))
        before = stage["family"]
    no_gain = stage_rows(contest_at(dict.fromkeys(SPEEDS, 100.0), on_dev=PREFERRED))
    assert [stage["percent_of_oracle_gain"] for stage in no_gain] == [None] * 5
    assert "slower than" not in stage_table(contest).note
    contest = contest_at(SPEEDS, on_dev={"entropy": 218.0})
    preferred = stage_rows(contest)[2:4]
    assert [stage["family"] for stage in preferred] == ["entropy", "head_drawn"]
    assert [stage["percent_of_oracle_gain"] for stage in preferred] == pytest.approx([-2, 12])
    assert "entropy (SVIP): slower than the row above" in stage_table(contest).note


@pytest.mark.parametrize(
    ("name", "row", "why"),
    [
        (PRODUCT, 1, "not compared: decode.policies"),
        ("head_drawn", 2, "not compared: no trained heads"),
        (PERFECT, 3, "not in the trace: decode.perfect_head is false"),
    ],
)
def test_a_stage_that_did_not_compete_says_why_and_the_others_share_the_whole_gain(name, row, why):
    speeds = {other: speed for other, speed in SPEEDS.items() if other != name}
    contest = contest_at(speeds, on_dev={BASELINE if name == PRODUCT else PRODUCT: 220.0})
    stages = stage_rows(contest)
    assert [bool(stage["missing"]) for stage in stages] == [number == row for number in range(5)]
    known = [stage["knows"] for stage in (stages[row], stage_rows(contest_at(SPEEDS, on_dev=PREFERRED))[row + 1])]
    assert stages[row + 1]["knows"] == "; ".join(known)
    assert sum(stage.get("percent_of_oracle_gain") or 0 for stage in stages) == pytest.approx(100)
    cells = stage_table(contest).rows[row + 1]
    assert why in " ".join(cells["stage"].split())
    assert "tokens/s" not in cells
    assert why in stages[row]["missing"]
    assert f">{why.partition(':')[0]}<" in stage_plot(contest).svg


def test_the_table_the_picture_and_the_record_have_the_same_figures():
    contest = contest_at(SPEEDS, on_dev=PREFERRED)
    head, table = stage_rows(contest)[2], stage_table(contest)
    speed, low, high, *_ = head["tokens_per_s"]
    figures = [f"{speed:.0f} ({low:.0f}, {high:.0f})", head["gain"].words, head["added"].words]
    assert table.cells[3] == ["best head, drawn-time\nwhat a head learned", *figures]
    assert [row["tokens/s"] for row in table.rows[:2]] == ["50.0", "100"]
    assert f"entropy (SVIP): {contest.gain('entropy').words}" in table.note
    names = ("tokens_per_s_low", "gain_high", "added", "percent_of_oracle_gain")
    record = evaluation_of({"made": [contest]}).stages[2]
    assert [record[name] for name in names] == [low, head["gain"].high, head["added"].value, pytest.approx(10)]
    svg = stage_plot(contest).svg
    assert all(f">{text}<" in svg for text in ("100", "120", "130", "150", "200"))
    assert Console(width=200).measure(table._replace(note="").table()).maximum <= 100
    assert "best head, drawn-time drawn+s-d1-w3 at 0.731" in table.note
    near = flat_times(0.01, 0.02)
    every = (flat_times(0.2, 0.9996), *map(near.with_ratio, (5.0, 4.998, 5.000001)))
    assert len({stage_plot(replace(contest, times=times)).name for times in every}) == 4, "a file each"


@pytest.fixture
def experiment(tmp_path):
    AcceptanceHead(96, 0, "drawn").save_pretrained(tmp_path / "exported" / "drawn+s-d1-w3")
    pair = PairConfig(**{name: ModelSource(path=f"checkpoints/tiny/{name}") for name in ("target", "draft")})
    dirs = {"heads": HeadsConfig(dir=str(tmp_path)), "decode": DecodeConfig(dir=str(tmp_path / "decode"))}
    return Experiment(Config(pair=pair, **dirs))


HEAD_SPEC = "head:{},max_rejection_prob=0.731"
FIXED = "fixed_length:k=7"
PRODUCT_SPEC = "cumulative_token_prob:min_token_prob=0.0474"
GAIN = r"[+-]\d+\.\d % \(-?\d+\.\d, -?\d+\.\d\)"
NAMES = {"head": r"head drawn\+s-d1-w3 at 0\.731", "product": r"product of token probabilities at 0\.0474"}


@pytest.mark.parametrize(
    ("free", "head", "policy", "says"),
    [
        (99, 95, FIXED, "no rule without training is faster, GAIN for product; no head is faster, GAIN for head"),
        (99, 101, FIXED, "no rule without training is .*; no head is faster by more than noise, GAIN for head"),
        (99, None, FIXED, r"no rule .*; no head takes part \(`acceptance-heads train` and .*\)"),
        (120, 115, PRODUCT_SPEC, "GAIN over fixed length 7; no head is faster, GAIN for head"),
        (104, 108, PRODUCT_SPEC, "head beats fixed length 7, GAIN, but not this rule by more than noise, GAIN"),
        (99, 130, HEAD_SPEC, "GAIN over fixed length 7 and GAIN over product"),
        (120, 150, HEAD_SPEC, "GAIN over fixed length 7 and GAIN over product"),
    ],
)
def test_the_verdict_has_its_reason_in_one_sentence_and_generate_and_the_model_card_have_the_same(
    experiment, free, head, policy, says
):
    speeds = {BASELINE: 100, PRODUCT: free} | ({} if head is None else {"head_drawn": head})
    record = record_of(conclude(contest_at(speeds)), experiment)
    directory = experiment.exported / "drawn+s-d1-w3"
    assert record["policy"] == policy.format(directory)
    for name, pattern in NAMES.items():
        says = re.sub(f"(?<!no )(?<!-){name}(?!s)", lambda _, pattern=pattern: pattern, says)
    says = says.replace("GAIN", GAIN)
    subject = {FIXED: "fixed length 7", PRODUCT_SPEC: NAMES["product"], HEAD_SPEC: NAMES["head"]}[policy]
    assert re.fullmatch(f"Use {subject}: {says}\\.", record["sentence"])
    gain = "as the best fixed length, 7" if policy == FIXED else " % ("
    assert gain in record["speed"]
    publish_verdict(record, experiment, experiment.directory)
    assert experiment.default_policy == (record["policy"], f"{record['sentence']} It is {record['speed']}")
    assert experiment.policy(record["policy"])
    assert f"\n## Verdict\n\n{record['sentence']}\n" in (directory / "README.md").read_text()
    assert AcceptanceHead.from_pretrained(directory).provenance.recommended == {"verdict": record["sentence"]}


def test_too_few_test_prompts_have_no_verdict_but_a_default_and_the_number_that_is_needed(experiment):
    contest = contest_at({BASELINE: 100, PRODUCT: 99, "head_drawn": 103}, num_prompts=8)
    record = record_of(conclude(contest), experiment)
    needed = r"a verdict needs at least 10, and about \d+ would settle the \+3\.0 % of"
    remedy = r"\(raise decode.num_test, or add prompts if the set has no more\). Until then use fixed length 7, the "
    remedy += "fastest on dev."
    pattern = f"No verdict: 8 test prompts are too few; {needed} {NAMES['head']} over fixed length 7 {remedy}"
    assert re.fullmatch(pattern, record["sentence"])
    assert (record["policy"], record["is_decided"], record["gain"]["low"]) == (FIXED, False, None)
    publish_verdict(record, experiment, experiment.directory)
    assert experiment.default_policy[0] == FIXED


def test_splits_that_disagree_and_the_number_of_prompts_that_would_settle_a_lead_are_named():
    gains = {BASELINE: np.zeros(50), PRODUCT: np.full(50, 0.2), "head_drawn": np.linspace(0.17, 0.37, 50)}
    splits = RepeatedSplits(gains, {name: 1 + gain for name, gain in gains.items()})
    verdict = conclude(replace(contest_at({BASELINE: 100, PRODUCT: 120, "head_drawn": 150}), splits=splits))
    sentence = sentence_of(verdict)
    assert "over fixed length 7, ahead in 100 % of the repeated splits" in sentence
    assert re.search(f"; {NAMES['head']} is faster, {GAIN}, but in only 84 % of the repeated splits", sentence)
    verdict = conclude(contest_at({BASELINE: 100, PRODUCT: 120, "head_drawn": 122}))
    (note,) = notes_of(verdict)
    settles = f"would settle the {GAIN} of {NAMES['head']} over {NAMES['product']}"
    assert re.fullmatch(
        rf"About \d+ test prompts {settles}: raise decode.num_test, or add prompts if the set has no more\.", note
    )
    wide = verdict.gain(HEADS, TRAINING_FREE)._replace(times_error=0.1)
    within = conclude(replace(verdict.contest, _gains={("head_drawn", PRODUCT): wide}))
    (note,) = notes_of(within)
    assert note.startswith(f"More prompts cannot settle the {wide.words} of head ")


def test_a_verdict_over_several_training_sets_is_that_of_all_prompts_together(replays, contest):
    """One set is for the head and twice as slow, so that it decides."""
    times, every = flat_times(0.2, 1.0), {}
    for dataset, speeds in {"one": {BASELINE: 100, "head_drawn": 98}, "two": {BASELINE: 50, "head_drawn": 60}}.items():
        arms = []
        for name, speed in speeds.items():
            rounds = np.full((1, 40), 100_000 // speed)
            counts = Counts(num_emitted=np.full((1, 40), 1000), num_target=rounds, num_draft_forwards=0 * rounds)
            played = Played(counts, rounds[..., None], np.arange(40))
            arms.append(Arm(Competitor(name, name, FixedLength(), ({"k": 3},)), played, played))
        every[dataset] = arms
    parts = [times.throughput(arms[1].test) for arms in every.values()]
    whole = fastest_on_dev(pooled(list(every.values())), times)["head_drawn"].throughput
    assert all(map(np.array_equal, whole, (np.concatenate(part, axis=1)[0] for part in zip(*parts, strict=True))))
    others = []
    for part in replays.traces:
        rows = [replace(row, dataset="two") for row in part.rows]
        others.append(replace(part, rows=tuple(rows)))
    both, _ = together({"one": replays, "two": replace(replays, traces=Splits(*others))}, contest.times)
    assert (both.dataset, both.num_prompts) == ("one + two", 2 * contest.num_prompts)
    assert set(both.results) == set(contest.results)
    assert both.baseline.tokens_per_s == pytest.approx(contest.baseline.tokens_per_s)


def test_transfer_sets_take_no_part_in_the_verdict(experiment):
    named = {"decode": replace(experiment.decode, datasets=("stories", "prompts/new.jsonl"))}
    several = Experiment(replace(experiment._config, **named))
    assert verdict_sets(several) == ["stories"]


def test_a_verdict_that_is_out_of_date_is_not_followed(experiment):
    record = record_of(conclude(contest_at({BASELINE: 100, "head_drawn": 130})), experiment)
    path, *_ = publish_verdict(record, experiment, experiment.directory)
    verdict = json.loads(path.read_text())
    assert experiment.default_policy[1].startswith("Use ")
    for change in ({"of": experiment.identity | {"sampling": {}}}, {"head": "runs/gone"}, {}):
        path.write_text(json.dumps(verdict | change))
        if not change:  # the head is newer
            weights = experiment.exported / "drawn+s-d1-w3" / "model.safetensors"
            os.utime(weights, (path.stat().st_mtime + 5,) * 2)
        del experiment.default_policy  # which is read once
        assert "Use " not in experiment.default_policy[1]


def spelt(model: str, heads: Path | str, decode: Path, *, names: Sequence[str] = LEVELS[:2], **sampling: float):
    sources = {level: ModelSource(path=model.format(name)) for level, name in zip(LEVELS, names, strict=False)}
    pair = PairConfig(**sources, sampling=SamplingConfig(**sampling))
    return Experiment(Config(pair=pair, heads=HeadsConfig(dir=str(heads)), decode=DecodeConfig(dir=str(decode))))


def test_a_verdict_is_found_by_weights_and_sampling_however_paths_are_spelled(experiment, tmp_path):
    """With another sampling, for which no head was trained, a rule that needs no training decodes."""
    verdict = record_of(conclude(contest_at({BASELINE: 100, "head_drawn": 130})), experiment)
    publish_verdict(verdict, experiment, experiment.directory)
    tiny, decode = Path("checkpoints/tiny").resolve(), experiment.directory
    (tmp_path / "link").symlink_to(tiny)
    (tmp_path / "heads").symlink_to(tmp_path)
    update_config(experiment.exported / "drawn+s-d1-w3", sampling={"temperature": 1.0, "top_k": None, "top_p": None})
    for model, heads in ((f"{tiny}/{{}}", f"{tmp_path}/"), (f"{tmp_path}/link/{{}}/", tmp_path / "heads")):
        assert spelt(model, heads, decode).default_policy[0] == verdict["policy"]
    exchanged = spelt(f"{tiny}/{{}}", tmp_path, decode, names=("draft", "target"))
    assert "Use " not in exchanged.default_policy[1]
    policy, reason = spelt(f"{tiny}/{{}}", tmp_path, decode, temperature=0.0).default_policy
    assert policy == "cumulative_token_prob"
    assert "needs no training: no head was trained for this sampling" in reason


def test_the_console_ends_with_the_sentence_and_the_generate_command_its_own_settings(experiment, capsys):
    record = record_of(conclude(contest_at({BASELINE: 100, "head_drawn": 130})), experiment)
    assert generate_command(experiment) == "decode.complete(config, prompt) in Python"

    def end(config: Config, *, all: bool = False) -> None:
        tell(record, Experiment(config))

    flags = ["--config", "configs/tiny.yaml", "--all", "--decode.dir=my runs", "--trainer.max_epochs", "3"]
    run({"evaluate": end}, argv=["evaluate", *flags, "--decode.num_test", "9"])
    shown = capsys.readouterr().out.split("\n")
    settings = "--config configs/tiny.yaml '--decode.dir=my runs' --decode.num_test 9"
    command = f"acceptance-heads generate {settings} --prompt 'Why is the sky blue?'"
    assert shown[-4:] == [f"next: {command}", "", record["sentence"], ""]
