"""The index g of law 4.11's rule, solved on a trace: what one more drafted token may cost per unit of survival.

Calibrated scores along a draft are taken for a Markov chain on bins b of scores, read off pairs (accepted token, token
drafted next): the next token counts only if all before it survived. With P the transitions, A the mean acceptance in a
bin, r = 1, but for a fed-time head r = P A (its newest token, already drafted, counts once the next is drawn and
survives too), drafting on at price x per unit of survival is worth

    Q(x, b) = -x + sum over b' of P(b, b') A(b') (r(b') + W(x / A(b'), b'))        W = max(0, Q)

and g(b) is the x where Q(x, b) = 0. Q falls in x, and value iteration converges from W = 0, which is the one-step rule
g = P (A r).
"""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float
from scipy.special import expit

from evaluation.traces.trace import Array, Trace

_BINS = 12
_SWEEPS = 60
_PRICES = np.geomspace(0.002, 1.5, 240)
_PRIOR_PAIRS = 8.0
"""Weight, in pairs, of the scores' marginal in each row of P, and of the mean score in each A: bins may hold few
pairs.
"""
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
    """Neighbouring tokens of drafts, by their scores."""

    score: Float[Array, " pair"]
    """Calibrated score of an accepted token."""
    next_score: Float[Array, " pair"]
    """Score of the token drafted after it."""
    is_accepted: Float[Array, " pair"]
    """Whether that one was accepted."""


def index_of(trace: Trace, head: Any) -> Index:
    """The line through g, weighted by how often scores occur; the head is calibrated, or a perfect `ScoreHead`."""
    pairs = pairs_of(trace, head)
    if len(pairs.score) < 2:
        mean = float(pairs.is_accepted.mean()) if len(pairs.score) else 0.5
        return Index(mean, mean, 0.0, mean)
    centers, values, first, weights = solve(pairs, is_lagging=head.timing == "fed")
    # Least squares, weighted: covariance over variance, with a floor for scores that are all alike.
    (variance, covariance), _ = np.cov(centers, values, aweights=weights, ddof=0)
    slope = float(covariance / max(variance, 1e-9))
    offset = float(np.average(values - slope * centers, weights=weights))
    low, high = (min(max(end, _LEAST), 1.0) for end in (offset, offset + slope))
    return Index(float(pairs.is_accepted.mean()), low, high - low, first)


def pairs_of(trace: Trace, head: Any) -> Pairs:
    """Every accepted token of the responses with the token that the draft drew after it; of a feature draft's trace, of
    the draft that starts at each position.
    """
    if trace.num_passing is None:
        last = np.zeros(trace.num_positions, dtype=bool)
        last[trace.offsets[1:] - 1] = True
        at = (~trace.is_rejected & ~last).nonzero()[0]
        following, is_accepted = trace.first_drawn[at + 1], ~trace.is_rejected[at + 1]
    else:
        lengths = trace.branch_lengths
        passing = np.repeat(trace.num_passing, lengths)
        depths = trace.depths
        followed = ((depths < passing) & (depths + 1 < np.repeat(lengths, lengths))).nonzero()[0]
        at = trace.num_positions + followed
        following, is_accepted = at + 1, depths[followed] + 1 < passing[followed]
    score = token_scores(trace, head)
    pairs = Pairs(score[at], score[following], is_accepted.astype(np.float64))
    known = ~np.isnan(pairs.score) & ~np.isnan(pairs.next_score)
    return Pairs(*(values[known] for values in pairs))


def token_scores(trace: Trace, head: Any) -> Float[Array, " drafts"]:
    """The calibrated score of each token itself; NaN for what a fed-time head never scored, the ends of branches and
    rows.
    """
    scored = expit(head.calibrated_logit(trace.logit(head).astype(np.float64)))
    if head.timing != "fed":
        return scored
    score = np.full(len(scored), np.nan)
    # A fed-time score has the index of the token after the one it is about; a row's first token follows none.
    followers = (trace.before != np.arange(len(scored))).nonzero()[0]
    score[trace.before[followers]] = scored[followers]
    return score


def solve(pairs: Pairs, *, is_lagging: bool) -> tuple[Array, Array, float, Array]:
    """(mean score of each bin that holds pairs, g there, g with no score yet, share of all pairs in each).

    `is_lagging`: scores are of a fed-time head, which has not scored the newest token.
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
    reward = moves[:num] @ acceptance if is_lagging else np.ones(num)
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
