"""The rules of laws 4.11 and 4.13 for given times. What else they need is read off a trace; lambda is a fixed point, so
no grid is needed.

lambda <- N / T of the rule run with lambda          (Dinkelbach): converges to the lambda that is the throughput it
    leads to
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from decode.policies.auto import Auto
from decode.policies.batch import BatchAuto, BatchCosts, BlockAuto
from decode.policies.head import HeadPolicy
from evaluation.batches.load import queue_of
from evaluation.batches.lockstep import step_through
from evaluation.times import Times
from evaluation.traces.replay import replay_settings
from evaluation.traces.trace import Trace
from evaluation.tuning.index import index_of

_FINE = (30, 1e-4)
"""Most steps towards lambda, and the share of it that the last one may move."""
_COARSE = (8, 1e-3)
"""The same of batches, which are stepped through and not replayed."""


def auto_for(head: Any, trace: Trace, cost: Times, *, is_online: bool = False) -> Auto:
    """The rule for these times.

    Args:
        head: calibrated, or a perfect `ScoreHead`.
        trace: of dev prompts.
        cost: the times.
        is_online: learn lambda while decoding, with nothing from the trace but the index and the mean acceptance, which
            hold for all times; False: find its fixed point on the trace.
    """
    rule = Auto(
        head,
        **cost.line(HeadPolicy(head).stop_kind, has_blocks=trace.block_size is not None)._asdict(),
        is_online=is_online,
        **_index(trace, head),
    )
    return rule if is_online else fixed_point(rule, trace, cost)


def fixed_point(rule: Auto, trace: Trace, cost: Times) -> Auto:
    """The rule with lambda equal to the throughput that it reaches on the trace, and with the profit of a drafting
    round there.
    """
    rate = 1.0 / cost.t_target_s[0]
    always = replace(rule, probe_every=1)  # it drafts in every round: what idle rounds do is no part of lambda
    rate = _settled(rate, lambda rate: float(cost.speeds(trace, replace(always, throughput=rate))[0]), _FINE)
    replayed = replay_settings(trace, replace(always, throughput=rate))
    # What a drafting round gains over the target alone, in tokens: those accepted, less what its extra seconds would
    # have written.
    num_rounds = max(1, int(replayed.lengths[0, :, 1:].sum()))
    extra_s = cost.time_s(replayed).sum() - cost.t_target_s[0] * replayed.counts.num_target.sum()
    profit = float(replayed.counts.num_accepted.sum() - extra_s / cost.t_target_s[0]) / num_rounds
    return replace(rule, throughput=rate, prior_profit=profit, prior_rounds=50.0)


def batch_auto_for(head: Any, trace: Trace, costs: BatchCosts, size: int) -> BatchAuto:
    """The rule of a batch for these curves and this batch size; lambda is the throughput that it leads to on the
    trace.
    """
    kind = BatchAuto if trace.block_size is None else BlockAuto
    of_blocks: dict[str, Any] = {} if trace.block_size is None else {"block_size": trace.block_size}
    rule = kind(head, costs, size, **_index(trace, head), **of_blocks)
    rows = queue_of(len(trace.rows), size)

    def reached(rate: float) -> float:
        return step_through(trace, replace(rule, throughput=rate), rows, size).spent(costs).tokens_per_s

    return replace(rule, throughput=_settled(rule.prior(), reached, _COARSE))


def _index(trace: Trace, head: Any) -> dict[str, Any]:
    index = index_of(trace, head)
    return {
        "next_mean": index.next_mean,
        "index_offset": index.offset,
        "index_slope": index.slope,
        "first_index": index.first,
    }


def _settled(rate: float, reached: Callable[[float], float], limits: tuple[int, float]) -> float:
    """The lambda that is the throughput it leads to, within the limits: (most steps, tolerance)."""
    most, tolerance = limits
    for _ in range(most):
        before, rate = rate, reached(rate)
        if abs(rate - before) <= tolerance * before:
            break
    return rate
