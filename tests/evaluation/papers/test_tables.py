"""The papers' tables have the rows and columns that are printed, and their replayed cells are what replay says."""

import json
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from decode.policies import Entropy, FixedLength, Heuristic
from evaluation.papers.svip import CHOICES, by_category, category_rows, threshold_for
from evaluation.times import Times
from evaluation.traces.replay import replay_settings
from heads import AcceptanceHead
from heads.model.provenance import Provenance
from lm import Sampling
from tests.evaluation.commands import called, printed, refusal, spelt
from tests.toys.small_pair import trace

COST = Times.constant(0.2, 1.0)
SMALL = {"num_dev": 3, "num_test": 3, "max_new_tokens": 24, "max_draft_length": 8}
SMALL |= {"t_draft_s": 0.01, "t_target_s": 0.05}
METHODS = {"Const.": FixedLength(5), "Heuristics": Heuristic(5), "SVIP": Entropy(0.3)}


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    """Flags of a run with a recorded trace, four of SpecDec++'s heads and another one."""
    directory = tmp_path_factory.mktemp("run")
    exported = directory / "heads" / "exported"
    torch.manual_seed(0)
    for depth, weight in ((0, 1.0), (1, 1.0), (0, 6.0), (1, 6.0)):
        known = Provenance(reject_weight=weight, metrics={"raw_kl": 0.1 + depth, "train_raw_kl": 0.2 * weight})
        AcceptanceHead(96, depth, provenance=known).save_pretrained(exported / f"fed-d{depth}-w{weight:g}")
    AcceptanceHead(96, 0, "drawn", True).save_pretrained(exported / "drawn+s")
    small = spelt({f"decode.{name}": value for name, value in SMALL.items()})
    flags = ["--config", "configs/tiny.yaml", f"--decode.dir={directory}", f"--heads.dir={exported.parent}", *small]
    called("trace", *flags)
    return flags


@pytest.fixture(scope="module")
def played():
    made = trace(Sampling(temperature=0.6), copies=1)
    return replace(made, rows=tuple(replace(row, category=("even", "odd")[i % 2]) for i, row in enumerate(made.rows)))


def tables_of(capsys, paper, *flags):
    lines, document = printed(capsys, "tables", "--paper", paper, *flags)
    return lines, document["tables"]


@pytest.mark.slow
def test_specdec_tables_have_the_papers_rows_and_columns(flags, capsys):
    _, (first, times, ablation) = tables_of(capsys, "specdec++", *flags)
    assert [row["Dataset"] for row in first["rows"]] == ["SpecDec++", "SpecDec (baseline)"]
    settings = product(("stand-alone", "SpecDec", "SpecDec++"), ("stories", "average"))
    assert [(row["Setting"], row["Dataset"]) for row in times["rows"]] == list(settings)
    rows = ablation["rows"]
    assert list(rows[0]) == ["w_rej", "Depth D", "train/KL", "eval/KL", "stories"]
    assert [(row["w_rej"], row["Depth D"], row["train/KL"], row["eval/KL"]) for row in rows] == [
        (weight, depth, train_kl, f"{depth + 0.1:.3f}")
        for weight, train_kl in (("1", "0.200"), ("6", "1.200"))
        for depth in (0, 1)
    ]
    assert any("[bold]" in row["stories"] for row in rows)
    best = max(float(row["stories"].removeprefix("[bold]").split()[0]) for row in rows)
    assert first["rows"][0]["stories"].startswith(f"{best:.2f} ")
    assert "replayed" in first["title"]
    assert "clocked" in times["title"]


def test_without_the_papers_heads_or_a_micro_model_the_error_says_what_is_missing(flags, capsys):
    heads = ("--decode.heads", json.dumps([f"{flags[3].partition('=')[2]}/exported/drawn+s"]))
    assert "heads.specdec" in refusal(capsys, "tables", "--paper", "specdec++", *flags, *heads)
    assert "micro" in refusal(capsys, "tables", "--paper", "hsddw", *flags, "--pair.micro", "null")


def test_svip_tables_have_a_column_per_category_and_per_length(flags, capsys):
    lines, (by_kind, by_length) = tables_of(capsys, "svip", *flags)
    for table in (by_kind, by_length):
        assert [row["Methods"] for row in table["rows"]] == ["Const.", "Heuristics", "SVIP"]
    assert list(by_length["rows"][0]) == ["Methods", "16"]
    assert by_kind["title"].startswith("SVIP Table 5")
    assert by_length["title"].startswith("SVIP Table 2")
    last = " ".join("\n".join(lines).rpartition("\n\n")[2].split())
    assert last.startswith("Figures of svip's tables are predicted from a trace and times")
    assert last.endswith("acceptance-heads evaluate compares every policy.")


def test_svips_cells_are_speed_ups_of_the_prompts_of_a_category(played):
    rows = category_rows({name: by_category(played, policy, COST, "made") for name, policy in METHODS.items()})
    part = played.select(range(0, len(played.rows), 2))
    seconds = COST.time_s(replay_settings(part, FixedLength(5))).sum()
    assert rows[0]["even"] == f"{part.num_positions / seconds:.2f}"
    unsorted = replace(played, rows=tuple(replace(row, category="") for row in played.rows))
    assert list(by_category(unsorted, METHODS["SVIP"], COST, "made")) == ["made"]


def test_a_generation_length_ends_every_response_there(played):
    cut = played.select(range(len(played.rows)), num_tokens=5)
    assert [len(row.response_ids) for row in cut.rows] == [min(5, len(row.response_ids)) for row in played.rows]
    counts = replay_settings(cut, FixedLength(0)).counts
    assert counts.num_target.tolist() == [[len(row.response_ids) for row in cut.rows]]
    assert np.array_equal(cut.is_rejected[: cut.offsets[1]], played.is_rejected[: cut.offsets[1]])
    for policy in METHODS.values():
        drafted = replay_settings(cut, policy).lengths[0].sum(0)
        assert drafted[5:].sum() == 0, "the token that the target adds must fit, so that at most 4 are drafted"
    whole = played.select(range(len(played.rows)), num_tokens=8192)
    cut_s, played_s = (COST.time_s(replay_settings(each, METHODS["SVIP"])) for each in (whole, played))
    assert np.array_equal(cut_s, played_s)


def test_svips_threshold_is_the_papers_for_its_pairs_and_chosen_for_others(played):
    for name, threshold in {"pythia-6.9b": 0.4, "Meta-Llama-3-70B-Instruct": 0.3, "Qwen2.5-14B": 0.3}.items():
        assert threshold_for(name, played, COST)[0] == threshold
    held_out = played.select(range(8))
    speeds = {h: COST.tokens_per_s(replay_settings(held_out, Entropy(h)))[0] for h in CHOICES}
    chosen, _ = threshold_for("another", played, COST)
    assert speeds[chosen] == pytest.approx(max(speeds.values()))


def test_hsddw_tables_have_the_papers_rows(flags, capsys):
    _, (first, ablation, *mathematics, utilisation) = tables_of(capsys, "hsddw", *flags, "--repeats", "1")
    assert [row[""] for row in first["rows"]] == ["AT", "HSDDW", "PEARL, two devices, predicted"]
    assert first["rows"][0]["stories"] == "1.00x (1.00, 1.00)"
    marks = [(row["Pre-verify"], row["Self-verify"], row["HSDDW"]) for row in ablation["rows"]]
    assert marks == [("", "", ""), ("x", "", ""), ("", "x", ""), ("x", "x", ""), ("", "", "x")]
    assert [row["Model"] for row in utilisation["rows"]] == ["target-draft", "target-micro", "Pre+Self-verify", "HSDDW"]
    hsddw = first["rows"][1]["stories"].split()[0]
    assert hsddw == ablation["rows"][-1]["stories"] == utilisation["rows"][-1]["Speedup"]
    assert mathematics == []
