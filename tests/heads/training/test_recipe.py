"""The rule for rate and length of a training: what it chooses, that it says so, and that what is given stays."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from data_gen.pipeline import sizes
from data_gen.pipeline.command import make
from heads.batches.module import FeatureData
from heads.training.command import settled
from tests.toys.made_up import make_config


def left_open(data_dir: Path, run: Path, **heads):
    config = make_config(data_dir, run, **{"learning_rate": None} | heads)
    return replace(config, trainer={name: value for name, value in config.trainer.items() if name != "max_epochs"})


@pytest.mark.parametrize(("width", "rate"), [(16, 1e-2), (128, 1e-2), (576, 2.6e-3), (4096, 3.7e-4)])
def test_the_rate_goes_with_the_width(data_dir: Path, tmp_path: Path, width: int, rate: float, monkeypatch):
    manifest = json.loads((data_dir / "manifest.json").read_text())
    manifest["draft"]["hidden_size"] = width
    monkeypatch.setattr("heads.training.command.read_manifest", lambda *_, **__: manifest)
    assert settled(left_open(data_dir, tmp_path)).heads.learning_rate == pytest.approx(rate)


@pytest.mark.parametrize(("batch_size", "num_train", "epochs"), [(1, None, 7), (8, None, 30), (1, 4, 30), (1, 400, 7)])
def test_few_responses_are_read_more_often(data_dir: Path, tmp_path: Path, batch_size, num_train, epochs, capsys):
    config = left_open(data_dir, tmp_path, batch_size=batch_size, num_train=num_train)  # 64 responses
    assert settled(config).trainer["max_epochs"] == epochs
    assert f"trainer.max_epochs {epochs} for {min(num_train or 64, 64)} responses" in capsys.readouterr().out


def test_what_is_given_stays_and_nothing_is_said(data_dir: Path, tmp_path: Path, capsys):
    config = make_config(data_dir, tmp_path)
    assert settled(config) == config
    steps = replace(left_open(data_dir, tmp_path, learning_rate=1e-3), trainer={"max_steps": 5})
    assert settled(steps).trainer == {"max_steps": 5}
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("axis", ["timings", "depths", "reject_weights"])
def test_a_sweep_without_heads_is_refused_before_data_is_read(tmp_path: Path, axis: str):
    with pytest.raises(ValueError, match=f"heads.{axis} is empty"):
        settled(left_open(tmp_path / "no data", tmp_path, **{axis: ()}))


@pytest.mark.parametrize(
    ("timings", "specdec", "features"),
    [
        (("drawn",), False, ("drawn",)),
        (("prefix", "candidate"), False, ("drawn",)),
        (("drawn",), True, ("fed", "drawn")),
        (("fed",), False, ("fed",)),
    ],
)
def test_features_follow_from_what_heads_read(tmp_path: Path, timings, specdec, features):
    config = make_config(tmp_path, tmp_path, timings=timings, specdec=specdec)
    data = replace(config.data, features=None)
    assert sizes.settled(data, config.heads).features == features
    (tmp_path / "manifest.json").write_text(json.dumps({"features": ["fed", "drawn"]}))
    assert sizes.settled(data, config.heads).features == ("fed", "drawn"), "a directory keeps what it was made with"


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        (
            {"features": ("fed",)},
            r"\[fed\], but heads\.timings \[drawn\] needs drawn features; remove data\.features",
        ),
        (
            {"features": ("drawn",)},
            r"\[drawn\], but heads\.specdec needs fed features; .* choose heads\.specdec: false",
        ),
    ],
)
def test_chosen_features_that_lack_what_heads_read_are_refused_before_data_is_made(tmp_path: Path, given, complaint):
    config = make_config(tmp_path / "data", tmp_path, timings=("drawn",), specdec=True)
    data = replace(config.data, **given)
    with pytest.raises(ValueError, match=complaint):
        make(replace(config, data=data))
    assert not (tmp_path / "data" / "manifest.json").exists()
    assert sizes.settled(data, replace(config.heads, features="online")).features == given["features"]


def test_only_the_first_process_says_what_the_rule_chose(data_dir: Path, tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setattr("heads.training.command.is_first_process", lambda: False)
    assert settled(left_open(data_dir, tmp_path)).trainer["max_epochs"]
    assert capsys.readouterr().out == ""


def test_data_without_the_features_that_heads_read_is_refused_with_a_remedy(
    data_dir: Path, tmp_path: Path, monkeypatch
):
    manifest = json.loads((data_dir / "manifest.json").read_text()) | {"features": ["fed"]}
    monkeypatch.setattr("heads.batches.module.read_manifest", lambda *_, **__: manifest)
    config = make_config(data_dir, tmp_path, timings=("drawn",))
    with pytest.raises(ValueError, match=r"made with fed features, .* need drawn features; .* without data\.features"):
        FeatureData(config.data, config.heads, pair=config.pair)
