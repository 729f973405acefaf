"""`acceptance-heads plan`: what the data will take (`data_gen.pipeline.plan`), and what `evaluate` will time."""

from typing import Any

from configs.schema import Config
from data_gen.pipeline.plan import duration
from data_gen.pipeline.plan import plan as plan_data
from decode.experiment import Experiment
from evaluation.costs.machine import loop_of, missing_of
from evaluation.costs.stops import policies_by_kind
from evaluation.costs.waiting import SKIP, Timing
from heads.grid import grid

_ANY_WIDTH = 8
"""Hidden size of the heads that stand for those to come: their kinds of stop do not depend on it."""


def plan(config: Config, *, sample: int = 32) -> dict[str, Any]:
    """Rows, tokens, forward passes, disk and time of a run, before running it; and how long `evaluate` will time.

    Args:
        config: the experiment.
        sample: prompts that are made and timed; 0 loads no model.
    """
    totals = plan_data(config, sample=sample)
    print(timing_line(config, is_measured=sample > 0))
    print("next: acceptance-heads all --config …, which goes on from what is there; or data, the first of its steps")
    return totals


def timing_line(config: Config, *, is_measured: bool) -> str:
    """One line on what `evaluate` will time with all heads of the config's grid, and how to skip it.

    Args:
        config: the experiment.
        is_measured: load the models and say about how long.
    """
    if config.decode.t_draft_s is not None:
        return "evaluate: times nothing, decode.t_draft_s and decode.t_target_s are given"
    policies = policies_by_kind(shape.head(_ANY_WIDTH) for shape in grid(config.heads))
    if not is_measured:
        timing = Timing(policies)
        return f"evaluate: times {timing.what}, {duration(timing.budget_s)} on a small pair; skip it with {SKIP}"
    experiment = Experiment(config)
    times, missing = missing_of(experiment, policies)
    if times is not None and not missing:
        return f"evaluate: times nothing, the times of this machine are in {experiment.directory}/costs.jsonl"
    timing = Timing(missing, has_forwards=times is None)
    about = duration(timing.expected_s(loop_of(experiment)))
    return f"evaluate: timing about {about} on this machine, once: {timing.what}; skip it with {SKIP}"
