"""The rate and the length of a training, by rule, where the YAML leaves them open.

SpecDec++ trains for three epochs at 5e-5: millions of tokens, a width of 4096. With some hundred responses of a small
draft that moves a head nowhere (AUROC 0.5). Adam moves each weight by about the rate per step, and a head of width d
adds d of them up, so the rate goes with 1 / d; and few responses are read more often, up to where the best weights on
dev (`heads.select`) no longer get better.
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
"""The fewest, which are the paper's, and the most."""


def settled(config: Config) -> Config:
    """The experiment with a learning rate and a number of epochs, and with the sizes of its data; says which rate and
    number were chosen, and how to choose others.

    Raises:
        FileNotFoundError: no data to train on.
    """
    grid(config.heads)  # what no sweep can be is refused before any data is read
    manifest = read_manifest(config.data.dir, keys=("draft",))
    heads, trainer, chosen = config.heads, dict(config.trainer), []
    if heads.learning_rate is None:
        width = manifest["draft"]["hidden_size"]
        heads = replace(heads, learning_rate=min(_HIGHEST_RATE, float(f"{_RATE_TIMES_WIDTH / width:.2g}")))
        chosen.append(f"learning rate {heads.learning_rate:g} for a draft {width:,} wide (heads.learning_rate)")
    if trainer.get("max_epochs") is None and trainer.get("max_steps", -1) in (None, -1):
        num = _num_responses(config)
        trainer["max_epochs"] = epochs_of(num, heads.batch_size)
        chosen.append(f"{trainer['max_epochs']} epochs for {num:,} responses (trainer.max_epochs)")
    if chosen and is_first_process():
        print(f"by rule: {', '.join(chosen)}")
    return replace(config, data=sizes.settled(config.data, heads), heads=heads, trainer=trainer)


def epochs_of(num_responses: int, batch_size: int) -> int:
    """Epochs by rule."""
    return min(max(math.ceil(_STEPS * batch_size / max(1, num_responses)), _EPOCHS[0]), _EPOCHS[1])


def _num_responses(config: Config) -> int:
    """Responses that heads are trained on."""
    data, heads = config.data, config.heads
    feature_set = next(FEATURE_SETS[timing] for timing in heads.timings)
    has_rows = (Path(data.dir) / "rows").is_dir()
    paths = list_shards(data.dir, "train", None if has_rows else feature_set)
    num_rows = sum(read_sidecar(path, keys=("rows",))["rows"] for path in paths)
    num = num_rows if has_rows or feature_set != "fed" else num_rows // data.mixes
    return max(1, num if heads.num_train is None else min(num, heads.num_train))
