"""The model card: its code runs, its figures are those of the run, and it names no path of this machine."""

import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard

from configs.schema import Config, ModelSource
from data_gen.store.manifest import describe_model
from heads import AcceptanceHead, Provenance
from heads.command import export, import_, push, save_whole
from heads.model.head import update_config
from heads.model.published import portable
from heads.training.command import train
from tests.heads.conftest import Run
from tests.toys.made_up import make_config, write_data

ROOT = Path(__file__).parents[3]
PATHS = {name: f"checkpoints/tiny/{name}" for name in ("target", "draft")}
TINY = {name: {"path": path, **describe_model(ModelSource(path=str(ROOT / path)))} for name, path in PATHS.items()}
SAMPLED = {"temperature": 0.7, "top_k": None, "top_p": 0.9}


def code_of(card: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", card, flags=re.DOTALL)


@pytest.mark.parametrize(
    ("timing", "scalars", "embedding", "sampling", "template", "recommended"),
    [
        ("drawn", True, False, SAMPLED, "chat", {"max_rejection_prob": 0.3, "is_calibrated": True}),
        ("drawn", False, True, SAMPLED | {"temperature": 0.0, "top_p": None}, "plain", {}),
        ("prefix", True, False, SAMPLED | {"top_k": 20}, "chat", {}),
        ("fed", False, False, {}, None, {}),
    ],
)
def test_the_code_of_a_card_runs(
    timing, scalars, embedding, sampling, template, recommended, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(ROOT)
    training = {"template": template} if template else {}
    facts = {"sampling": sampling, "training": training, "recommended": recommended, **TINY}
    head = AcceptanceHead(96, 0, timing, scalars, embedding, provenance=Provenance(**facts))
    head.save_pretrained(tmp_path)
    decoding, scoring = code_of((tmp_path / "README.md").read_text())
    assert ("0.4" in decoding) == (not recommended)
    names: dict[str, Any] = {"hidden": torch.randn(5, 96), "embedding": torch.randn(5, 96)}
    names["scalars"] = torch.randn(5, len(head.inputs.scalars))
    for code in (decoding, scoring):
        exec(code.replace("this-directory", str(tmp_path)), names)
    assert len(capsys.readouterr().out) > 20
    assert names["output"].shape[1] > names["inputs"]["input_ids"].shape[1]
    assert ((names["probability"] > 0) & (names["probability"] < 1)).all()


@pytest.mark.parametrize(("timing", "training"), [("candidate", {}), ("drawn", {"draft_length": 5})])
def test_a_head_that_transformers_cannot_use_has_the_command_instead(timing, training):
    provenance = Provenance(training=training, **TINY)
    card = str(AcceptanceHead(96, 0, timing, provenance=provenance).generate_model_card())
    assert "acceptance-heads generate --config experiment.yaml" in card
    assert ("--tree eagle2" in card) == (timing == "candidate")
    assert len(code_of(card)) == 1


def test_a_card_has_both_splits_with_intervals_and_the_lead_over_the_signal_and_the_recipe(trained: Run, tmp_path):
    [path] = export(trained.config, head="drawn+s-d2-w6", out=str(tmp_path), force=True)
    card = (path / "README.md").read_text()
    table = {
        cells[0].strip("`"): cells[1:]
        for cells in (re.split(r" \| ", line.strip("| ")) for line in card.splitlines() if line.startswith("| "))
    }
    assert "| | dev | test |" in card
    for column, split in enumerate(("dev", "test")):
        result = trained.results[split]
        head, labels = result["heads"][path.name], result["labels"]["drawn"]
        signal = result["signals"]["drawn"]["logit_token_prob"]["calibrated_kl"]
        low, high = head["kl_interval"]
        has_interval = split == "dev"  # test has 8 responses
        interval = f" ({low:.4f}, {high:.4f})" if has_interval else ""
        assert table["calibrated_kl"][column] == f"{head['calibrated_kl']:.4f}{interval}"
        assert table["signal_kl"][column] == f"{signal:.4f}"
        assert table["auroc"][column] == f"{head['auroc']:.4f}"
        assert table["num_tokens"][column] == f"{labels['num_tokens']:,.0f}"
        assert table["lead"][column].startswith(f"{head['lead']:.1%}")
        assert head["lead"] == pytest.approx(1 - head["calibrated_kl"] / signal, abs=1e-4)
        if has_interval:
            assert low < head["calibrated_kl"] < high
            assert head["lead_interval"][0] < head["lead"] < head["lead_interval"][1]
    assert [cells[0] for name, cells in table.items() if name == "num_responses"] == ["24"]
    assert re.search(r"- date: 20\d\d-\d\d-\d\d\n", card)
    assert re.search(r"- versions: python 3\.\d+.*, torch \d.*, transformers \d", card)
    config = json.loads((path / "config.json").read_text())
    assert config["metrics"]["test"]["calibrated_kl"] == trained.results["test"]["heads"][path.name]["calibrated_kl"]
    update_config(path, recommended={"max_rejection_prob": 0.25, "is_calibrated": True, "gain": [0.1, 0.05, 0.152]})
    tuned = (path / "README.md").read_text()
    assert "max_rejection_prob 0.25, on the calibrated probability" in tuned
    assert "On test prompts it gains +10.0 % (5.0, 15.2) over the best fixed length" in tuned
    assert "HeadPolicy.from_pretrained(path)" in tuned
    assert table["calibrated_kl"][0] in tuned


def written_under(folder: Path) -> dict[str, str]:
    """Every text that export wrote."""
    return {path.name: path.read_text() for path in folder.rglob("*") if path.suffix in (".json", ".md")}


def with_local_draft(folder: Path) -> Config:
    """A made-up experiment whose models are directories with absolute paths, and whose draft has a model card."""
    draft = folder / "models" / "my-draft"
    draft.mkdir(parents=True)
    (draft / "README.md").write_text("---\nlicense: mit\n---\n# A draft\n")
    write_data(folder / "data")
    manifest = json.loads((folder / "data" / "manifest.json").read_text())
    manifest["recorded"] = {"draft_path": str(draft), "target_path": str(folder / "models" / "my-target")}
    manifest["prompts"] = str(folder / "prompts.jsonl")
    (folder / "data" / "manifest.json").write_text(json.dumps(manifest))
    return make_config(folder / "data", folder / "run", trainer={"max_epochs": 1})


def test_no_file_of_a_head_names_a_path_of_this_machine_and_the_license_is_the_draft_s(tmp_path: Path):
    config = with_local_draft(tmp_path)
    train(config)
    path, *_ = export(config, force=True)
    update_config(path, recommended={"max_rejection_prob": 0.2, "is_calibrated": True, "from": f"{tmp_path}/run"})
    imported = import_(
        replace(config, pair=replace(config.pair, draft=replace(config.pair.draft, path=str(tmp_path / "elsewhere")))),
        source=str(official_head(tmp_path / "official")),
        out=str(tmp_path / "imported"),
        reject_weight=6.0,
    )
    texts = written_under(path.parent) | {f"imported {name}": text for name, text in written_under(imported).items()}
    assert {"config.json", "README.md", "heads.json", "imported config.json", "imported README.md"} <= set(texts)
    assert [name for name, text in texts.items() if str(tmp_path) in text or "../" in text] == []
    written = json.loads((path / "config.json").read_text())
    assert (written["draft"]["path"], written["target"]["path"]) == ("my-draft", "my-target")
    assert written["training"]["prompts"] == "prompts.jsonl"
    assert written["license"] == "mit"
    metadata = ModelCard.load(path / "README.md").data
    assert (metadata.license, metadata.base_model) == ("mit", None)
    head = AcceptanceHead.from_pretrained(path)
    assert asdict(head.provenance)["draft"]["path"] == "my-draft"


def test_a_path_inside_any_value_is_written_as_its_name():
    values = {"prompts": [{"path": "/data/a b.jsonl", "weight": 2}, ("~/b.jsonl", "../c.jsonl")], "hub": "org/model"}
    expected = {"prompts": [{"path": "a b.jsonl", "weight": 2}, ["b.jsonl", "c.jsonl"]], "hub": "org/model"}
    assert portable(values) == expected


def official_head(folder: Path) -> Path:
    """A released SpecDec++ head of one block."""
    from safetensors.torch import save_file

    folder.mkdir()
    tensors = {"model.0.linear.weight": torch.zeros(16, 16), "model.0.linear.bias": torch.zeros(16)}
    tensors |= {"model.1.weight": torch.zeros(2, 16), "model.1.bias": torch.zeros(2)}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"hidden_size": 16, "num_layers": 1}))
    return folder


def test_a_pushed_card_has_the_license_and_names_the_draft_on_the_hub_as_its_base_model(tmp_path, hub):
    draft = {"path": "org/draft", "name": "org/draft", "commit": "a" * 40, "revision": None}
    target = {"path": "/models/target", "name": "target"}
    old = save_whole(AcceptanceHead(6, 0, provenance=Provenance(draft=draft, target=target)), tmp_path / "head")
    config = json.loads((old / "config.json").read_text())
    config["target"]["path"] = "/models/target"  # as version 0.2.0 wrote it
    (old / "config.json").write_text(json.dumps(config))
    for license, expected in ((None, None), ("apache-2.0", "apache-2.0")):
        push(path=str(old), repo="a/head", license=license)
        pushed = ModelCard.load(hub / "a/head" / "README.md")
        assert (pushed.data.license, pushed.data.base_model) == (expected, "org/draft")
        assert ("not stated" in pushed.text) == (license is None)
        assert "/models" not in pushed.text + (hub / "a/head" / "config.json").read_text()


@pytest.mark.parametrize(
    "path", sorted(ROOT.glob("checkpoints/**/heads/*/config.json")), ids=lambda path: path.parent.name
)
def test_shipped_heads_have_the_card_of_their_config_whose_code_runs_and_a_license(path: Path):
    head = AcceptanceHead.from_pretrained(path.parent)
    assert path.with_name("README.md").read_text() == str(head.generate_model_card())
    assert head.provenance.license == "cc-by-nc-4.0"
    is_feature_draft = "smollm2" in str(path)
    *decoding, scoring = code_of(path.with_name("README.md").read_text())
    assert bool(decoding) != is_feature_draft
    names = {name: torch.randn(5, head.hidden_size) for name in ("hidden", "embedding")}
    names["scalars"] = torch.randn(5, len(head.inputs.scalars))
    exec(scoring.replace("this-directory", str(path.parent)), names)
    assert names["probability"].shape == (5,)


def test_a_card_explains_only_what_it_has():
    metrics = {"calibrated_kl": 0.2, "auroc": 0.9}
    facts = {"sampling": SAMPLED, **TINY}
    card = str(AcceptanceHead(96, 0, "drawn", provenance=Provenance(metrics=metrics, **facts)).generate_model_card())
    assert "- sampling: temperature 0.7, top_p 0.9\n" in card
    for absent in ("None", "intervals", "signal_kl", "lead", "train_raw_kl"):
        assert absent not in card
    full = {**metrics, "kl_interval": [0.1, 0.3], "signal_kl": 0.3, "lead": 0.33, "train_raw_kl": 0.4}
    card = str(AcceptanceHead(96, 0, "drawn", provenance=Provenance(metrics=full, **facts)).generate_model_card())
    for present in ("95 % intervals", "`signal_kl` is", "`lead`: how", "`train_raw_kl`: on"):
        assert present in card
