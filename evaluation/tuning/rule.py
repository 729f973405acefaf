"""The rule of law 4.11 for given times. What else it needs is read off a trace; its lambda is a fixed point, so no grid
is needed.

lambda <- N / T of the rule run with lambda          (Dinkelbach): converges to the lambda that is the throughput it
    leads to
"""

from dataclasses import replace
from typing import Any

from decode.policies.auto import Auto
from decode.policies.scores import Scores
from evaluation.costs.model import CostModel
from evaluation.traces.replay import replay_settings
from evaluation.traces.trace import Trace
from evaluation.tuning.index import index_of

_STEPS = 30
_TOLERANCE = 1e-4


def auto_for(
    head: Any, trace: Trace, cost: CostModel, *, also: Any = None, is_online: bool = False, is_learning: bool = False
) -> Auto:
    """The rule for these times.

    Args:
        head: calibrated, or a `PerfectHead`.
        trace: of dev prompts.
        cost: the times.
        also: a head of the other timing.
        is_online: learn lambda while decoding, with nothing from the trace but the index and the mean acceptance, which
            hold for all times; False: find its fixed point on the trace.
        is_learning: refit the head's calibration while decoding.
    """
    index = index_of(trace, also if also is not None and also.timing == "drawn" else head)
    rule = Auto(
        head,
        **cost.line(Scores(head, also).stop_kind)._asdict(),
        is_online=is_online,
        next_mean=index.next_mean,
        index_offset=index.offset,
        index_slope=index.slope,
        first_index=index.first,
        also=also,
        is_learning=is_learning,
    )
    return rule if is_online else fixed_point(rule, trace, cost)


def fixed_point(rule: Auto, trace: Trace, cost: CostModel) -> Auto:
    """The rule with lambda equal to the throughput that it reaches on the trace, and with the profit of a drafting
    round there.
    """
    rate = 1.0 / cost.t_target_s[0]
    always = replace(rule, probe_every=1)  # it drafts in every round: what idle rounds do is no part of lambda
    for _ in range(_STEPS):
        reached = float(cost.tokens_per_s(replay_settings(trace, replace(always, throughput=rate)))[0])
        is_settled = abs(reached - rate) <= _TOLERANCE * rate
        rate = reached
        if is_settled:
            break
    replayed = replay_settings(trace, replace(always, throughput=rate))
    # What a drafting round gains over the target alone, in tokens: those accepted, less what its extra seconds would
    # have written.
    num_rounds = max(1, int(replayed.lengths[0, :, 1:].sum()))
    extra_s = cost.time_s(replayed).sum() - cost.t_target_s[0] * replayed.counts.num_target.sum()
    profit = float(replayed.counts.num_accepted.sum() - extra_s / cost.t_target_s[0]) / num_rounds
    return replace(rule, throughput=rate, prior_profit=profit, prior_rounds=50.0)
