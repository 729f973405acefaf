"""The rule of law 4.13 for given curves: what else it needs is read off a trace; lambda is a fixed point, as in
`evaluation.tuning.rule`.
"""

from dataclasses import replace
from typing import Any

from decode.policies.batch import BatchAuto, BatchCosts
from evaluation.batches.load import queue_of
from evaluation.batches.lockstep import step_through
from evaluation.traces.trace import Trace
from evaluation.tuning.index import index_of

_STEPS = 8
_TOLERANCE = 1e-3


def batch_auto_for(head: Any, trace: Trace, costs: BatchCosts, size: int, *, also: Any = None) -> BatchAuto:
    """The rule for these curves and this batch size; lambda is the throughput that it leads to on the trace."""
    index = index_of(trace, also if also is not None and also.timing == "drawn" else head)
    rule = BatchAuto(
        head,
        costs,
        size,
        next_mean=index.next_mean,
        index_offset=index.offset,
        index_slope=index.slope,
        first_index=index.first,
        also=also,
    )
    rows, rate = queue_of(len(trace.rows), size), rule.prior()
    for _ in range(_STEPS):
        reached = step_through(trace, replace(rule, throughput=rate), rows, size).spent(costs).tokens_per_s
        is_settled = abs(reached - rate) <= _TOLERANCE * rate
        rate = reached
        if is_settled:
            break
    return replace(rule, throughput=rate)
