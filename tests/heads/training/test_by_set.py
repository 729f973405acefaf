"""Metrics by set of prompts: parts of the whole, whose mean it is."""

import io
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from heads.training.command import train
from store.shards import rows_path, write_shard
from tests.toys.made_up import make_config, write_data


@pytest.fixture
def two_sets(tmp_path: Path) -> Path:
    """Dev and test of two sets, one three times as large as the other."""
    directory = write_data(tmp_path / "data")
    for split, num in (("dev", 24), ("test", 8)):
        sink = io.BytesIO()
        pq.write_table(pa.table({"set": ["large" if row % 4 else "small" for row in range(num)]}), sink)
        write_shard(rows_path(directory, split, 0), sink.getvalue(), rows=num, tokens=0)
    manifest = json.loads((directory / "manifest.json").read_text())
    (directory / "manifest.json").write_text(json.dumps(manifest | {"prompts": ["small", "large"]}))
    return directory


@pytest.mark.slow
def test_the_metrics_of_a_split_are_the_means_of_those_of_its_sets(two_sets: Path, tmp_path: Path):
    config = make_config(two_sets, tmp_path / "run", trainer={"max_epochs": 1}, timings=("fed", "drawn"))
    results = train(config)
    assert list(results) == ["dev", "train", "test", "dev/large", "dev/small", "test/large", "test/small"]
    for split in ("dev", "test"):
        parts = [results[f"{split}/{name}"] for name in ("large", "small")]
        for timing in ("fed", "drawn"):
            tokens = [part["labels"][timing]["num_tokens"] for part in parts]
            assert sum(tokens) == results[split]["labels"][timing]["num_tokens"]
            for name, whole in results[split]["heads"].items():
                if name.startswith(timing):
                    mean = sum(
                        n * part["heads"][name]["calibrated_kl"] for n, part in zip(tokens, parts, strict=True)
                    ) / sum(tokens)
                    assert mean == pytest.approx(whole["calibrated_kl"], abs=1e-5)
    assert parts[0]["labels"] != parts[1]["labels"]
    assert "| dev/small |" in (tmp_path / "run" / "tables.md").read_text()


def test_a_run_over_one_set_has_no_parts(data_dir: Path, tmp_path: Path):
    assert list(train(make_config(data_dir, tmp_path / "run", trainer={"max_epochs": 1}))) == ["dev", "train", "test"]
    assert "by set" not in (tmp_path / "run" / "tables.md").read_text()
