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


@pytest.mark.parametrize("num_layers", [0, 1, 3])
def test_imported_head_gives_the_official_probability(tmp_path: Path, num_layers: int, capsys):
    official, hidden = write_official(tmp_path / "official", num_layers), torch.randn(7, 6)
    assert len(load_file(tmp_path / "official" / "model.safetensors")) == 2 + 2 * min(num_layers, 1), (
        "the shared block is stored once"
    )
    path = import_(
        make_config(tmp_path, tmp_path),
        source=str(tmp_path / "official"),
        out=str(tmp_path / "imported"),
        reject_weight=6.0,
    )
    head = AcceptanceHead.from_pretrained(path)
    torch.testing.assert_close(head.raw(head(hidden)), official.model(hidden).softmax(-1)[:, 1])
    assert (head.depth, head.provenance.reject_weight) == (num_layers, 6.0)
    facts = inspect(path=str(path))
    assert facts["num_layers"] == num_layers
    assert next(iter(facts)) == "timing"
    assert list(facts)[-2:] == ["draft", "target"], "hashes stand last"
    shown = capsys.readouterr().out
    assert "Predicts, once the token has been fed to the draft, the probability" in shown
    assert "none yet; run `acceptance-heads tune`" in shown
    assert "{" not in shown
    assert f"to {path}; next: acceptance-heads inspect --path {path}" in shown
    inspect(path=str(path), json=True)
    assert json.loads(capsys.readouterr().out) == facts


def test_unrolled_blocks_are_no_longer_shared(tmp_path: Path):
    write_official(tmp_path / "official", 3)
    head = read_official_head(tmp_path / "official", Provenance())
    assert len({block.weight.data_ptr() for block in head.blocks}) == 3


def test_a_missing_alias_can_only_mean_the_shared_block(tmp_path: Path):
    official = write_official(tmp_path / "official", 3)
    path = tmp_path / "official" / "model.safetensors"
    save_file({name: tensor.clone() for name, tensor in load_file(path).items()}, path)
    hidden = torch.randn(7, 6)
    head = read_official_head(path, Provenance())
    torch.testing.assert_close(head.raw(head(hidden)), official.model(hidden).softmax(-1)[:, 1])


@pytest.mark.parametrize(
    ("dtype", "hidden_size", "says"),
    [
        (torch.int64, 6, "has dtype torch.int64"),
        (torch.float32, 2**62, "no tensor of model.safetensors has that width"),
    ],
)
def test_official_weights_that_are_no_floats_or_of_another_width_are_refused(tmp_path, dtype, hidden_size, says):
    write_official(tmp_path / "official", 1)
    path = tmp_path / "official" / "model.safetensors"
    save_file({name: tensor.to(dtype) for name, tensor in load_file(path).items()}, tmp_path / "other")
    (tmp_path / "other").rename(path)
    (path.parent / "config.json").write_text(json.dumps({"hidden_size": hidden_size, "num_layers": 1}))
    with pytest.raises(ValueError, match=says):
        read_official_head(path.parent, Provenance())


def test_a_pickled_official_head_is_refused_with_the_remedy(tmp_path: Path):
    official = write_official(tmp_path / "official", 1)
    (tmp_path / "official" / "model.safetensors").unlink()
    torch.save(official.state_dict(), tmp_path / "official" / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin is a pickled checkpoint.*save_file"):
        read_official_head(tmp_path / "official", Provenance())


@pytest.mark.parametrize("num_layers", [0, 1, 3])
def test_the_remedy_for_a_pickle_works_as_printed(tmp_path: Path, monkeypatch, num_layers: int):
    official, hidden = write_official(tmp_path / "official", num_layers), torch.randn(7, 6)
    (tmp_path / "official" / "model.safetensors").unlink()
    pickled = tmp_path / "official" / "pytorch_model.bin"
    torch.save(official.state_dict(), pickled)
    with pytest.raises(ValueError, match="pickled") as refused:
        read_official_head(tmp_path / "official", Provenance())
    monkeypatch.chdir(tmp_path / "official")
    eval(str(refused.value).split("`")[1], {"safetensors": safetensors, "torch": torch, "path": pickled})
    head = read_official_head(tmp_path / "official", Provenance())
    torch.testing.assert_close(head.raw(head(hidden)), official.model(hidden).softmax(-1)[:, 1])


def test_an_import_destroys_nothing_but_a_head(tmp_path: Path):
    write_official(tmp_path / "official", 1)
    mine, how = tmp_path / "mine", {"source": str(tmp_path / "official")}
    mine.mkdir()
    (mine / "thesis.tex").write_text("years of work")
    for out in (mine, tmp_path / "official", mine / "thesis.tex"):
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        with pytest.raises(ValueError, match="is not an exported head"):
            import_(make_config(tmp_path, tmp_path), **how, out=str(out), reject_weight=6.0)
        assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    for reject_weight in (6.0, 3.0):
        path = import_(make_config(tmp_path, tmp_path), **how, out=str(tmp_path / "new"), reject_weight=reject_weight)
        assert AcceptanceHead.from_pretrained(path).provenance.reject_weight == reject_weight
