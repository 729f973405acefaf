"""Heads leave and come: `export`, `import` of a released SpecDec++ head, a folder in place of the hub."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
from safetensors.torch import load_file, save_model
from torch import nn
from torch.nn.functional import binary_cross_entropy, binary_cross_entropy_with_logits

from configs.schema import Config, DecodeConfig, ModelSource
from decode.experiment import Experiment
from heads import AcceptanceHead, Provenance
from heads.command import export, import_, inspect, load_sweep, push, save_whole
from heads.model.files import EXPORT_RECORD, rank_of, record_export
from heads.model.official import read_official_head
from heads.training.command import train
from lm.features.released import released_layout_of
from tests.heads.conftest import Run
from tests.toys.made_up import feature_data, make_config, write_data


def test_exported_heads_score_as_the_sweep_does(trained: Run, tmp_path: Path):
    config = trained.config
    paths = export(config, out=str(tmp_path), force=True)
    heads = {path.name: AcceptanceHead.from_pretrained(path) for path in paths}
    sweep = load_sweep(Path(config.heads.dir) / "last.ckpt")
    batch = next(iter(feature_data(config).loader("dev")))
    assert set(heads) == {str(spec) for spec in sweep.specs}
    with torch.no_grad():
        for stack in sweep.by_shape:
            features = batch[stack.shape.timing]
            for spec, logit in zip(stack.specs, sweep.logits(stack, batch), strict=True):
                head = heads[str(spec)]
                ours = head(features.hidden, head.inputs.stacked(features.scalars))
                torch.testing.assert_close(ours, logit, atol=1e-4, rtol=1e-4)
                assert (head.timing, head.provenance.reject_weight) == (spec.shape.timing, spec.reject_weight)
                assert head.provenance.metrics["auroc"] > 0
                assert head.provenance.draft["path"] == "made-up/draft"
                assert (head.provenance.mixing_ratio is None) == (head.timing == "drawn")
        # on train of as many responses as dev has
        head, batches = heads["fed-d2-w6"], list(feature_data(config).loader("train", num=24))
        prob = torch.cat([batch["fed"].acceptance_prob for batch in batches])
        logit = torch.cat([head(batch["fed"].hidden) for batch in batches])
        kl = binary_cross_entropy_with_logits(logit, prob) - binary_cross_entropy(prob, prob)
        assert head.provenance.metrics["train_raw_kl"] == pytest.approx(float(kl), abs=1e-4)


def test_only_heads_of_the_newest_run_in_the_folder_and_imported_ones_compete(
    copied: Config, folder: Path, capsys: pytest.CaptureFixture[str]
):
    def competing(**decode: object) -> list[str]:
        return sorted(Experiment(replace(copied, decode=DecodeConfig(**decode))).head_paths)

    [path] = export(copied, head="fed-d0-w6", force=True)
    earlier = shutil.copytree(path, path.with_name("fed-d8-w6"))
    (path.parent / EXPORT_RECORD).unlink()
    assert competing() == ["fed-d0-w6", "fed-d8-w6"], "without a record, all compete"
    capsys.readouterr()
    export(copied, head="fed-d2-w6", force=True)
    export(copied, head="fed-d0-w6", force=True)
    assert competing() == ["fed-d0-w6", "fed-d2-w6"], "both exports are of one run"
    note = "also has heads of an earlier run (fed-d8-w6), which evaluate and tune leave out"
    assert capsys.readouterr().err.count(note) == 1, "not after each command of `all`"
    assert competing(heads=(str(earlier),)) == ["fed-d8-w6"]
    record_export(path.parent, ["fed-d8-w6"], run="another")
    assert competing() == ["fed-d8-w6"]
    write_official(folder, 1)
    import_(copied, source=str(folder), out=str(path.parent / "theirs"), reject_weight=6.0)
    assert competing() == ["fed-d8-w6", "theirs"]


def test_best_is_one_head_of_each_kind_and_a_name_is_one_head(trained: Run, tmp_path: Path):
    config, heads = trained.config, trained.results["dev"]["heads"]
    names = [path.name for path in export(config, head="best", metric="auroc", out=str(tmp_path / "best"))]
    assert sorted(name.split("-")[0] for name in names) == ["drawn", "drawn+s", "fed", "fed+s"]
    for name in names:
        of_kind = [other for other in heads if other.split("-")[0] == name.split("-")[0]]
        assert name == max(of_kind, key=lambda other: heads[other]["auroc"])
    [path] = export(config, head="fed-d2-w6", out=str(tmp_path / "one"))
    assert path.name == "fed-d2-w6"
    with pytest.raises(ValueError, match="no head 'fed-d9-w6'"):
        export(config, head="fed-d9-w6", out=str(tmp_path))
    with pytest.raises(ValueError, match="metric 'luck' is unknown"):
        export(config, head="best", metric="luck", out=str(tmp_path))
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        export(make_config(tmp_path, tmp_path / "nowhere"))


def test_only_heads_that_beat_the_signal_of_their_own_timing_are_exported(trained: Run, tmp_path: Path, capsys):
    """In this run all but the paper's linear heads do, which let no such head through."""
    config, dev = trained.config, trained.results["dev"]
    kl = {name: head["calibrated_kl"] for name, head in dev["heads"].items()}
    alone = {timing: dev["signals"][timing]["logit_token_prob"]["calibrated_kl"] for timing in ("fed", "drawn")}
    refused = {name for name in kl if kl[name] >= alone[name.partition("-")[0].partition("+")[0]]}
    assert "fed-d0-w1" in refused
    assert {"fed-d2-w6", "drawn+s-d2-w1", "drawn-d0-w1"} <= kl.keys() - refused
    written = {path.name: AcceptanceHead.from_pretrained(path) for path in export(config, out=str(tmp_path / "all"))}
    assert written.keys() == kl.keys() - refused
    line = f"{len(refused)} of 16 heads do not beat the draft's own signal at their timing and are not exported"
    assert f"{line}: fed-d0-w1, " in capsys.readouterr().out
    for head in written.values():
        assert head.provenance.metrics["signal_kl"] == alone[head.timing]
        assert "`signal_kl` is that of sigmoid(a logit q(y) + b)" in str(head.generate_model_card())
    message = r"(?s)Best fed-time head on dev: .* Pass --force \(force=True in Python\) to .*: fed-d0-w1\.$"
    with pytest.raises(ValueError, match=message):
        export(config, head="fed-d0-w1", out=str(tmp_path / "worse"))
    assert not (tmp_path / "worse").exists()
    assert [path.name for path in export(config, head="fed-d0-w1", out=str(tmp_path / "worse"), force=True)]


class OfficialHead(nn.Module):
    """The official head: one residual block, D times; two logits."""

    def __init__(self, hidden_size: int, num_layers: int) -> None:
        super().__init__()
        block = nn.Module()
        block.linear, block.act = nn.Linear(hidden_size, hidden_size), nn.SiLU()
        block.forward = lambda x: x + block.act(block.linear(x))
        self.model = nn.Sequential(*([block] * num_layers), nn.Linear(hidden_size, 2))

    def check_equal(self, head: AcceptanceHead) -> None:
        hidden = torch.randn(7, 6)
        torch.testing.assert_close(head(hidden).sigmoid(), self.model(hidden).softmax(-1)[:, 1])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "official"


def write_official(path: Path, num_layers: int) -> OfficialHead:
    path.mkdir(parents=True)
    head = OfficialHead(6, num_layers)
    save_model(head, str(path / "model.safetensors"))
    (path / "config.json").write_text(json.dumps({"hidden_size": 6, "num_layers": num_layers}))
    return head


@pytest.mark.parametrize("num_layers", [0, 1, 3])
def test_imported_head_gives_the_official_probability(folder: Path, tmp_path: Path, num_layers: int, capsys):
    official = write_official(folder, num_layers)
    assert len(load_file(folder / "model.safetensors")) == 2 + 2 * min(num_layers, 1), "the block is stored once"
    config = make_config(tmp_path, tmp_path)
    path = import_(config, source=str(folder), out=str(tmp_path / "imported"), reject_weight=6.0)
    head = AcceptanceHead.from_pretrained(path)
    official.check_equal(head)
    assert len({block.weight.data_ptr() for block in head.blocks}) == num_layers, "blocks are no longer shared"
    assert (head.depth, head.provenance.reject_weight) == (num_layers, 6.0)
    facts = inspect(path=str(path))
    assert facts["num_layers"] == num_layers
    output = capsys.readouterr().out
    assert "Predicts, once the token has been fed to the draft, the probability" in output
    assert "none yet; run `acceptance-heads tune`" in output
    assert "{" not in output
    assert f"to {path}; next: acceptance-heads inspect --path {path}" in output
    inspect(path=str(path), json=True)
    assert json.loads(capsys.readouterr().out) == facts


@pytest.mark.parametrize("num_layers", [0, 1, 3])
def test_a_pickled_head_is_refused_and_the_remedy_works_as_printed(folder: Path, monkeypatch, num_layers: int):
    official = write_official(folder, num_layers)
    (folder / "model.safetensors").unlink()
    pickled = folder / "pytorch_model.bin"
    torch.save(official.state_dict(), pickled)
    with pytest.raises(ValueError, match=r"pytorch_model\.bin is a pickled checkpoint.*save_file") as refused:
        read_official_head(folder, Provenance())
    monkeypatch.chdir(folder)
    eval(str(refused.value).split("`")[1], {"safetensors": safetensors, "torch": torch, "path": pickled})
    official.check_equal(read_official_head(folder, Provenance()))


def test_an_import_overwrites_nothing_but_a_head(folder: Path, tmp_path: Path):
    write_official(folder, 1)
    mine, settings = tmp_path / "mine", {"config": make_config(tmp_path, tmp_path), "source": str(folder)}
    mine.mkdir()
    (mine / "thesis.tex").write_text("years of work")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for out in (mine, folder, mine / "thesis.tex"):
        with pytest.raises(ValueError, match="is not an exported head"):
            import_(**settings, out=str(out), reject_weight=6.0)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    for reject_weight in (6.0, 3.0):
        path = import_(**settings, out=str(tmp_path / "new"), reject_weight=reject_weight)
        assert AcceptanceHead.from_pretrained(path).provenance.reject_weight == reject_weight


def test_a_head_goes_to_the_hub_with_its_card_and_comes_back_and_what_is_not_there_or_broken_is_a_line(tmp_path, hub):
    path, repo = (
        save_whole(AcceptanceHead(6, 2, provenance=Provenance(reject_weight=6.0)), tmp_path / "head"),
        "a/head",
    )
    assert push(path=str(path), repo=repo) == f"https://huggingface.co/{repo}"
    files = {file.name: file.read_bytes() for file in path.iterdir()}
    assert {file.name: file.read_bytes() for file in (hub / repo).iterdir()} == files
    assert b"Acceptance-prediction head" in files["README.md"]
    ours, theirs = AcceptanceHead.from_pretrained(path), AcceptanceHead.from_pretrained(repo)
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=0, atol=0)
    assert inspect(path=repo)["reject_weight"] == 6.0
    with pytest.raises(FileNotFoundError, match=r"no head at 'no/such': .* \(404: no/such\); .* `hf auth login`"):
        AcceptanceHead.from_pretrained("no/such")
    (path / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(ValueError, match="not a complete safetensors"):
        push(path=str(path), repo="someone/broken")


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:9", "no-url"])
def test_a_hub_that_cannot_be_reached_is_a_line_with_the_repository_and_the_remedy(
    endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", endpoint)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    path = save_whole(AcceptanceHead(6, 2), tmp_path / "head")
    with pytest.raises(ValueError, match=r"head was not uploaded to a/head \(.*HF_ENDPOINT.*`hf auth login`"):
        push(path=str(path), repo="a/head")
    with pytest.raises(FileNotFoundError, match=r"no head at 'no/head'.* download from the hub failed"):
        AcceptanceHead.from_pretrained("no/head")
    assert released_layout_of(ModelSource(path="no/draft")) is None


def test_a_draft_that_always_agrees_leaves_nothing_to_predict(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config = make_config(write_data(tmp_path, is_exact=True), tmp_path / "run", timings=("fed", "drawn", "prefix"))
    train(config)
    sentences = [
        line for line in capsys.readouterr().out.splitlines() if line.startswith("There is nothing to predict")
    ]
    assert len(sentences) == 3
    assert all("is 1.000 at every token (a constant has KL 0)" in sentence for sentence in sentences)
    assert "nan" not in (tmp_path / "run" / "tables.md").read_text()
    with pytest.raises(ValueError, match=r"(?s)nothing to predict for drawn-time heads.* Pass --force"):
        export(config)
    paths = export(config, force=True)
    assert len(paths) == 12
    for path in paths:
        metrics = AcceptanceHead.from_pretrained(path).provenance.metrics
        assert all(map(math.isfinite, rank_of(metrics)))
