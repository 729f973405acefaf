"""`replay`, `tune` and `costs` on a small trace of the embedded pair: what they print is what the library says."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest

from configs.front import COMMANDS, all_steps
from decode.experiment import Experiment
from decode.policies import Entropy
from decode.policies.auto import Auto
from decode.policies.batch import BatchCosts, Curve
from evaluation.contest import replay_dataset
from evaluation.costs.machine import keep_curves, kept_costs, key_of
from evaluation.costs.machine import verdict_of as costs_verdict
from evaluation.report.replay import at_costs, lengths_text
from evaluation.traces.disk import record
from evaluation.traces.recording import trace_folder
from evaluation.traces.replay import replay_settings
from heads import AcceptanceHead
from heads.model.head import Provenance
from tests.evaluation.commands import called, config_with, printed, refusal
from tests.toys.times import flat_times

SMALL = ("--decode.num_dev=3", "--decode.num_test=2", "--decode.max_new_tokens=24", "--decode.max_draft_length=6")
TIMES = ("--decode.t_draft_s", "0.01", "--decode.t_target_s", "0.05")
MODELS = {"transformers", "accelerate", "pytorch_lightning", "torchmetrics", "datasets", "tensorboard", "sympy"}
MODELS |= {"torch._dynamo", "torch.distributed.tensor", "scipy.optimize", "scipy.stats", "matplotlib.pyplot"}
"""Packages that a replay needs no more than those that run models, which take longer to import than a replay takes."""


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    """Of a run with a recorded trace and one untrained head."""
    directory = tmp_path_factory.mktemp("run")
    AcceptanceHead(96, 0, "drawn").save_pretrained(directory / "heads" / "exported" / "plain")
    folders = ["--decode.dir", str(directory), "--heads.dir", str(directory / "heads")]
    flags = ["--config", "configs/tiny.yaml", *folders, *SMALL, *TIMES]
    called("trace", *flags)
    return flags


def test_replay_prints_the_counts_of_the_policy_over_both_splits_and_a_ratio_changes_the_times_alone(flags, capsys):
    policy = ("--policy", "entropy:max_sqrt_entropy=0.4")
    lines, document = printed(capsys, "replay", *flags, *policy)
    traces = trace_folder(Experiment(config_with(flags))).load("stories")
    for played in document["played"]:
        counts = replay_settings(getattr(traces, played["split"]), Entropy(0.4)).total()
        for name in ("num_drafted", "num_target", "discard_rate"):
            assert played[name] == getattr(counts, name)
        seconds = 0.01 * counts.num_drafted + 0.05 * counts.num_target
        assert played["tokens_per_s"] == pytest.approx(counts.num_emitted / seconds)
        assert played["speed_up"] == pytest.approx(counts.num_emitted / seconds * 0.05)
        assert sum(played["rounds_by_length"]) == counts.num_target
    assert [played["split"] for played in document["played"]] == ["dev", "test"]
    sentence = f"max_sqrt_entropy=0.4 on 2 test prompts of stories, predicted {played['speed_up']:.2f} times"
    assert sentence in " ".join(" ".join(lines[-4:-1]).split())
    assert lines[-1].startswith("next: acceptance-heads evaluate --config configs/tiny.yaml --decode.dir ")
    assert sum("draft lengths" in line for line in lines) == 2
    assert lengths_text([0, 8, 4, 0]) == "mean 1.33, median 1"
    _, there = printed(capsys, "replay", *flags, *policy, "--ratio", "20")
    assert there["played"][1]["num_drafted"] == played["num_drafted"]
    assert there["costs"]["draft"]["seconds"][0] == pytest.approx(0.05 / 20)
    assert there["played"][1]["speed_up"] > played["speed_up"]


def test_replay_of_several_policies_compares_each_with_the_first_on_the_same_prompts(flags, capsys):
    specs = [
        "fixed_length:k=2",
        "entropy:max_sqrt_entropy=0.4,scale=0.2",
        "auto_token_prob:t_draft_s=0.01,t_target_s=0.05",
    ]
    options = [option for spec in specs for option in ("--policy", spec)]
    lines, document = printed(capsys, "replay", *flags, *options)
    speeds = {row["policy"]: row["tokens_per_s"] for row in document["played"] if row["split"] == "test"}
    assert [*speeds] == specs
    assert [gain["policy"] for gain in document["gains"]] == specs[1:]
    for gain in document["gains"]:
        assert gain["over"] == specs[0]
        assert gain["gain"] == pytest.approx(speeds[gain["policy"]] / speeds[specs[0]] - 1)
        assert gain["gain_low"] is None, "2 prompts have no interval"
        assert " ".join(f"stories: {gain['conclusion']}.".split()) in " ".join(" ".join(lines).split())
    _, alone = printed(capsys, "replay", *flags, "--policy", specs[1])
    assert (alone["gains"], alone["played"]) == ([], [row for row in document["played"] if row["policy"] == specs[1]])


def test_replay_needs_neither_models_nor_times(flags, capsys):
    policy = f"head:{flags[5]}/exported/plain,max_rejection_prob=0.5"
    _, here = printed(capsys, "replay", *flags, "--policy", policy)
    absent = ["--pair.target.path", "/nowhere/target", "--pair.draft.path", "/nowhere/draft"]
    lines, document = printed(capsys, "replay", *flags, "--policy", policy, *absent)
    assert lines[0] == "draft and target not here: taken for those of the trace"
    drafted = [[played["num_drafted"] for played in one["played"]] for one in (here, document)]
    assert drafted[0] == drafted[1]
    assert "stops free: the draft is not here" in document["costs"]["stop_origin"]
    _, document = printed(capsys, "replay", *without_times(flags), "--policy", "entropy", "--ratio", "4")
    assert [document["costs"][name]["seconds"] for name in ("draft", "target")] == [[0.25, 0.25], [1.0, 1.0]]
    assert "nothing measured" in document["costs"]["origin"]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("evaluate", ["--decode.t_draft_s=0.01", "--decode.t_target_ms=1:50,3:52,7:60"]),
        ("replay", ["--policy=entropy", "--ratio=4"]),
    ],
)
def test_a_recorded_trace_is_replayed_without_an_import_of_models(flags, name, options):
    argv = [name, *without_times(flags), *options]
    script = f"import sys; from configs.front import main; main({argv}); print(*{MODELS} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "", done.stdout


def without_times(flags):
    return [flag for flag in flags if flag not in TIMES]


def test_tune_writes_what_it_prints_evaluate_chooses_alike_and_auto_and_generate_follow(flags, capsys):
    lines, tuned = printed(capsys, "tune", *flags)
    assert lines[0].startswith("replay: tune: 0 %"), "a bar comes first"
    assert max(len(line) for line in lines if not line.startswith("next: ")) <= 190
    (row,) = [line.split("│") for line in lines if line.startswith("│ plain")]
    threshold, gain = (row[column].strip() for column in (2, 5))
    assert re.fullmatch(r"[+-]\d+\.\d %", gain), "too few prompts for an interval"
    assert len("│".join(row)) <= 100
    text = " ".join(" ".join(lines).split())
    assert f"wrote config.json, README.md in {flags[5]}/exported/plain" in text
    recommended = json.loads(Path(flags[5], "exported", "plain", "config.json").read_text())["recommended"]
    (head,) = tuned["tuned"]
    assert recommended == head["recommended"]
    assert f"{recommended['max_rejection_prob']:.4f}" == threshold
    assert {"tokens_per_s", "auto_tokens_per_s", "fixed_tokens_per_s", "index_slope"} <= recommended.keys()
    verdict = json.loads(Path(flags[3], "verdict.json").read_text())
    assert verdict["sentence"] in text
    assert f"next: acceptance-heads generate {' '.join(flags)} --prompt 'Why is the sky blue?'" in lines
    assert text.endswith(verdict["sentence"])
    assert verdict["sentence"].startswith("No verdict: 2 test prompts are too few; a verdict needs at least 10, and ")
    card = Path(flags[5], "exported", "plain", "README.md").read_text()
    assert verdict["sentence"] in card
    assert f"max_rejection_prob {recommended['max_rejection_prob']:g}" in card
    assert f"On test prompts it gains {100 * head['gain']['value']:+.1f} % over the best fixed length" in card
    _, auto = printed(capsys, "replay", *flags, "--policy", f"head:{flags[5]}/exported/plain,max_rejection_prob=auto")
    assert auto["played"][1]["num_emitted"] > 0
    _, evaluated = printed(capsys, "evaluate", *flags)
    assert json.loads(Path(flags[3], "verdict.json").read_text()) == evaluated["verdict"] == tuned["verdict"]
    rows = {row["family"]: row for row in evaluated["results"]}
    names = ("max_rejection_prob", "is_calibrated")
    assert json.loads(rows["head_drawn"]["setting"]) == {name: recommended[name] for name in names}
    assert recommended["is_calibrated"] is head["is_calibrated"] is True
    assert rows["head_drawn"]["tokens_per_s"] == pytest.approx(head["tokens_per_s"])
    called("generate", *flags, "--prompt", "Tom has 3 apples.", "--max_new_tokens", "4")
    said = capsys.readouterr().err.splitlines()[0]
    assert said == f"policy: {tuned['verdict']['sentence']} It is {tuned['verdict']['speed']}"
    assert "best fixed length" in said
    files = Path(flags[5], "exported", "plain", "config.json"), Path(flags[3], "verdict.json")
    before = [file.read_bytes() for file in files]
    lines, other = printed(capsys, "tune", *flags, "--ratio", "20")
    assert other["tuned"][0]["recommended"] != recommended
    assert sum(line.startswith("nothing is written; with --write true") for line in lines) == 1
    assert [file.read_bytes() for file in files] == before, "a ratio is of other hardware"


def test_all_replays_the_trace_once_and_tunes_as_tune_does_alone(flags, capsys, monkeypatch):
    for name in ("data", "train", "export"):  # finished: nothing is left to do
        monkeypatch.setitem(COMMANDS, name, (lambda config, **options: None, ()))
    replayed = []

    def counted(traces, *args, **options):
        replayed.append(options["name"])
        return replay_dataset(traces, *args, **options)

    for module in ("evaluated", "tune"):
        monkeypatch.setattr(f"evaluation.report.{module}.replay_dataset", counted)
    files = Path(flags[5], "exported", "plain", "config.json"), Path(flags[3], "verdict.json")
    called("tune", *flags)
    alone = [file.read_text() for file in files]
    for file in files:
        file.write_text(file.read_text().replace('"sentence"', '"old"').replace("max_rejection_prob", "other"))
    replayed.clear()
    all_steps(config_with(flags, "all"))
    assert replayed == ["stories"]
    assert [file.read_text() for file in files] == alone
    without_heads = replace(config_with(flags, "all").decode, policies=("entropy",))
    all_steps(replace(config_with(flags, "all"), decode=without_heads))
    assert replayed == ["stories", "stories", "tune"], "heads are tuned whatever decode.policies says"
    assert [file.read_text() for file in files] != alone


def test_evaluate_ends_with_the_verdict_and_prints_json_only_if_asked(flags, capsys):
    few = {"fixed_length": {"k": [0, 2]}, "head": {"max_rejection_prob": [0.3, 0.6]}}
    few |= {"ada_edl": {"initial_lambda": [0.3], "target_rate": [0.7]}}
    asked = ["evaluate", *flags, "--decode.grid", json.dumps(few), "--decode.ratios", "[8]"]
    capsys.readouterr()
    called(*asked)
    shown = capsys.readouterr().out
    *_, others, note, last = (" ".join(part.split()) for part in shown.split("\n\n"))
    assert note.startswith("The target's time is one number, so verifying drafted tokens counts as free")
    verdict = json.loads(Path(flags[3], "verdict.json").read_text())
    assert " next: acceptance-heads generate --config configs/tiny.yaml " in note
    assert last == verdict["sentence"]
    assert others.startswith("On stories, on other hardware, where a target forward costs 8.0 draft forwards ")
    assert ": no verdict: 2 test prompts are too few; " in others
    assert "│ AdaEDL" not in shown
    lines, document = printed(capsys, *asked, "--all", "true")
    own, other = (row["verdict"] for row in document["verdicts"])
    assert other == others
    sentence = verdict["sentence"]
    assert "where a target forward costs 5.0 draft forwards " in own
    assert own.endswith(f": {sentence[0].lower()}{sentence[1:]}")
    assert any(line.startswith("│ AdaEDL") for line in lines)
    frame = pd.read_csv(Path(flags[5]).parent / "results.csv")
    assert list(frame["family"]) == [row["family"] for row in document["results"]]
    of_stages = [row["family"] for row in document["stages"]]
    assert of_stages == list(pd.read_csv(Path(flags[5]).parent / "stages.csv")["family"])
    stages = {row["family"]: row for row in document["stages"][: len(of_stages) // 2]}
    speeds = {row["family"]: row["tokens_per_s"] for row in document["results"][: len(document["results"]) // 2]}
    assert all(row["tokens_per_s"] == pytest.approx(speeds[family]) for family, row in stages.items())
    assert stages["oracle"]["percent_of_oracle_gain"] >= 0


def test_auto_at_other_times_than_it_was_tuned_for_estimates_its_lambda_anew():
    rule = Auto(AcceptanceHead(4, 0), 0.01, 0.05, throughput=30.0, prior_profit=2.0, index_offset=0.4)
    assert at_costs(rule, flat_times(0.01, 0.05), 5) is rule
    other = at_costs(rule, flat_times(0.001, 0.05), 5)
    assert isinstance(other, Auto)
    assert (other.t_draft_s, other.throughput, other.prior_profit, other.index_offset) == (0.001, None, None, 0.4)


@pytest.mark.parametrize(
    ("name", "argv", "message"),
    [
        ("replay", ["--policy", "svip"], "there is no policy 'svip'"),
        ("replay", ["--policy", "entropy:h=1"], "no parameter 'h'"),
        ("replay", ["--policy", "token_prob:min_token_prob=2"], "a probability, between 0 and 1"),
        ("replay", ["--policy", "entropy", "--ratio", "0"], "must be a positive number"),
        ("replay", ["--policy", "entropy", "--decode.dir", "nowhere"], "run `acceptance-heads trace`"),
        ("replay", ["--policy", "entropy", "--decode.seed", "7"], "seed"),
        ("replay", ["--policy", "head:/nowhere/at/all"], "nowhere"),
        ("replay", ["--policy", "entropy", "--pair.target.path", "/nowhere/it"], "no model at '/nowhere/it'"),
        ("replay", ["--policy", "entropy", "--decode.ratios", "[]"], "costs.jsonl has no times of this loop"),
        ("evaluate", ["--decode.seed", "7"], "in seed: 0 there, 7 in this run; choose another decode.dir"),
        ("tune", ["--decode.seed", "7"], "in seed: 0 there, 7 in this run; choose another decode.dir"),
        ("evaluate", ["--transfer_from", "/nowhere"], "nowhere/trace/manifest.json"),
        ("evaluate", ["--decode.as_recorded=true", "--clock", "1"], "decode.as_recorded has neither models"),
    ],
)
def test_what_cannot_be_replayed_is_refused_in_one_line_before_anything_is_timed(
    flags, capsys, monkeypatch, name, argv, message
):
    if "--decode.seed" in argv and name != "replay":
        module = {"evaluate": "evaluated"}.get(name, name)
        monkeypatch.setattr(f"evaluation.report.{module}.costs_for", lambda *_: pytest.fail("timed"))
    assert message in refusal(capsys, name, *(without_times(flags) if "no times" in message else flags), *argv)


def test_costs_are_printed_and_kept_say_what_they_mean_and_broken_ones_name_their_file(flags, tmp_path, capsys):
    lines, document = printed(capsys, "costs", *flags)
    for row in ("drawn-d0", "entropy"):
        assert sum(f" {row} " in line and "│" in line for line in lines) == 1
    assert all(0 < error < 1 for error in document["errors"]["verifying"])
    assert sum(len(re.findall(r"\d ± \d+\.\d%", line)) for line in lines) == 5, "t_draft, t_target(0), (1), (2), (5)"
    assert len(document["t_target_s"]) == 7
    assert lines[-1] == f"next: acceptance-heads evaluate {' '.join(flags)}"
    assert printed(capsys, "costs", *flags)[1] == document
    times = {"t_draft_s": 0.001, "t_target_s": [0.005, 0.006], "stop_shares": {"entropy": (0.02, 0), "drawn": (0.1, 0)}}
    sentence = costs_verdict(times)
    assert "costs 5.0 draft forwards, and the most expensive stop, drawn, adds 10% to a draft step." in sentence
    assert "expect little" not in sentence
    assert "expect little of any policy" in costs_verdict(times | {"t_target_s": [0.002], "stop_shares": {}})
    store = kept_costs(tmp_path)
    for text in ('{"loop": {', '{"key": {}, "value": {"t_draft_s": 1.0}}', "null"):
        store.path.write_text(f"{text}\n")
        with pytest.raises(ValueError, match=r"costs\.jsonl:1: .*; delete the line"):
            store.entries()


@pytest.mark.slow
def test_a_head_that_was_trained_since_is_timed_and_nothing_else(flags, tmp_path, capsys):
    heads = shutil.copytree(flags[5], tmp_path / "heads")  # of its own: the other tests know one head
    flags = [*flags, "--heads.dir", str(heads)]
    before = printed(capsys, "costs", *flags)[1]
    AcceptanceHead(96, 1, "drawn").save_pretrained(heads / "exported" / "deeper")
    after = printed(capsys, "costs", *flags)[1]
    shares, earlier = after["stop_shares"], before["stop_shares"]
    assert set(shares) == set(earlier) | {"drawn-d1"}
    assert {kind: shares[kind] for kind in earlier} == earlier
    assert after["t_draft_s"] == before["t_draft_s"]


@pytest.mark.slow
def test_what_was_chosen_under_one_sampling_is_transferred_to_another(flags, tmp_path, capsys):
    path, source = tmp_path / "warm", flags[flags.index("--decode.dir") + 1]
    AcceptanceHead(96, 0, "drawn", provenance=Provenance(sampling={"temperature": 1.0})).save_pretrained(path)
    changes = [f"--decode.heads=[{path}]", "--pair.sampling.temperature=0.5", "--decode.allow_foreign_heads=true"]
    changes += ["--decode.dir", str(tmp_path / "there"), "--transfer_from", source]
    _, document = printed(capsys, "evaluate", *flags, *changes)
    rows = {(row["family"], row["chosen_on"]): row for row in document["results"]}
    assert {chosen_on for _, chosen_on in rows} == {"stories", "stories (temperature 1)"}
    assert rows["head_drawn", "stories (temperature 1)"]["name"] == "head:warm"


RECORD = ["--decode.as_recorded=true", "--pair.target.path=/nowhere/one", "--pair.draft.path=/nowhere/other"]
RECORD += ["--data.prompts=/nowhere/prompts.jsonl", "--pair.sampling.temperature=0.3"]


def test_a_record_is_evaluated_as_it_was_without_models_and_prompts(flags, tmp_path, capsys):
    published = tmp_path / "record"
    manifest = Path(flags[3], "trace", "manifest.json")
    recorded = manifest.read_text()
    listed = json.loads(recorded)
    listed["split"]["stories.test"]["prompts"] += 100  # a run for more prompts was stopped
    manifest.write_text(json.dumps(listed))
    record(decode_dir=flags[3], out=str(published), heads=(f"{flags[5]}/exported/plain",))
    manifest.write_text(recorded)
    assert json.loads((published / "trace" / "manifest.json").read_text())["split"] == json.loads(recorded)["split"]
    assert sum(path.stat().st_size for path in published.rglob("*.safetensors")) < 100_000
    for rows in published.glob("trace/stories/rows/*.parquet"):
        assert not any(map(len, pq.read_table(rows)["prompt_ids"]))
    flags = [*flags, "--decode.stop_share", "0"]  # of a draft that is not here no share is known
    _, here = printed(capsys, "evaluate", *flags)
    there = [str(published) if flag == flags[3] else flag for flag in flags if flag not in SMALL]
    lines, away = printed(capsys, "evaluate", *there, *RECORD)
    models = "/nowhere/one (pair.target.path) and /nowhere/other (pair.draft.path)"
    assert f"next: `acceptance-heads generate` on a machine that has {models}" in lines
    of_embedded = [*there, "--decode.as_recorded=true"]
    lines, _ = printed(capsys, "evaluate", *of_embedded)
    [following] = [line for line in lines if line.startswith("next: ")]
    called(*shlex.split(following)[2:], "--max_new_tokens", "2")
    frames = [pd.DataFrame(document["stages"]).drop(columns="costs") for document in (here, away)]
    pd.testing.assert_frame_equal(*frames)
    results = [pd.read_csv(folder / "results.csv").drop(columns="costs") for folder in (Path(flags[3]), published)]
    pd.testing.assert_frame_equal(*results)
    policy = ("--policy", f"head:{flags[5]}/exported/plain,max_rejection_prob=0.5")
    _, here = printed(capsys, "replay", *flags, *policy)
    _, away = printed(capsys, "replay", *there, *RECORD, *policy)
    assert away["played"] == here["played"]


def test_a_record_has_its_own_times_or_asks_for_some_and_is_refused_if_it_lost_a_shard(flags, tmp_path, capsys):
    trace = shutil.copytree(Path(flags[3]) / "trace", tmp_path / "trace")
    untimed = [str(tmp_path) if flag == flags[3] else flag for flag in flags if flag not in (*SMALL, *TIMES)]
    needs_times = "has no times of this loop; run `acceptance-heads costs`, or give decode.t_draft_s"
    assert needs_times in refusal(capsys, "evaluate", *untimed, *RECORD)
    experiment = Experiment(config_with(flags))
    times = {"t_draft_s": 0.01, "t_target_s": [0.05, 0.06], "origin": "measured", "stops": {}}
    errors = {"errors": {"drafting": 0.0, "verifying": 0.0}}
    kept_costs(tmp_path).keep([(key_of(experiment), times | errors)])
    lines, document = printed(capsys, "replay", *untimed, *RECORD, "--policy", "fixed_length:k=2")
    assert document["costs"]["target"] == {"numbers": [1, 2], "seconds": [0.05, 0.06]}
    assert "At the times of the record" in " ".join(lines)
    keep_curves(experiment, BatchCosts(Curve.line(0.01), Curve.line(0.05)))
    shutil.copy(Path(flags[3]) / "batch_costs.jsonl", tmp_path)
    few = ("--decode.grid", json.dumps({"fixed_length": {"k": [2]}}), "--decode.policies", "[fixed_length]")
    lines, document = printed(capsys, "evaluate", *untimed, *RECORD, *few, "--batch", "2")
    assert {row["verify_share"] for row in document["batches"] if row["costs"] == "recorded"} == {None}
    assert "curves of batches" in " ".join(" ".join(lines).split())
    replay = ("replay", *flags[:2], *RECORD, "--policy", "entropy", "--decode.dir")
    assert str(tmp_path / "x" / "trace") in refusal(capsys, *replay, str(tmp_path / "x"))
    lost = max(trace.glob("*/rows/test-*.parquet"))
    lost.unlink()
    assert f"{lost} is missing" in refusal(capsys, *replay, str(tmp_path))
