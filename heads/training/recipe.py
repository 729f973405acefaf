"""Default learning rate and number of epochs, where the config sets none.

SpecDec++ trains for three epochs at 5e-5, on millions of tokens at width 4096. For a few hundred responses of a small
draft that is far too little (AUROC 0.5). Adam changes each weight by about the learning rate per step and a head of
width d sums d of them, so the rate is proportional to 1 / d. Small data sets are read for more epochs.
"""

import math
from dataclasses import replace
from pathlib import Path

from configs.schema import Config
from data_gen.pipeline import sizes
from data_gen.store.manifest import read_manifest
from heads.batches.features import FEATURE_SETS
from heads.batches.module import is_first_process
from heads.grid import grid
from store.shards import list_shards, read_sidecar

_RATE_TIMES_WIDTH = 1.5
_HIGHEST_RATE = 1e-2
_STEPS = 400
"""Optimiser steps that suffice at that rate."""
_EPOCHS = (3, 30)
"""Minimum (the paper's) and maximum."""


def settled(config: Config) -> Config:
    """The experiment with defaults filled in for learning rate, epochs and data sizes; prints the chosen values.

    Raises:
        FileNotFoundError: no data to train on.
    """
    grid(config.heads)  # report invalid settings before any data is read
    manifest = read_manifest(config.data.dir, keys=("draft",))
    heads, trainer, choices = config.heads, dict(config.trainer), []
    if heads.learning_rate is None:
        width = manifest["draft"]["hidden_size"]
        heads = replace(heads, learning_rate=min(_HIGHEST_RATE, float(f"{_RATE_TIMES_WIDTH / width:.2g}")))
        choices.append(f"heads.learning_rate {heads.learning_rate:g} for a draft of width {width:,}")
    if trainer.get("max_epochs") is None and trainer.get("max_steps", -1) in (None, -1):
        num = _num_responses(config)
        trainer["max_epochs"] = epochs_of(num, heads.batch_size)
        choices.append(f"trainer.max_epochs {trainer['max_epochs']} for {num:,} responses")
    if choices and is_first_process():
        print(f"chosen automatically: {', '.join(choices)}")
    return replace(config, data=sizes.settled(config.data, heads), heads=heads, trainer=trainer)


def epochs_of(num_responses: int, batch_size: int) -> int:
    """Epochs that give about `_STEPS` optimiser steps."""
    return min(max(math.ceil(_STEPS * batch_size / max(1, num_responses)), _EPOCHS[0]), _EPOCHS[1])


def _num_responses(config: Config) -> int:
    """Number of training responses."""
    data, heads = config.data, config.heads
    feature_set = next(FEATURE_SETS[timing] for timing in heads.timings)
    has_rows = (Path(data.dir) / "rows").is_dir()
    paths = list_shards(data.dir, "train", None if has_rows else feature_set)
    num_rows = sum(read_sidecar(path, keys=("rows",))["rows"] for path in paths)
    num = num_rows if has_rows or feature_set != "fed" else num_rows // data.mixes
    return max(1, num if heads.num_train is None else min(num, heads.num_train))
