"""The rules of laws 4.11 and 4.13 for given times, with what they need of a trace: the index g, and lambda.

Lambda is a fixed point, so no grid is needed. It converges to the throughput that it leads to (Dinkelbach):

    lambda <- N / T of the rule run with lambda

The index is what one more drafted token may cost per unit of survival. Calibrated scores along a draft are taken for a
Markov chain on bins b of scores, read off pairs (accepted token, token drafted next): the next token counts only if all
before it survived. With P the transitions, A the mean acceptance in a bin, r = 1, but for a fed-time head r = P A (its
newest token, already drafted, counts once the next is drawn and survives too), drafting on at price x per unit of
survival is worth

    Q(x, b) = -x + sum over b' of P(b, b') A(b') (r(b') + W(x / A(b'), b'))        W = max(0, Q)

and g(b) is the x where Q(x, b) = 0. Q falls in x, and value iteration converges from W = 0, which is the one-step rule
g = P (A r).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from scipy.special import expit

from decode.policies.auto import Auto, AutoTokenProb
from decode.policies.batch import BatchAuto, BatchCosts
from decode.policies.head import HeadPolicy
from decode.policies.scores import TOKEN_LOGIT, ScoreHead
from evaluation.batches.load import queue_of, step_through
from evaluation.played import Played
from evaluation.times import LINE, Times
from evaluation.traces.replay import replay_settings
from evaluation.traces.trace import Array, Trace
from heads.measures.histogram import observe
from heads.measures.scores import fit_logistic

_OF_TIMES = (*LINE, "throughput", "prior_profit")
"""Parameters of the rule that depend on times."""
_BINS = 12
_SWEEPS = 60
_PRICES = np.geomspace(0.002, 1.5, 240)
_PRIOR_PAIRS = 8.0
"""Weight, in pairs, of the scores' marginal in each row of P, and of the mean score in each A: bins may hold few
pairs.
"""
_LEAST_SLOPE = 0.001
"""Where q(y) says nothing of acceptance, or the opposite, the mean acceptance is predicted of every token."""
_LEAST = 0.01
"""No acceptance and no g is taken to be smaller: prices are divided by them."""


class Index(NamedTuple):
    """What `decode.policies.auto` needs of a trace: g as a line, g(a) = index_offset + index_slope a for a in [0, 1],
    nowhere below 0 nor above 1.
    """

    next_mean: float
    """Mean acceptance of a token that follows an accepted one."""
    index_offset: float
    index_slope: float
    first_index: float
    """g with no score yet."""


class Pairs(NamedTuple):
    """Accepted tokens of drafts, and the tokens drafted after them."""

    score: Float[Array, " pair"]
    """Calibrated, of the first token."""
    next_score: Float[Array, " pair"]
    is_accepted: Float[Array, " pair"]
    """Whether the second one is."""


def index_of(trace: Trace, head: Any) -> Index:
    """The line through g, weighted by how often scores occur; the head is calibrated, or a perfect `ScoreHead`."""
    pairs = pairs_of(trace, head)
    if len(pairs.score) < 2:
        mean = float(pairs.is_accepted.mean()) if len(pairs.score) else 0.5
        return Index(mean, mean, 0.0, mean)
    centers, values, first, weights = solve(pairs, scores_late=head.timing == "fed")
    # Least squares, weighted: covariance over variance, with a floor for scores that are all alike.
    (variance, covariance), _ = np.cov(centers, values, aweights=weights, ddof=0)
    slope = float(covariance / max(variance, 1e-9))
    offset = float(np.average(values - slope * centers, weights=weights))
    low, high = (min(max(end, _LEAST), 1.0) for end in (offset, offset + slope))
    return Index(float(pairs.is_accepted.mean()), low, high - low, first)


def pairs_of(trace: Trace, head: Any) -> Pairs:
    """All pairs of the responses; of a feature draft's trace, of the draft that starts at each position."""
    if trace.num_passing is None:
        last = np.zeros(trace.num_positions, dtype=bool)
        last[trace.offsets[1:] - 1] = True
        at = (~trace.is_rejected & ~last).nonzero()[0]
        following = trace.first_drawn[at + 1]
        is_accepted = ~trace.is_rejected[at + 1]
    else:
        lengths = trace.branch_lengths
        passing = np.repeat(trace.num_passing, lengths)
        depths = trace.depths
        followed = ((depths < passing) & (depths + 1 < np.repeat(lengths, lengths))).nonzero()[0]
        at = trace.num_positions + followed
        following = at + 1
        is_accepted = depths[followed] + 1 < passing[followed]
    score = token_scores(trace, head)
    pairs = Pairs(score[at], score[following], is_accepted.astype(np.float64))
    known = ~np.isnan(pairs.score) & ~np.isnan(pairs.next_score)
    return Pairs(*(values[known] for values in pairs))


def token_scores(trace: Trace, head: Any) -> Float[Array, " drafts"]:
    """The calibrated score of each token itself; NaN at the ends of branches and rows, which a fed-time head does not
    score.
    """
    scored = expit(head.calibrated_logit(trace.logit(head).astype(np.float64)))
    if head.timing != "fed":
        return scored
    score = np.full(len(scored), np.nan)
    # A fed-time score has the index of the token after the one it is about; a row's first token follows none.
    followers = (trace.before != np.arange(len(scored))).nonzero()[0]
    score[trace.before[followers]] = scored[followers]
    return score


def solve(pairs: Pairs, *, scores_late: bool) -> tuple[Array, Array, float, Array]:
    """(mean score of each bin that holds pairs, g there, g with no score yet, share of all pairs in each).

    `scores_late`: scores are of a fed-time head, which has not scored the newest token.
    """
    edges = np.unique(np.quantile(np.concatenate([pairs.score, pairs.next_score]), np.linspace(0, 1, _BINS + 1)[1:-1]))
    bins, next_bins = (np.searchsorted(edges, values) for values in (pairs.score, pairs.next_score))
    num = len(edges) + 1
    marginal = np.bincount(next_bins, minlength=num) / len(next_bins)
    moves = np.zeros((num + 1, num))  # the last row, which no pair fills, is for "no score yet"
    np.add.at(moves, (bins, next_bins), 1.0)
    moves = (moves + _PRIOR_PAIRS * marginal) / (moves.sum(1, keepdims=True) + _PRIOR_PAIRS)
    scores, accepted = (
        np.bincount(next_bins, values, minlength=num) for values in (pairs.next_score, pairs.is_accepted)
    )
    size = np.bincount(next_bins, minlength=num)
    mean = (scores + pairs.next_score.mean()) / (size + 1)
    acceptance = np.maximum((accepted + _PRIOR_PAIRS * mean) / (size + _PRIOR_PAIRS), _LEAST)
    reward = moves[:num] @ acceptance if scores_late else np.ones(num)
    values = roots(moves, acceptance, reward)
    occupied = (count := np.bincount(bins, minlength=num)) > 0
    centers = np.bincount(bins, pairs.score, minlength=num)[occupied] / count[occupied]
    return centers, values[:num][occupied], float(values[num]), count[occupied] / count.sum()


def roots(
    moves: Float[Array, "from to"], acceptance: Float[Array, " to"], reward: Float[Array, " to"]
) -> Float[Array, " from"]:
    """g of every row of `moves`: Q = 0, by value iteration on a grid of prices."""
    worth = np.zeros((len(acceptance), len(_PRICES)))
    for _ in range(_SWEEPS):
        # W of each next bin at price x / A: a unit of survival costs that much more there; beyond the grid it is 0.
        later = np.stack(
            [np.interp(_PRICES / prob, _PRICES, row, right=0.0) for prob, row in zip(acceptance, worth, strict=True)]
        )
        gain = moves @ (acceptance[:, None] * (reward[:, None] + later)) - _PRICES
        worth = np.maximum(gain[: len(acceptance)], 0.0)
    # Q falls in x, and interp wants rising values: hence -Q
    return np.array([np.interp(0.0, -row, _PRICES) for row in gain])


def token_rules_for(trace: Trace, every: Sequence[Times]) -> list[AutoTokenProb]:
    """The rule without a head for each of several times: slope and offset of P = sigmoid(slope * logit q(y) + offset)
    are the logistic fit to the tokens that a round may draft first at each position of these dev prompts.
    """
    drafted = trace.first_drawn[trace.is_drafted]
    logit, label = (torch.from_numpy(trace.signal(name)[drafted]) for name in (TOKEN_LOGIT, "acceptance_prob"))
    slope, offset = (float(number) for number in fit_logistic(observe(logit[None], label[None])))
    if slope < _LEAST_SLOPE:
        slope = _LEAST_SLOPE
        offset = float(label.double().mean().clamp(1e-6, 1 - 1e-6).logit())
    head = ScoreHead("logit_token_prob", "drawn", calibration_shift=offset / slope, temperature=1.0 / slope)
    names = [parameter.name for parameter in fields(Auto) if parameter.name != "head"]
    rules = []
    for rule in autos_for(head, trace, every):
        solved = {name: getattr(rule, name) for name in names}
        rules.append(AutoTokenProb(**solved, slope=slope, offset=offset))
    return rules


def autos_for(head: Any, trace: Trace, every: Sequence[Times], *, is_online: bool = False) -> list[Auto]:
    """The rule for each of several times.

    Args:
        head: calibrated, or a perfect `ScoreHead`.
        trace: of dev prompts.
        every: the times.
        is_online: learn lambda while decoding, with nothing from the trace but the index and the mean acceptance, which
            hold for all times; False: find its fixed point on the trace.
    """
    index = index_of(trace, head)._asdict()
    stop_kind = HeadPolicy(head).stop_kind
    has_blocks = trace.block_size is not None
    lines = [times.line(stop_kind, trace.max_draft_length, has_blocks=has_blocks) for times in every]
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

    rates = _settled([1.0 / times.alone_s for times in every], reached, most_steps=30, tolerance=1e-4)
    fixed = []
    for (setting, times), rule, rate in zip(played(np.arange(len(rules)), rates), rules, rates.tolist(), strict=True):
        # What a drafting round gains over the target alone, in tokens: those accepted, less what its extra seconds
        # would have written.
        num_rounds = max(1, int(setting.lengths[0, :, 1:].sum()))
        extra_s = times.time_s(setting).sum() - times.alone_s * setting.counts.num_target.sum()
        profit = float(setting.counts.num_accepted.sum() - extra_s / times.alone_s) / num_rounds
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
    rates = np.array(first)
    moving = np.arange(len(first))
    for _ in range(most_steps):
        before = rates[moving]
        rates[moving] = reached(moving, before)
        moving = moving[abs(rates[moving] - before) > tolerance * before]
        if not len(moving):
            break
    return rates
