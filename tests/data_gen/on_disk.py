"""What a run leaves in its folder, and runs that end badly in a process of their own."""

import json
import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from configs.schema import Config, DataConfig, ModelSource, PairConfig
from data_gen.labels.states import StateTiming
from data_gen.pipeline.command import make
from data_gen.pipeline.share import Share
from data_gen.store.manifest import read_manifest
from data_gen.store.rows import POSITION_COLUMNS, read_rows
from heads.batches.features import FeatureShard
from heads.batches.states import States
from store.shards import list_shards


def toy_of(pair: Path, prompts: Path, directory: Path) -> Config:
    """Eight training and four test prompts in shards of three, ten tokens each."""
    target, draft = (ModelSource(path=str(pair / name)) for name in ("target", "draft"))
    sizes = {"num_train": 8, "num_dev": 0, "num_test": 4, "max_prompt_tokens": 60, "max_new_tokens": 10}
    sizes |= {"split_weights": (2, 0, 1), "rows_per_shard": 3, "batch_size": 2}
    data = DataConfig(dir=str(directory), prompts=str(prompts), **sizes)
    return Config(pair=PairConfig(target=target, draft=draft, num_threads=1), data=data)


def with_data(config: Config, **changes: Any) -> Config:
    """The config with other `data` settings."""
    return replace(config, data=replace(config.data, **changes))


def with_server(config: Config, **changes: Any) -> Config:
    """The config with other settings of its server."""
    return with_data(config, server=replace(config.data.server, **changes))


def write_lines(path: Path, records: Iterable[dict[str, Any]]) -> str:
    """The path of a JSONL file that is written with these records."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def with_prompts(config: Config, path: Path, records: Iterable[dict[str, Any]], **changes: Any) -> Config:
    """The config with these prompts, which become a file and are all for training."""
    return with_data(config, prompts=write_lines(path, records), split_weights=(1, 0, 0), **{"num_test": 0} | changes)


def files_of(directory: str | Path) -> dict[str, bytes]:
    """Every shard, sidecar and errors.jsonl."""
    paths = [path for path in Path(directory).rglob("*") if path.is_file() and path.name != "manifest.json"]
    return {str(path.relative_to(directory)): path.read_bytes() for path in paths}


def assert_as_at_once(config: Config) -> None:
    """The directory has the bytes of a run into another one, which nothing disturbed."""
    whole = with_data(config, dir=config.data.dir + "-whole")
    make(whole)
    assert files_of(config.data.dir) == files_of(whole.data.dir)


def hidden_states_of(config: Config, split: str, timing: StateTiming) -> list[torch.Tensor]:
    """The states of each shard of a split, which its cache is filled with."""
    heads = replace(config.heads, timings=(timing,), specdec=False)
    manifest = read_manifest(config.data.dir)
    states = States(config.pair, config.data, heads=heads, manifest=manifest)
    shards = [
        FeatureShard(labels, rows, states={timing: states.path(labels, timing)})
        for rows, labels in zip(
            list_shards(config.data.dir, split), list_shards(config.data.dir, split, "labels"), strict=True
        )
    ]
    states.fill(shards, Share(0, 1))
    return [load_file(states.folder(timing) / shard.labels.name)["hidden"] for shard in shards]


def rows_of(config: Config, split: str = "train") -> list[dict[str, Any]]:
    """All rows of a split."""
    return [row for path in list_shards(config.data.dir, split) for row in read_rows(path).to_pylist()]


def errors_of(config: Config) -> list[dict[str, Any]]:
    """The records of errors.jsonl."""
    return [json.loads(line) for line in Path(config.data.dir, "errors.jsonl").read_text().splitlines()]


def assert_same_rows(rows: list[dict[str, Any]], others: list[dict[str, Any]]) -> None:
    """The same prompts, ids and coins, and the same numbers up to rounding."""
    for row, other in zip(rows, others, strict=True):
        for name in row.keys() | other.keys():
            if name in POSITION_COLUMNS:
                torch.testing.assert_close(torch.tensor(row[name]), torch.tensor(other[name]), rtol=1e-4, atol=1e-4)
            else:
                assert row[name] == other[name]


def broken_copy(config: Config, model: str, folder: Path, weight: str, token: int) -> Config:
    """The config with a copy of one of its models in `folder`, which has NaN at one index of a weight."""
    source = getattr(config.pair, model)
    shutil.copytree(source.path, folder)
    weights = load_file(folder / "model.safetensors")
    weights[weight][token] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return replace(config, pair=replace(config.pair, **{model: replace(source, path=str(folder))}))


def with_a_draft_of_nan(config: Config, folder: Path) -> Config:
    """The config with a draft that has one weight that is no number."""
    return broken_copy(config, "draft", folder, "model.norm.weight", 0)


def flip(path: Path) -> None:
    """Change one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
