"""What a model is: all of its weights, hashed once; and what older descriptions still recognise."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from configs.schema import ModelSource
from data_gen.store import identity
from data_gen.store.identity import describe_model, same_model


@pytest.fixture
def model(tmp_path, monkeypatch) -> tuple[ModelSource, Callable[[], None]]:
    """A directory with 4 MiB of weights, and a function that changes one number in their middle."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(identity, "_LARGE_BYTES", 1)
    LlamaConfig(hidden_size=64).save_pretrained(tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    save_file({"weight": torch.zeros(2**20)}, path)

    def change() -> None:
        weights = load_file(path)["weight"].clone()
        weights[2**19] += 1
        save_file({"weight": weights}, path)

    return ModelSource(path=str(path.parent)), change


def test_one_changed_weight_anywhere_is_another_model_and_a_large_file_is_hashed_once(model, tmp_path, monkeypatch):
    source, change = model
    before = describe_model(source)
    with monkeypatch.context() as patch:
        patch.setattr(identity, "sha256_of", lambda path: "hashed again")
        assert describe_model(source) == before
    change()
    after = describe_model(source)
    assert after["weights"] != before["weights"]
    assert same_model(before, after) is False
    assert same_model({"weights": after["weights"]}, after) is True
    assert same_model({"commit": None}, after) is None
    (tmp_path / "cache" / "acceptance-heads" / "sha256.json").write_text("{")
    assert describe_model(source) == after, "a broken cache is only slower"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "model" / "config.json"))
    assert describe_model(source) == after, "so is a home that cannot be written to"


def test_a_config_that_decides_logits_is_compared_and_its_version_is_not(model):
    source, _ = model
    before = describe_model(source)["config"]
    path = Path(source.path) / "config.json"
    path.write_text(re.sub('"transformers_version": ".*?"', '"transformers_version": "0"', path.read_text()))
    assert describe_model(source)["config"] == before
    LlamaConfig(hidden_size=64, rms_norm_eps=0.1).save_pretrained(source.path)
    assert describe_model(source)["config"] != before


def test_a_feature_draft_is_described_though_transformers_knows_not_its_layout(tmp_path):
    layout = '{"speculators_model_type": "eagle3", "transformer_layer_config": {"hidden_size": 24}}'
    (tmp_path / "config.json").write_text(layout)
    save_file({"fc.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    described = describe_model(ModelSource(path=str(tmp_path)))
    assert described["hidden_size"] == 24
    assert described["weights"]
