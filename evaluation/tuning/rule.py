"""The rules of laws 4.11 and 4.13 for given times. What else they need is read off a trace; lambda is a fixed point, so
no grid is needed.

lambda <- N / T of the rule run with lambda          (Dinkelbach): converges to the lambda that is the throughput it
    leads to
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from decode.policies.auto import Auto
from decode.policies.batch import BatchAuto, BatchCosts, BlockAuto
from decode.policies.head import HeadPolicy
from evaluation.batches.load import queue_of, step_through
from evaluation.played import Played
from evaluation.times import LinearCosts, Times
from evaluation.traces.replay import replay_settings
from evaluation.traces.trace import Trace
from evaluation.tuning.index import index_of

_FINE = (30, 1e-4)
"""Most steps towards lambda, and the share of it that the last one may move."""
_COARSE = (8, 1e-3)
"""The same of batches, which are stepped through and not replayed."""
_OF_TIMES = (*LinearCosts._fields, "throughput", "prior_profit")
"""Parameters of the rule that depend on times."""


def autos_for(head: Any, trace: Trace, every: Sequence[Times], *, is_online: bool = False) -> list[Auto]:
    """The rule for each of several times, which are replayed side by side.

    Args:
        head: calibrated, or a perfect `ScoreHead`.
        trace: of dev prompts.
        every: the times.
        is_online: learn lambda while decoding, with nothing from the trace but the index and the mean acceptance, which
            hold for all times; False: find its fixed point on the trace.
    """
    index, stop_kind, has_blocks = _index(trace, head), HeadPolicy(head).stop_kind, trace.block_size is not None
    lines = [cost.line(stop_kind, has_blocks=has_blocks)._asdict() for cost in every]
    rules = [Auto(head, **line, is_online=is_online, **index) for line in lines]
    return rules if is_online else _fixed_points(rules, trace, every)


def side_by_side(rules: Sequence[Auto]) -> Auto:
    """Rules that differ by their times and lambda, as the settings of one policy."""
    columns = {name: [getattr(rule, name) for rule in rules] for name in _OF_TIMES}
    arrays: dict[str, Any] = {name: np.array(column) for name, column in columns.items() if None not in column}
    return replace(rules[0], **arrays)


def _fixed_points(rules: Sequence[Auto], trace: Trace, every: Sequence[Times]) -> list[Auto]:
    """Each rule with lambda equal to the throughput that it reaches on the trace, and with the profit of a drafting
    round there.
    """

    def played(numbers: Sequence[int], rates: Sequence[float]) -> list[Played]:
        # it drafts in every round: what idle rounds do is no part of lambda
        always = [replace(rules[n], probe_every=1, throughput=rate) for n, rate in zip(numbers, rates, strict=True)]
        settings = replay_settings(trace, side_by_side(always))
        return [settings.select([index]) for index in range(len(numbers))]

    def reached(numbers: Sequence[int], rates: Sequence[float]) -> list[float]:
        return [
            float(every[number].tokens_per_s(setting)[0])
            for number, setting in zip(numbers, played(numbers, rates), strict=True)
        ]

    rates = _settled([1.0 / cost.t_target_s[0] for cost in every], reached, _FINE)
    fixed = []
    for rule, rate, cost, replayed in zip(rules, rates, every, played(range(len(rules)), rates), strict=True):
        # What a drafting round gains over the target alone, in tokens: those accepted, less what its extra seconds
        # would have written.
        num_rounds = max(1, int(replayed.lengths[0, :, 1:].sum()))
        extra_s = cost.time_s(replayed).sum() - cost.t_target_s[0] * replayed.counts.num_target.sum()
        profit = float(replayed.counts.num_accepted.sum() - extra_s / cost.t_target_s[0]) / num_rounds
        fixed.append(replace(rule, throughput=rate, prior_profit=profit, prior_rounds=50.0))
    return fixed


def batch_auto_for(head: Any, trace: Trace, costs: BatchCosts, size: int) -> BatchAuto:
    """The rule of a batch for these curves and this batch size; lambda is the throughput that it leads to on the
    trace.
    """
    kind = BatchAuto if trace.block_size is None else BlockAuto
    of_blocks: dict[str, Any] = {} if trace.block_size is None else {"block_size": trace.block_size}
    rule = kind(head, costs, size, **_index(trace, head), **of_blocks)
    rows = queue_of(len(trace.rows), size)

    def reached(_: Sequence[int], rates: Sequence[float]) -> list[float]:
        return [step_through(trace, replace(rule, throughput=rates[0]), rows, size).throughput(costs).tokens_per_s]

    return replace(rule, throughput=_settled([rule.prior()], reached, _COARSE)[0])


def _index(trace: Trace, head: Any) -> dict[str, Any]:
    index = index_of(trace, head)
    return {
        "next_mean": index.next_mean,
        "index_offset": index.offset,
        "index_slope": index.slope,
        "first_index": index.first,
    }


def _settled(
    rates: list[float], reached: Callable[[Sequence[int], Sequence[float]], list[float]], limits: tuple[int, float]
) -> list[float]:
    """Every lambda that is the throughput it leads to, within the limits: (most steps, tolerance); `reached` takes the
    numbers of those that still move.
    """
    (most, tolerance), moving, rates = limits, list(range(len(rates))), [*rates]
    for _ in range(most):
        before = [rates[number] for number in moving]
        after = reached(moving, before)
        for number, rate in zip(moving, after, strict=True):
            rates[number] = rate
        moving = [
            number for number, old, new in zip(moving, before, after, strict=True) if abs(new - old) > tolerance * old
        ]
        if not moving:
            break
    return rates
