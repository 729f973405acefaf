"""What a run leaves in its folder, and runs that end badly in a process of their own."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from configs.schema import Config
from data_gen.store.rows import POSITION_COLUMNS, read_rows
from store.shards import list_shards


def files_of(directory: str | Path) -> dict[str, bytes]:
    """Every shard, sidecar and errors.jsonl."""
    paths = [path for path in Path(directory).rglob("*") if path.is_file() and path.name != "manifest.json"]
    return {str(path.relative_to(directory)): path.read_bytes() for path in paths}


def rows_of(config) -> list[dict]:
    """All training rows of a run."""
    return [row for path in list_shards(config.data.dir, "train") for row in read_rows(path).to_pylist()]


def assert_same_rows(rows, others):
    """The same prompts, ids and coins, and the same numbers up to rounding."""
    for row, other in zip(rows, others, strict=True):
        assert {name: row[name] for name in row if name not in POSITION_COLUMNS} == {
            name: other[name] for name in other if name not in POSITION_COLUMNS
        }
        for name in POSITION_COLUMNS:
            torch.testing.assert_close(torch.tensor(row[name]), torch.tensor(other[name]), rtol=1e-4, atol=1e-4)


def with_a_draft_of_nan(config: Config, directory: Path) -> Config:
    """The config with a copy of its draft in `directory`, which has one weight that is no number."""
    shutil.copytree(config.pair.draft.path, directory)
    weights = load_file(directory / "model.safetensors")
    weights["model.norm.weight"][0] = float("nan")
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return replace(config, pair=replace(config.pair, draft=replace(config.pair.draft, path=str(directory))))


def in_a_child(work) -> int:
    """The wait status of a forked child that does `work` (forked, because importing torch anew takes seconds)."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        except SystemExit as end:
            status = int(end.code)  # type: ignore[arg-type]
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1]
