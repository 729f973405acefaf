"""Published data: rows, labels and manifest with a card, in a folder or on the hub; heads are trained on a copy."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from datasets import load_dataset
from huggingface_hub import DatasetCard

from configs.schema import Config
from data_gen.pipeline.command import make
from heads.batches.module import FeatureData
from heads.command import push
from store.shards import shard_path
from tests.data_gen.on_disk import files_of, flip, hidden_states_of, rows_of, with_data


@pytest.fixture
def whole(toy_config: Config) -> Config:
    config = with_data(toy_config, split_weights=(2, 1, 1), num_train=5, num_dev=3, num_test=2)
    make(config)
    hidden_states_of(config, "train", "drawn")
    return config


def test_pushed_data_has_rows_labels_and_a_card_that_datasets_reads(whole: Config, tmp_path: Path):
    address = push(path=whole.data.dir, repo=str(tmp_path / "copy"), license="cc-by-4.0")
    assert address == str(tmp_path / "copy")
    there, here = files_of(tmp_path / "copy"), files_of(whole.data.dir)
    assert there.keys() == {"README.md"} | {name for name in here if name.startswith(("rows/", "labels/"))}
    assert all(there[name] == here[name] for name in there if name != "README.md")
    card = DatasetCard.load(tmp_path / "copy" / "README.md")
    assert card.data.license == "cc-by-4.0"
    assert "| train | 5 | 50 | 0 |" in card.text
    assert "Acceptance of draft by target" in card.text
    assert "temperature 1.0" in card.text
    for text in (card.text, (tmp_path / "copy" / "manifest.json").read_text()):
        assert str(tmp_path) not in text.replace(str(tmp_path / "copy"), "")
    loaded = load_dataset(str(tmp_path / "copy"), cache_dir=str(tmp_path / "cache"))
    assert {split: rows.num_rows for split, rows in loaded.items()} == {"train": 5, "validation": 3, "test": 2}
    assert loaded["train"]["response_ids"] == [row["response_ids"] for row in rows_of(whole)]


def test_hidden_states_follow_from_a_copy_alone(whole: Config, tmp_path: Path):
    push(path=whole.data.dir, repo=str(tmp_path / "copy"))
    assert "License: not stated" in (tmp_path / "copy" / "README.md").read_text()
    elsewhere = replace(whole, data=replace(whole.data, dir=str(tmp_path / "copy"), prompts="gone.jsonl"))
    FeatureData(elsewhere.data, elsewhere.heads, pair=elsewhere.pair).setup()
    states = Path("states", "drawn", "train-00001.safetensors")
    assert (tmp_path / "copy" / states).read_bytes() == Path(whole.data.dir, states).read_bytes()


def test_damaged_data_data_without_rows_and_a_hub_that_cannot_be_reached_are_refused_in_one_line(
    whole: Config, tmp_path: Path
):
    with pytest.raises(ValueError, match=r"was not uploaded to a/data \(.*check the repository's name, the network"):
        push(path=whole.data.dir, repo="a/data")
    flip(shard_path(whole.data.dir, "labels", "train", 0))
    with pytest.raises(ValueError, match=r"labels/train-00000\.safetensors is corrupted"):
        push(path=whole.data.dir, repo=str(tmp_path / "copy"))
    assert not (tmp_path / "copy").exists()
    (tmp_path / "none").mkdir()
    manifest = json.loads(Path(whole.data.dir, "manifest.json").read_text())
    (tmp_path / "none" / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="has no rows to publish"):
        push(path=str(tmp_path / "none"), repo=str(tmp_path / "copy"))
