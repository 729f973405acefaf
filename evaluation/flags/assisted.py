"""t_draft and t_target of transformers' own assisted generation, which is what its flags are chosen for.

Its loop takes longer around a forward than ours. Generations with several constant numbers of tokens, and without an
assistant, take turns; forwards are counted by hooks on both models, and the seconds are

    T = t_start + t_draft * (draft forwards) + t_target(1) * (verifications of a draft) + t_target(0) * (plain steps)

fitted by least absolute deviations, which large residuals hardly move, each with its standard error. A threshold too
low to end any draft is set, so that t_draft includes the comparison. The time of verifying one more token
is part of t_draft. The faster of two runs counts, because other work on the machine can only slow one down.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
from torch import nn

from decode.experiment import Experiment
from evaluation.bench.arms import Timed, assisted, constant, warm_up
from evaluation.costs.machine import costs_for, entry_of, kept_costs, key_of, loop_of
from evaluation.hierarchies.times import least_absolute
from evaluation.times import TimeErrors, Times
from evaluation.turns import in_turns, turns_within
from lm import Pair

LENGTHS = (None, 1, 2, 4, 8, 16)
"""Constant numbers of tokens that are timed; None: no assistant."""
BUDGET_S = 40.0
_FEWEST_TURNS, _TOKENS = 12, 64
_NEVER_STOPS = {"assistant_confidence_threshold": 1e-9}
Run = tuple[int, int, int, float]
"""Draft forwards, verifications of a draft, target forwards of one token, and seconds of one generation."""


def times_for(experiment: Experiment, engine: str) -> Times:
    """The times of our loop, or of transformers' loop, which DIR/costs.jsonl keeps beside ours."""
    ours = costs_for(experiment)
    if engine != "transformers" or experiment.decode.t_draft_s is not None:
        return ours
    store, key = kept_costs(experiment.directory), key_of(experiment) | {"loop": "transformers"}
    entry = store.get(key)
    if entry is None:
        entry = entry_of(_measured(experiment))
        store.keep([(key, entry)])
    errors = TimeErrors(**entry["errors"])._replace(stopping=ours.errors.stopping)
    target_s = tuple(entry["t_target_s"])
    return replace(ours, t_draft_s=entry["t_draft_s"], t_target_s=target_s, origin=entry["origin"], errors=errors)


def _measured(experiment: Experiment) -> Times:
    loop = loop_of(experiment)
    pair, prompts, num_tokens = loop.pair, loop.prompts, min(_TOKENS, loop.max_new_tokens)
    changes = {str(k): None if k is None else constant(k) | _NEVER_STOPS for k in LENGTHS}
    arms = {name: assisted(pair, num_tokens, loop.sampling, settings) for name, settings in changes.items()}
    warm_up(arms, prompts)
    turns = turns_within(BUDGET_S, _FEWEST_TURNS, desc="costs: transformers' own", unit="turns")
    timed = in_turns(arms, ((turn, prompts[turn % len(prompts)]) for turn in turns))
    runs = [[_counted(pair, arms[name], *at) for _ in range(2)] for at, order in timed for name in order]
    return fitted([min(twice, key=lambda run: run[-1]) for twice in runs])


def _counted(pair: Pair, arm: Timed, seed: int, prompt: list[int]) -> Run:
    with _counting(pair.target) as of_target, _counting(pair.draft) as of_draft:
        _, seconds = arm(prompt, seed)
    verifications = len(of_target) if of_draft else 0
    return len(of_draft), verifications, len(of_target) - verifications, seconds


@contextmanager
def _counting(model: nn.Module) -> Iterator[list[None]]:
    """A list that grows by one with each forward."""
    calls: list[None] = []
    handle = model.register_forward_pre_hook(lambda *_: calls.append(None))
    try:
        yield calls
    finally:
        handle.remove()


def fitted(runs: Sequence[Run]) -> Times:
    """The times that fit these runs best."""
    *counts, seconds = np.array(runs, dtype=np.float64).T
    # relative to each run's seconds: a slow moment of the machine stretches all of it
    columns, ones = np.column_stack([*counts, np.ones(len(runs))]) / seconds[:, None], np.ones(len(runs))
    times = least_absolute(columns, ones)
    # the standard deviation that normal residuals of this median size have
    deviation = 1.48 * np.median(np.abs(columns @ times - ones))
    errors = deviation * np.sqrt(np.diag(np.linalg.inv(columns.T @ columns)))
    draft_s, verify_s, plain_s, _ = times.tolist()
    relative = TimeErrors(errors[0] / draft_s, max(errors[1] / verify_s, errors[2] / plain_s))
    return Times(draft_s, (plain_s, verify_s), "measured in transformers", errors=relative)
