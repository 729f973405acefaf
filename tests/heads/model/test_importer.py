"""`import` of a released SpecDec++ head: written by the official module, read as one logit, equal outputs."""

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
from safetensors.torch import load_file, save_file, save_model
from torch import nn

from heads import AcceptanceHead, Provenance
from heads.command import import_, inspect
from heads.model.official import read_official_head
from tests.toys.made_up import make_config


class OfficialBlock(nn.Module):
    """The official residual block."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(hidden_size, hidden_size), nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.act(self.linear(x))


class OfficialHead(nn.Module):
    """The official head: one block, D times; two logits."""

    def __init__(self, hidden_size: int, num_layers: int) -> None:
        super().__init__()
        self.model = nn.Sequential(*([OfficialBlock(hidden_size)] * num_layers), nn.Linear(hidden_size, 2))


def write_official(path: Path, num_layers: int) -> OfficialHead:
    path.mkdir(parents=True)
    head = OfficialHead(6, num_layers)
    save_model(head, str(path / "model.safetensors"))
    (path / "config.json").write_text(json.dumps({"hidden_size": 6, "num_layers": num_layers}))
    return head


def check_equal(head: AcceptanceHead, official: OfficialHead) -> None:
    hidden = torch.randn(7, 6)
    torch.testing.assert_close(head.raw(head(hidden)), official.model(hidden).softmax(-1)[:, 1])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "official"


@pytest.mark.parametrize("num_layers", [0, 1, 3])
def test_imported_head_gives_the_official_probability(folder: Path, tmp_path: Path, num_layers: int, capsys):
    official = write_official(folder, num_layers)
    assert len(load_file(folder / "model.safetensors")) == 2 + 2 * min(num_layers, 1), "the block is stored once"
    config = make_config(tmp_path, tmp_path)
    path = import_(config, source=str(folder), out=str(tmp_path / "imported"), reject_weight=6.0)
    head = AcceptanceHead.from_pretrained(path)
    check_equal(head, official)
    assert len({block.weight.data_ptr() for block in head.blocks}) == num_layers, "blocks are no longer shared"
    assert (head.depth, head.provenance.reject_weight) == (num_layers, 6.0)
    facts = inspect(path=str(path))
    assert (facts["num_layers"], next(iter(facts)), *list(facts)[-2:]) == (num_layers, "timing", "draft", "target")
    output = capsys.readouterr().out
    assert "Predicts, once the token has been fed to the draft, the probability" in output
    assert "none yet; run `acceptance-heads tune`" in output
    assert "{" not in output
    assert f"to {path}; next: acceptance-heads inspect --path {path}" in output
    inspect(path=str(path), json=True)
    assert json.loads(capsys.readouterr().out) == facts


def test_a_missing_alias_can_only_mean_the_shared_block(folder: Path):
    official = write_official(folder, 3)
    path = folder / "model.safetensors"
    save_file({name: tensor.clone() for name, tensor in load_file(path).items()}, path)
    check_equal(read_official_head(path, Provenance()), official)


@pytest.mark.parametrize(
    ("dtype", "hidden_size", "message"),
    [
        (torch.int64, 6, "has dtype torch.int64"),
        (torch.float32, 2**62, "no tensor of model.safetensors has that width"),
    ],
)
def test_official_weights_that_are_not_floats_or_of_another_width_are_refused(folder, dtype, hidden_size, message):
    write_official(folder, 1)
    tensors = {name: tensor.to(dtype, copy=True) for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"hidden_size": hidden_size, "num_layers": 1}))
    with pytest.raises(ValueError, match=message):
        read_official_head(folder, Provenance())


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
    check_equal(read_official_head(folder, Provenance()), official)


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
