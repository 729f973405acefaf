"""t_draft and t_target of transformers' own assisted generation, which is what its flags are chosen for.

Its loop pays more around a forward than ours: to take our times would promise gains that it has not. Generations with
several constant numbers of tokens, and without an assistant, take turns; forwards are counted by hooks on both models,
and the seconds are those of

    T = t_start + t_draft * (draft forwards) + t_target(1) * (verifications of a draft) + t_target(0) * (plain steps)

by least squares that large residuals hardly move (Cauchy's loss), each with its standard error. A threshold too low to
end any draft is on, so that t_draft has what asking it costs. What verifying one more token takes is part of t_draft.
Of two runs the faster counts: what else the machine does only ever adds.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from scipy.optimize import least_squares
from torch import nn

from evaluation.bench.arms import Timed, warm_up
from evaluation.bench.schedules import assisted, constant
from evaluation.times import TimeErrors, Times
from evaluation.turns import in_turns, turns_within
from lm import Pair, Sampling

LENGTHS = (None, 1, 2, 4, 8, 16)
"""Constant numbers of tokens that are timed; None: no assistant."""
BUDGET_S = 40.0
_FEWEST_TURNS = 12
_PASSES, _LEAST_S = 3, 1e-9
_ASKED = {"assistant_confidence_threshold": 1e-9}


class Run(NamedTuple):
    """Forwards and seconds of one generation of transformers."""

    draft_forwards: int
    verifications: int
    """Target forwards over a draft."""
    plain: int
    """Target forwards of one token."""
    seconds: float


def times_of_assisted(pair: Pair, prompts: Sequence[list[int]], sampling: Sampling, *, num_tokens: int) -> Times:
    """Costs of transformers' loop for this pair, measured on these prompts."""
    arms = {str(k): assisted(pair, num_tokens, sampling, None if k is None else constant(k) | _ASKED) for k in LENGTHS}
    warm_up(arms, prompts)
    turns = turns_within(BUDGET_S, _FEWEST_TURNS, desc="costs: transformers' own", unit="turns")
    played = in_turns(arms, ((turn, prompts[turn % len(prompts)]) for turn in turns))
    return cost_of([faster(pair, arms[name], at) for at, order in played for name in order])


def faster(pair: Pair, arm: Timed, at: tuple[int, list[int]]) -> Run:
    """The faster of two such generations."""
    return min((counted(pair, arm, at) for _ in range(2)), key=lambda run: run.seconds)


def counted(pair: Pair, arm: Timed, at: tuple[int, list[int]]) -> Run:
    """A generation, of (seed, prompt), with the forwards that it made."""
    seed, prompt = at
    with counting(pair.target) as of_target, counting(pair.draft) as of_draft:
        seconds = arm(prompt, seed).seconds
    if of_draft:
        return Run(len(of_draft), len(of_target), 0, seconds)
    return Run(0, 0, len(of_target), seconds)


@contextmanager
def counting(model: nn.Module) -> Iterator[list[None]]:
    """A list that grows by one with each forward."""
    calls: list[None] = []
    handle = model.register_forward_pre_hook(lambda *_: calls.append(None))
    try:
        yield calls
    finally:
        handle.remove()


def cost_of(runs: Sequence[Run]) -> Times:
    """The times that fit these runs best."""
    counts = np.array([run[:3] for run in runs], dtype=np.float64)
    seconds = np.array([run.seconds for run in runs])
    # relative to what each run took: a slow moment of the machine stretches all of it
    columns, wanted = np.column_stack([counts, np.ones(len(runs))]) / seconds[:, None], np.ones(len(runs))
    fitted, *_ = np.linalg.lstsq(columns, wanted, rcond=None)
    for _ in range(_PASSES):  # the scale of small residuals shows once large ones have lost their pull
        residuals = columns @ fitted - wanted
        fitted = least_squares(
            lambda times: columns @ times - wanted,
            np.maximum(fitted, _LEAST_S),
            bounds=(0.0, np.inf),
            x_scale=np.maximum(fitted, _LEAST_S),
            loss="cauchy",
            f_scale=max(_typical(residuals), _LEAST_S),
        ).x
    draft_s, verify_s, plain_s, _ = (float(value) for value in fitted)
    errors = _errors(columns, columns @ fitted - wanted)
    return Times(
        draft_s,
        (plain_s, verify_s),
        "measured in transformers",
        errors=TimeErrors(errors[0] / draft_s, max(errors[1] / verify_s, errors[2] / plain_s)),
    )


def _errors(columns: Float[np.ndarray, "run time"], residuals: Float[np.ndarray, " run"]) -> Float[np.ndarray, " time"]:
    """Standard error of each time, from the residuals' typical size."""
    return np.asarray(_typical(residuals) * np.sqrt(np.diag(np.linalg.inv(columns.T @ columns))))


def _typical(residuals: Float[np.ndarray, " run"]) -> float:
    """The standard deviation that normal residuals of this median size have."""
    return 1.48 * float(np.median(np.abs(residuals)))
