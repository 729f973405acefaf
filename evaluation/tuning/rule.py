"""The rules of laws 4.11 and 4.13 for given times. What else they need is read off a trace; lambda is a fixed point, so
no grid is needed.

lambda <- N / T of the rule run with lambda          (Dinkelbach): converges to the lambda that is the throughput it
    leads to
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from decode.policies.auto import Auto
from decode.policies.batch import BatchAuto, BatchCosts
from decode.policies.head import HeadPolicy
from evaluation.batches.load import queue_of, step_through
from evaluation.played import Played
from evaluation.times import LinearCosts, Times
from evaluation.traces.replay import replay_settings
from evaluation.traces.trace import Array, Trace
from evaluation.tuning.index import index_of

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
    index, stop_kind = index_of(trace, head)._asdict(), HeadPolicy(head).stop_kind
    lines = [times.line(stop_kind, has_blocks=trace.block_size is not None)._asdict() for times in every]
    rules = [Auto(head, **line, is_online=is_online, **index) for line in lines]
    return rules if is_online else _fixed_points(rules, trace, every)


def side_by_side(rules: Sequence[Auto]) -> Auto:
    """Rules that differ by their times and lambda, as the settings of one policy."""
    columns = {name: [getattr(rule, name) for rule in rules] for name in _OF_TIMES}
    arrays: dict[str, Any] = {name: np.array(column) for name, column in columns.items() if None not in column}
    return replace(rules[0], **arrays)


def _fixed_points(rules: Sequence[Auto], trace: Trace, every: Sequence[Times]) -> list[Auto]:
    """Each rule with the lambda that it reaches on the trace, and the profit of a drafting round there."""

    def played(numbers: Array, rates: Array) -> Iterator[tuple[Played, Times]]:
        # it drafts in every round: what idle rounds do is no part of lambda
        pairs = zip(numbers.tolist(), rates.tolist(), strict=True)
        always = [replace(rules[number], probe_every=1, throughput=rate) for number, rate in pairs]
        settings = replay_settings(trace, side_by_side(always))
        for index, number in enumerate(numbers):
            yield settings.select([index]), every[number]

    def reached(numbers: Array, rates: Array) -> list[float]:
        return [float(times.tokens_per_s(setting)[0]) for setting, times in played(numbers, rates)]

    rates = _settled([1.0 / times.t_target_s[0] for times in every], reached, most_steps=30, tolerance=1e-4)
    fixed = []
    for (setting, times), rule, rate in zip(played(np.arange(len(rules)), rates), rules, rates.tolist(), strict=True):
        # What a drafting round gains over the target alone, in tokens: those accepted, less what its extra seconds
        # would have written.
        num_rounds = max(1, int(setting.lengths[0, :, 1:].sum()))
        extra_s = times.time_s(setting).sum() - times.t_target_s[0] * setting.counts.num_target.sum()
        profit = float(setting.counts.num_accepted.sum() - extra_s / times.t_target_s[0]) / num_rounds
        fixed.append(replace(rule, throughput=rate, prior_profit=profit, prior_rounds=50.0))
    return fixed


def batch_auto_for(head: Any, trace: Trace, costs: BatchCosts, size: int) -> BatchAuto:
    """The rule of a batch for these curves and this batch size; lambda is the throughput that it leads to on the
    trace.
    """
    rule = BatchAuto(head, costs, size, **index_of(trace, head)._asdict(), block_size=trace.block_size)
    rows = queue_of(len(trace.rows), size)

    def reached(_: Array, rates: Array) -> list[float]:
        rate = float(rates[0])
        return [step_through(trace, replace(rule, throughput=rate), rows, size).throughput(costs).tokens_per_s]

    # fewer and coarser steps: a batch is stepped through and not replayed
    (rate,) = _settled([rule.prior()], reached, most_steps=8, tolerance=1e-3).tolist()
    return replace(rule, throughput=rate)


def _settled(
    first: Sequence[float], reached: Callable[[Array, Array], Sequence[float]], *, most_steps: int, tolerance: float
) -> Array:
    """Every lambda that is the throughput it leads to, give or take this share of it; `reached` takes the numbers of
    those that still move, and their rates.
    """
    rates, moving = np.array(first), np.arange(len(first))
    for _ in range(most_steps):
        before = rates[moving]
        rates[moving] = reached(moving, before)
        moving = moving[abs(rates[moving] - before) > tolerance * before]
        if not len(moving):
            break
    return rates
