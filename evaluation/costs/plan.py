"""`acceptance-heads plan`: size and time of the data (`data_gen.pipeline.plan`), of training, and of `evaluate`."""

import timeit
from typing import Any

import torch

from configs.schema import Config
from data_gen.pipeline.plan import duration
from data_gen.pipeline.plan import plan as plan_data
from evaluation.costs.machine import ABOUT_TIMING, SKIP, TIMING_S
from heads.grid import specs
from heads.training.command import epochs_of
from lm import load_config
from lm.features.released import width_of

_FLOPS_PER_WEIGHT, _OVER_PRODUCTS = 6, 4.0
"""Operations per weight and token in a training step, and the time of a step relative to its matrix products
(`checkpoints/tiny`: 4; wider heads less).
"""


def plan(config: Config, *, sample: int = 32) -> dict[str, Any]:
    """Estimate rows, tokens, forward passes, disk space and time of a run before running it.

    Args:
        config: the experiment.
        sample: number of prompts to make and time, at most half a minute; 0 loads no model.
    """
    num_weights = head_weights(config)
    totals = plan_data(config, sample=sample, head_weights=num_weights)
    print(f"heads: {num_weights:,} weights in total, {len(specs(config.heads))} heads")
    known_s = [totals["time_s"]] if totals.get("time_s") else []
    if known_s:
        known_s.append(training_s(config, totals, num_weights))
        print(f"train: about {duration(known_s[-1])} on this machine's CPU, or less")
    line, timing_s = timing_line(config)
    print(line)
    if known_s:
        print(f"together about {duration(sum(known_s) + timing_s)}, plus the traces of evaluate and tune")
    print("next: acceptance-heads all --config … (every step; finished work is kept), or data (the first step)")
    return totals


def head_weights(config: Config) -> int:
    """Weights of all heads of the grid."""
    width = width_of(config.pair.draft) or load_config(config.pair.draft).get_text_config().hidden_size
    with torch.device("meta"):
        return sum(spec.shape.head(width).num_parameters for spec in specs(config.heads))


def training_s(config: Config, totals: dict[str, Any], num_weights: int) -> float:
    """Estimated seconds of training, from the speed of matrix products on this machine."""
    data, heads, width = config.data, config.heads, 256
    num_train = totals["rows"] if data.num_train is None else min(totals["rows"], data.num_train)
    num_epochs = config.trainer.get("max_epochs") or epochs_of(num_train, heads.batch_size)
    tokens = totals["response_tokens"] / max(1, totals["rows"]) * num_train
    matrix = torch.ones(width, width)
    product_s = min(timeit.repeat(lambda: matrix @ matrix, number=1, repeat=5))
    return _OVER_PRODUCTS * _FLOPS_PER_WEIGHT * num_weights * tokens * num_epochs * product_s / (2 * width**3)


def timing_line(config: Config) -> tuple[str, float]:
    """One line about the timing of `evaluate`, and its seconds on a small pair."""
    if config.decode.t_draft_s is not None:
        return "evaluate: no timing, as decode.t_draft_s and decode.t_target_s are set", 0.0
    return f"evaluate: measures this machine once, {ABOUT_TIMING}; skip it with {SKIP}", TIMING_S
