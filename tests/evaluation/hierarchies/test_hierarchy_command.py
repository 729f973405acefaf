"""`evaluation hierarchy` and `evaluation theory`, on the embedded trio and a few tokens."""

import json
import re
from pathlib import Path

import pytest
import torch

from configs.command import run
from evaluation.__main__ import COMMANDS
from evaluation.hierarchies import configurations
from heads import AcceptanceHead
from heads.model.provenance import Provenance
from lm import Sampling

ROOT = Path(__file__, "../../../..").resolve()
WIDTHS = {"micro": 24, "draft": 96}
FEW = [f"--decode.{value}" for value in ("num_dev=1", "num_test=2", "max_new_tokens=8", "max_draft_length=4")]


@pytest.fixture(autouse=True)
def few_settings(monkeypatch):
    """One or two settings per drafter, and the repository as working directory, where the config's paths start."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(configurations, "_LENGTHS", (2, 3))
    monkeypatch.setattr(configurations, "_INNER", ((1, 2),))
    monkeypatch.setattr(configurations, "_SCHEDULES", ((1, 1),))


def command(name: str, directory: Path, *flags: str) -> None:
    folders = ["--decode.dir", str(directory), "--heads.dir", str(directory)]
    run(COMMANDS, argv=[name, "--config", "configs/tiny.yaml", *folders, *flags])


def document(capsys) -> dict:
    """What a command printed with --json."""
    return json.loads(capsys.readouterr().out)


def head_of(level: str, directory: Path, **provenance) -> str:
    """A drawn-time head of one level, fitted for a moment to made-up features on which a large first component means
    acceptance.
    """
    torch.manual_seed(0)
    head = AcceptanceHead(WIDTHS[level], 1, "drawn", True)
    hidden, scalars = torch.randn(256, WIDTHS[level]), torch.rand(256, 2)
    optimiser = torch.optim.Adam(head.parameters(), 1e-2)
    for _ in range(20):
        optimiser.zero_grad()
        logits = head(hidden, scalars)
        torch.nn.functional.binary_cross_entropy_with_logits(logits, (hidden[:, 0] > 0).float()).backward()
        optimiser.step()
    head.provenance = Provenance(sampling=vars(Sampling()), **provenance)
    head.save_pretrained(directory / level)
    return str(directory / level)


@pytest.mark.slow
def test_hierarchy_decodes_every_drafter_with_heads_and_resumes_where_it_was_killed(capsys, tmp_path):
    heads = ["--level_heads", json.dumps([head_of(level, tmp_path) for level in ("micro", "draft")])]
    command("hierarchy", tmp_path, *FEW, *heads, "--json")
    printed = capsys.readouterr()
    assert "HSDDW, Table 2" in printed.err
    assert "a third level pays at" in printed.err.rpartition("\n\n")[2]
    arms = json.loads(printed.out)["datasets"]["stories"]["arms"]
    assert len(arms) == 13
    assert [row["drafter"] for row in arms[-2:]] == ["sd with head", "HSDDW with heads"]
    for arm in arms:
        assert arm["num_emitted"] <= 16
        assert arm["num_accepted"] <= arm["num_drafted"]
        assert (arm["break_even"] is None) == (arm["num_levels"] < 3)
    path = tmp_path / "hierarchy" / "stories" / "decoded.jsonl"
    whole = path.read_bytes()
    command("hierarchy", tmp_path, *FEW, *heads)
    assert path.read_bytes() == whole, "stored generations are not decoded again"
    path.write_bytes(whole[: len(whole) // 2])
    capsys.readouterr()
    command("hierarchy", tmp_path, *FEW, *heads, "--json")
    counted = ("drafter", "num_emitted", "num_drafted", "num_accepted", "num_micro_forwards", "num_draft_forwards")
    resumed = document(capsys)["datasets"]["stories"]["arms"]
    before, after = ({tuple(arm[name] for name in counted) for arm in each} for each in (arms, resumed))
    assert {row for row in after if row[0].startswith(("HSDDW", "sd + "))} <= before
    manifest = path.with_name("manifest.json")
    manifest.write_text(manifest.read_text().replace("PCG64DXSM", "MT19937"))
    with pytest.raises(SystemExit):
        command("hierarchy", tmp_path, *FEW, *heads)
    assert "differs in generator: 'MT19937' there, 'PCG64DXSM' in this run" in capsys.readouterr().err


@pytest.mark.draws
def test_theory_writes_its_table_and_figure_and_names_the_fastest(capsys, tmp_path):
    command("theory", tmp_path)
    sentence = " ".join(capsys.readouterr().out.rpartition("\n\n")[2].split())
    assert re.fullmatch(r"By the closed forms .* is fastest, .* times the target alone \(.*\)\.", sentence)
    command("theory", tmp_path, "--json")
    printed = document(capsys)
    assert {row["form"] for row in printed["forms"]} == {"Leviathan", "Chen", "pre-verified"}
    assert all(Path(path).stat().st_size > 0 for path in printed["written"])


def test_without_a_micro_model_the_answer_is_one_line(capsys, tmp_path):
    with pytest.raises(SystemExit) as stopped:
        command("hierarchy", tmp_path, "--pair.micro", "null")
    assert stopped.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: pair.micro is not set")


def test_a_head_at_the_wrong_level_is_refused_and_named(capsys, tmp_path):
    other = {"weights": "0" * 64, "path": "somewhere/else"}
    heads = [head_of("micro", tmp_path), head_of("draft", tmp_path, draft=other)]
    with pytest.raises(SystemExit):
        command("hierarchy", tmp_path, *FEW, "--level_heads", json.dumps(heads))
    error = capsys.readouterr().err.splitlines()[-1]
    assert "somewhere/else, but pair.draft is checkpoints/tiny/draft" in error
