"""A contest whose policies have given speeds."""

from collections.abc import Mapping

import numpy as np

from decode.policies import FixedLength
from evaluation.competitor import Competitor
from evaluation.contest import Contest, Result
from evaluation.families import BASELINE, PRODUCT
from evaluation.gain import Throughput
from evaluation.times import Times

SETTINGS = {BASELINE: {"k": 7}, PRODUCT: {"min_token_prob": 0.0474}, "head_drawn": {"max_rejection_prob": 0.731}}


def contest_at(
    speeds: Mapping[str, float], *, num_prompts: int = 30, on_dev: Mapping[str, float] | None = None
) -> Contest:
    """Each policy at its speed on test, give or take 10 % on each prompt, so that the 95 % interval of a gain of two of
    them is about 5 % to each side with 30 prompts; on dev at the same speed, or that of `on_dev`.
    """
    noise = np.random.default_rng(0).normal(1, 0.1, (len(speeds), num_prompts))
    results = {}
    for (name, speed), of_family in zip(speeds.items(), noise, strict=True):
        throughput = Throughput(np.full(num_prompts, 100), 100 / speed * of_family / of_family.mean())
        full = "head:drawn+s-d1-w3" if name == "head_drawn" else name
        competitor = Competitor(name, full, FixedLength(), (SETTINGS.get(name, {}),))
        speed_on_dev = {**speeds, **(on_dev or {})}[name]
        results[name] = Result(competitor=competitor, number=0, on_dev=float(speed_on_dev), throughput=throughput)
    return Contest("made", Times.constant(0.01, 0.02), results)
