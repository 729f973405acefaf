"""`acceptance-heads plan`: what the data takes (`data_gen.pipeline.plan`), training, and what `evaluate` times."""

import math
import time
from typing import Any

import torch

from configs.schema import Config
from data_gen.pipeline.plan import duration
from data_gen.pipeline.plan import plan as plan_data
from decode.experiment import Experiment
from evaluation.costs.machine import loop_of, missing_of
from evaluation.costs.stops import policies_by_kind
from evaluation.costs.waiting import SKIP, Timing
from heads.grid import grid
from heads.training.recipe import epochs_of
from lm import load_config
from lm.features.released import width_of

_ANY_WIDTH = 8
"""Hidden size of the heads that stand for those to come: their kinds of stop do not depend on it."""
_FLOPS_PER_WEIGHT, _OVER_PRODUCTS = 6, 4.0
"""Operations of a weight and a token in a training step, and how much longer a step takes than its matrix products
(`checkpoints/tiny`: 4; wider heads less).
"""


def plan(config: Config, *, sample: int = 32) -> dict[str, Any]:
    """Rows, tokens, forward passes, disk and time of a run, before running it; and how long heads train and `evaluate`
    times.

    Args:
        config: the experiment.
        sample: prompts that are made and timed, or fewer in half a minute; 0 loads no model.
    """
    num_weights = head_weights(config)
    totals = plan_data(config, sample=sample, head_weights=num_weights)
    print(f"heads: {num_weights:,} weights in all, {sum(map(len, grid(config.heads).values()))} heads")
    known_s = [totals["time_s"]] if totals.get("time_s") else []
    if known_s:
        known_s.append(training_s(config, totals, num_weights))
        print(f"train: about {duration(known_s[-1])} on this machine's processor, or less")
    # what had to be cut is too slow to be timed once more
    line, timing_s = timing_line(config, is_measured=sample > 0 and not totals.get("is_cut"))
    print(line)
    if known_s:
        print(f"together about {duration(sum(known_s) + timing_s)}, and evaluate and tune record and replay traces")
    print("next: acceptance-heads all --config …, which goes on from what is there; or data, the first of its steps")
    return totals


def head_weights(config: Config) -> int:
    """Weights of all heads of the grid."""
    width = width_of(config.pair.draft) or load_config(config.pair.draft).get_text_config().hidden_size
    with torch.device("meta"):
        return sum(
            len(weights) * sum(parameter.numel() for parameter in shape.head(width).parameters())
            for shape, weights in grid(config.heads).items()
        )


def training_s(config: Config, totals: dict[str, Any], num_weights: int) -> float:
    """Seconds of training, about, by the speed of matrix products here."""
    data, heads, width = config.data, config.heads, 256
    num_train = totals["rows"] if data.num_train is None else min(totals["rows"], data.num_train)
    num_epochs = config.trainer.get("max_epochs") or epochs_of(num_train, heads.batch_size)
    tokens = totals["response_tokens"] / max(1, totals["rows"]) * num_train
    matrix = torch.ones(width, width)
    product_s = math.inf
    for _ in range(5):
        start_s = time.perf_counter()
        matrix @ matrix
        product_s = min(product_s, time.perf_counter() - start_s)
    return _OVER_PRODUCTS * _FLOPS_PER_WEIGHT * num_weights * tokens * num_epochs * product_s / (2 * width**3)


def timing_line(config: Config, *, is_measured: bool) -> tuple[str, float]:
    """One line on what `evaluate` times with all heads of the config's grid and how to skip it, and about how many
    seconds it takes.

    Args:
        config: the experiment.
        is_measured: load the models and say about how long.
    """
    if config.decode.t_draft_s is not None:
        return "evaluate: times nothing, decode.t_draft_s and decode.t_target_s are given", 0.0
    policies = policies_by_kind(shape.head(_ANY_WIDTH) for shape in grid(config.heads))
    if not is_measured:
        timing = Timing(policies)
        line = f"evaluate: times {timing.what}, {duration(timing.budget_s)} on a small pair; skip it with {SKIP}"
        return line, timing.budget_s
    experiment = Experiment(config)
    times, missing = missing_of(experiment, policies)
    if times is not None and not missing:
        return f"evaluate: times nothing, the times of this machine are in {experiment.directory}/costs.jsonl", 0.0
    timing = Timing(missing, has_forwards=times is None)
    expected_s = timing.expected_s(loop_of(experiment))
    line = f"evaluate: timing about {duration(expected_s)} on this machine, once: {timing.what}; skip it with {SKIP}"
    return line, expected_s
