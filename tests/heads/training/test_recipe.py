"""Learning rate, epochs and features that follow from the data: what is chosen and printed; given values are kept."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from configs.schema import Config
from data_gen.pipeline import sizes
from data_gen.pipeline.command import make
from heads.batches.module import FeatureData
from heads.training.command import settled
from tests.toys.made_up import make_config


def left_open(data_dir: Path, run: Path, **heads) -> Config:
    config = make_config(data_dir, run, **{"learning_rate": None} | heads)
    return replace(config, trainer={name: value for name, value in config.trainer.items() if name != "max_epochs"})


def with_manifest(data_dir: Path, monkeypatch: pytest.MonkeyPatch, module: str, **draft) -> dict:
    """The data's manifest, which a module then reads from memory."""
    manifest = json.loads((data_dir / "manifest.json").read_text())
    manifest["draft"] |= draft
    monkeypatch.setattr(f"{module}.read_manifest", lambda *_, **__: manifest)
    return manifest


def test_the_rate_follows_from_the_width_and_few_responses_are_read_more_often(data_dir, tmp_path, capsys, monkeypatch):
    for batch_size, num_train, epochs in ((1, None, 7), (8, None, 30), (1, 4, 30), (1, 400, 7)):
        config = left_open(data_dir, tmp_path, batch_size=batch_size, num_train=num_train)  # 64 responses
        assert settled(config).trainer["max_epochs"] == epochs
        assert f"trainer.max_epochs {epochs} for {min(num_train or 64, 64)} responses" in capsys.readouterr().out
    for width, rate in ((16, 1e-2), (128, 1e-2), (576, 2.6e-3), (4096, 3.7e-4)):
        with_manifest(data_dir, monkeypatch, "heads.training.command", hidden_size=width)
        assert settled(left_open(data_dir, tmp_path)).heads.learning_rate == pytest.approx(rate)


def test_nothing_is_printed_if_everything_is_given_or_by_other_processes(data_dir, tmp_path, capsys, monkeypatch):
    config = make_config(data_dir, tmp_path)
    assert settled(config) == config
    steps = replace(left_open(data_dir, tmp_path, learning_rate=1e-3), trainer={"max_steps": 5})
    assert settled(steps).trainer == {"max_steps": 5}
    monkeypatch.setattr("heads.training.command.is_first_process", lambda: False)
    assert settled(left_open(data_dir, tmp_path)).trainer["max_epochs"]
    assert capsys.readouterr().out == ""
    for axis in ("timings", "depths", "reject_weights"):
        with pytest.raises(ValueError, match=f"heads.{axis} is empty"):
            settled(left_open(tmp_path / "no data", tmp_path, **{axis: ()}))


def test_features_follow_from_what_heads_read(tmp_path: Path):
    for timings, specdec, features in (
        (("drawn",), False, ("drawn",)),
        (("prefix", "candidate"), False, ("drawn",)),
        (("drawn",), True, ("fed", "drawn")),
        (("fed",), False, ("fed",)),
    ):
        config = make_config(tmp_path, tmp_path, timings=timings, specdec=specdec)
        data = replace(config.data, features=None)
        assert sizes.settled(data, config.heads).features == features
    (tmp_path / "manifest.json").write_text(json.dumps({"features": ["fed", "drawn"]}))
    assert sizes.settled(data, config.heads).features == ("fed", "drawn"), "a directory keeps what it was made with"


def test_features_that_lack_what_heads_read_are_refused_before_data_is_made(data_dir, tmp_path, monkeypatch):
    config = make_config(tmp_path / "data", tmp_path, timings=("drawn",), specdec=True)
    for given, complaint in (
        (("fed",), r"\[fed\], but heads\.timings \[drawn\] needs drawn features; remove data\.features"),
        (("drawn",), r"\[drawn\], but heads\.specdec needs fed features; .* choose heads\.specdec: false"),
    ):
        data = replace(config.data, features=given)
        with pytest.raises(ValueError, match=complaint):
            make(replace(config, data=data))
        assert not (tmp_path / "data" / "manifest.json").exists()
        assert sizes.settled(data, replace(config.heads, features="online")).features == given
    with_manifest(data_dir, monkeypatch, "heads.batches.module")["features"] = ["fed"]
    config = make_config(data_dir, tmp_path, timings=("drawn",))
    with pytest.raises(ValueError, match=r"made with fed features, .* need drawn features; .* without data\.features"):
        FeatureData(config.data, config.heads, pair=config.pair)
