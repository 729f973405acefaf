"""Data of a made-up pair: acceptance depends on the hidden state and on log q(y), so that heads learn."""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
import yaml
from safetensors.torch import save

from configs.command import run
from configs.schema import Config, DataConfig, HeadsConfig, ModelSource, PairConfig
from data_gen.responses.exchange import Exchange
from data_gen.store.rows import to_parquet
from heads.batches.module import FeatureData
from heads.training.command import train
from lm.signals import logit_of_log
from store.shards import read_sidecar, shard_path, sidecar_path, write_shard

HIDDEN = 16
SETTLED = {"split_weights": (40, 10, 2)}
"""What training settles of the data, so that a directory may be prepared without it."""
ROOT = Path(__file__).parents[2]
SLURM = {"SLURM_NTASKS": "1", "SLURM_NTASKS_PER_NODE": "1", "SLURM_JOB_ID": "4711", "SLURM_JOB_NAME": "train"}
SLURM |= dict.fromkeys(("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"), "0")
"""What srun sets for a job of one task."""


def write_features(
    directory: Path, split: str, index: int, *, num_rows: int, seed: int, is_exact: bool = False
) -> None:
    """Rows, labels and cached states of one shard, responses of 5 to 24 tokens; fed-time states are drawn-time ones and
    noise. An exact draft equals its target.
    """
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(5, 25, (num_rows,), generator=generator)
    direction = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(99))
    count = int(lengths.sum())
    hidden = torch.randn(count, HIDDEN, generator=generator)
    log_token_prob = -torch.rand(count, generator=generator) * 4
    prob = (hidden @ direction + 2 + log_token_prob).sigmoid()
    rate = (hidden @ direction).sigmoid()  # what a head that knows no token can say
    if is_exact:
        prob = torch.ones(count)
        rate = prob.clone()
    tensors = {
        "acceptance_prob": prob,
        "target_prob": prob * log_token_prob.exp(),
        "acceptance_rate": rate,
        "log_q": log_token_prob.clone(),
        "log_token_prob": log_token_prob,
        "logit_token_prob": logit_of_log(log_token_prob),
        "logit_max_prob": torch.rand(count, generator=torch.Generator().manual_seed(seed + 1000)) * 6 - 2,
        "entropy": torch.rand(count, generator=generator) * 3,
        "token": torch.randint(0, 50, (count,), generator=generator).int(),
        "is_drafted": torch.rand(count, generator=generator) > 0.15,
        "row_offsets": torch.cat([torch.zeros(1), lengths.cumsum(0)]).long(),
    }
    write_shard(shard_path(directory, "labels", split, index), save(tensors), rows=num_rows, tokens=count)
    exchanges = [Exchange(f"{split}-{index}-{row}", "", [1], [2] * n, "stop") for row, n in enumerate(lengths.tolist())]
    rows = to_parquet(exchanges, {"draft_ids": tensors["token"]})
    write_shard(shard_path(directory, "rows", split, index), rows, rows=num_rows, tokens=count)
    for timing, states in (("fed", hidden + 0.1 * torch.randn(hidden.shape, generator=generator)), ("drawn", hidden)):
        path = shard_path(directory, f"states/{timing}", split, index)
        write_shard(path, save({"hidden": states.bfloat16()}), rows=num_rows, tokens=count)
    set_keys(directory)


def set_keys(directory: Path) -> None:
    """Let the cached states be those of the rows that are there now."""
    for path in directory.glob("states/*/*.safetensors"):
        rows = read_sidecar(directory / "rows" / f"{path.stem}.parquet")["sha256"]
        key = {"rows_sha256": rows, "labels_sha256": None, "draft": {"dtype": "auto"}, "dtype": "bfloat16"}
        sidecar_path(path).write_text(json.dumps(read_sidecar(path) | {"key": key}))


def write_manifest(directory: Path) -> None:
    """What `data_gen` says about data, as far as heads read it."""
    model = {"revision": None, "commit": None, "weights": None, "dtype": "auto", "hidden_size": HIDDEN}
    manifest = {
        "target": {"name": "made-up/target", **model},
        "draft": {"name": "made-up/draft", **model},
        "sampling": {"temperature": 1.0, "top_k": None, "top_p": None},
        "mixing_ratio": 0.15,
        "mixes": 1,
        "prompts": "made-up",
        "recorded": {"target_path": "made-up/target", "draft_path": "made-up/draft"},
    }
    (directory / "manifest.json").write_text(json.dumps(manifest))


def write_data(directory: Path, *, is_exact: bool = False) -> Path:
    """Two training shards of 40 and 24 responses, one of dev, one of test."""
    for split, index, num_rows in (("train", 0, 40), ("train", 1, 24), ("dev", 0, 24), ("test", 0, 8)):
        write_features(directory, split, index, num_rows=num_rows, seed=len(split) * 10 + index, is_exact=is_exact)
    write_manifest(directory)
    return directory


def make_config(data_dir: Path, run_dir: Path, *, trainer: dict | None = None, **heads: object) -> Config:
    """A small sweep."""
    settings = {"depths": (0, 2), "reject_weights": (1.0, 6.0), "learning_rate": 1e-2, "batch_size": 8}
    settings |= {"timings": ("fed",), "scalars": (False,), "embeddings": (False,), "dropout": (0.0,)} | heads
    quiet = {"max_epochs": 2, "enable_progress_bar": False, "logger": False, "accelerator": "cpu"}
    return Config(
        pair=PairConfig(target=ModelSource(path="made-up/target"), draft=ModelSource(path="made-up/draft")),
        data=DataConfig(dir=str(data_dir), **SETTLED),  # type: ignore[arg-type]
        heads=HeadsConfig(dir=str(run_dir), **settings),  # type: ignore[arg-type]
        trainer=quiet | (trainer or {}),
    )


def feature_data(config: Config) -> FeatureData:
    """The data module of a config, ready to read batches."""
    data = FeatureData(config.data, config.heads, pair=config.pair)
    data.setup()
    return data


def write_yaml(config: Config, folder: Path) -> Path:
    """The YAML of a config."""
    values = asdict(config)
    values["data"] = {"dir": config.data.dir} | {name: list(value) for name, value in SETTLED.items()}
    values["heads"] = {k: list(v) if isinstance(v, tuple) else v for k, v in values["heads"].items()}
    del values["decode"], values["arguments"], values["is_step"]
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def command(config: Config, folder: Path) -> list[str]:
    """The command line that trains a config."""
    return [sys.executable, str(ROOT / "train.py"), "--config", str(write_yaml(config, folder))]


def environment(*folders: Path) -> dict[str, str]:
    """Of a process that runs `command`, and finds modules in some folders as well."""
    path = os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "heads", *folders)))
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}


def train_by_command(config, folder: Path, *flags: str) -> dict[str, Any]:
    """What `python train.py --config FILE FLAGS` returns, in this process."""
    argv = ["--config", str(write_yaml(config, folder)), *flags]
    return run({"train": train}, default="train", argv=argv, trainer=pl.Trainer)
