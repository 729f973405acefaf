"""The best setting of a policy for given times, by replay; and the fixed point of law 4.11, which needs no grid.

lambda <- N / T of the rule run with lambda          (Dinkelbach): rises until it is the throughput that it leads to
"""

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from scipy.special import expit

from decode.cost import CostModel
from decode.evaluation import throughput
from decode.policies.auto import Auto
from decode.replay import replay_settings
from decode.trace import Trace

_STEPS = 30
_TOLERANCE = 1e-4


class Neighbours(NamedTuple):
    """How the acceptances of neighbouring drafted tokens go together."""

    mean: float
    """Of the acceptance of the next token."""
    score_mean: float
    """Of the calibrated score of the accepted token before it."""
    slope: float
    """What the next acceptance gains per unit of that score."""


def neighbours(trace: Trace, head: Any) -> Neighbours:
    """Acceptance of the token drafted after an accepted one: its mean, and its regression on the calibrated score of that accepted token.

    The gain of one more token counts only if all before it survived, so the pairs are (accepted token, what the draft drew next), and what
    is averaged is whether that next one was accepted: nothing here depends on the head but the score.
    """
    last = np.zeros(trace.num_positions, dtype=bool)
    last[trace.offsets[1:] - 1] = True
    at = (~trace.is_rejected & ~last).nonzero()[0]
    accepted_next = ~trace.is_rejected[at + 1]
    logit = trace.logit(head).astype(np.float64)
    score = expit(head.calibrated_logit(logit[at + 1] if head.timing == "fed" else logit[at]))
    variance = float(score.var())
    slope = float(((score - score.mean()) * (accepted_next - accepted_next.mean())).mean()) / variance if variance > 0 else 0.0
    return Neighbours(float(accepted_next.mean()), float(score.mean()), min(max(slope, 0.0), 1.0))


def auto_for(head: Any, trace: Trace, cost: CostModel, *, also: Any = None, is_online: bool = False) -> Auto:
    """The rule of law 4.11 for these times, with what it needs to know read off a trace.

    Args:
        head: calibrated, or a `PerfectHead`.
        trace: of dev prompts.
        cost: the times.
        also: a head of the other timing.
        is_online: learn lambda while decoding, from the target alone's throughput on; False: find its fixed point on the trace.
    """
    near = neighbours(trace, head)
    slope = (cost.t_target_s[-1] - cost.t_target_s[0]) / max(1, len(cost.t_target_s) - 1)
    rule = Auto(
        head,
        cost.t_draft_s,
        cost.t_target_s[0],
        max(0.0, slope),
        is_online=is_online,
        next_mean=near.mean,
        next_slope=near.slope,
        score_mean=near.score_mean,
        also=also,
    )
    return rule if is_online else fixed_point(rule, trace, cost)


def fixed_point(rule: Auto, trace: Trace, cost: CostModel) -> Auto:
    """The rule with lambda equal to the throughput that it reaches on the trace."""
    rule = replace(rule, prior_rounds=8.0)
    rate, best = 1.0 / cost.t_target_s[0], (0.0, 0.0)
    for _ in range(_STEPS):
        reached = float(throughput(replay_settings(trace, replace(rule, throughput=rate)), cost)[0])
        best = max(best, (reached, rate))
        if abs(reached - rate) <= _TOLERANCE * rate:
            break
        rate = reached
    always = replay_settings(trace, replace(rule, throughput=best[1], probe_every=1))
    num_rounds = max(1, int(always.lengths[0, :, 1:].sum()))
    extra_s = (cost.time_s(always).sum() - cost.t_target_s[0] * always.counts.num_target.sum()) / num_rounds
    return replace(
        rule,
        throughput=best[1],
        prior_accepted=float(always.counts.num_accepted.sum() / num_rounds),
        prior_extra_s=float(extra_s),
        prior_rounds=50.0,
    )
