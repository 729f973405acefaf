"""A contest whose policies have given speeds, and an evaluation of made contests."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from configs.schema import Config, ModelSource, PairConfig
from decode.experiment import Experiment
from decode.loop.counts import Counts
from decode.policies import FixedLength
from evaluation.competitor import Competitor
from evaluation.contest import Contest, Replays, Result
from evaluation.families import BASELINE, PRODUCT
from evaluation.gain import Splits
from evaluation.played import Played
from evaluation.report.evaluated import Evaluation
from tests.toys.times import flat_times

NO_REPLAYS = Replays(Splits(None, None), ())  # type: ignore[type-var]
SETTINGS = {BASELINE: {"k": 7}, PRODUCT: {"min_token_prob": 0.0474}, "head_drawn": {"max_rejection_prob": 0.731}}


def clocked_as(tokens: np.ndarray, seconds: np.ndarray) -> Played:
    """One setting that wrote so many tokens to each prompt in so many seconds."""
    lengths = np.zeros((1, len(tokens), 1), dtype=int)
    return Played(Counts(num_emitted=tokens[None]), lengths, np.arange(len(tokens)), seconds={"whole_s": seconds[None]})


def contest_at(
    speeds: Mapping[str, float], *, num_prompts: int = 30, on_dev: Mapping[str, float] | None = None
) -> Contest:
    """Each policy at its speed on test, give or take 10 % on each prompt, so that the 95 % interval of a gain of two of
    them is about 5 % to each side with 30 prompts; on dev at the same speed, or that of `on_dev`.
    """
    noise = np.random.default_rng(0).normal(1, 0.1, (len(speeds), num_prompts))
    results = {}
    for (name, speed), of_family in zip(speeds.items(), noise, strict=True):
        played = clocked_as(np.full(num_prompts, 100), 100 / speed * of_family / of_family.mean())
        full = "head:drawn+s-d1-w3" if name == "head_drawn" else name
        competitor = Competitor(name, full, FixedLength(), (SETTINGS.get(name, {}),))
        speed_on_dev = {**speeds, **(on_dev or {})}[name]
        results[name] = Result(competitor=competitor, number=0, on_dev=float(speed_on_dev), played=played)
    return Contest("made", flat_times(0.01, 0.02), results)


def evaluation_of(
    contests: Mapping[str, Sequence[Contest]], replays: Mapping[str, Replays] | None = None, **values: Any
) -> Evaluation:
    """An evaluation whose contests are given; its models exist nowhere."""
    pair = PairConfig(target=ModelSource(path="models/a < b"), draft=ModelSource(path="models/draft"))
    given = {
        "experiment": Experiment(Config(pair=pair, arguments=("--config", "my file.yaml"))),
        "contest": next(iter(contests.values()))[0],
        "replayed": next(iter((replays or {}).values()), NO_REPLAYS),
        "verdict": {"sentence": "Use fixed length 1.", "notes": []},
    }
    return Evaluation(contests=contests, replays=replays or {}, **given | values)
