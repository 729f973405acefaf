"""Signals: numbers that describe a distribution q and a token y drawn from it, for heads, policies and traces.

They are those of the untruncated distribution at temperature 1, in nats (law 4.1): a truncated or greedy one has
an entropy near zero everywhere.

A *scalar* is a signal that a head may read beside the hidden state. To add one, add an entry to `SCALARS`, where all
code looks them up by name (docs/extending.md). `POSITION` describes the text instead: tokens of the response before y.
Nothing stores it; readers count. The prompt is left out: its length would hide how far a long answer is.
"""

import math
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import logsigmoid

from lm.draws import array_of

Row = Float[Tensor, " vocab"]
Logits = Float[Tensor, "*position vocab"]
Numbers = Float[Tensor, "*position"]
Ids = Int[Tensor, " position"]
Tokens = Int[Tensor, "*position"]
POSITION = "text_position"  # scalar of a token's index in its response
LARGEST_LOGIT = 16.0
"""Logits of probabilities are clamped to ±16 (1 - q = 1.1e-7), so that a certain token gives a head a finite input."""
_NUM_TOP = 10  # tokens that llama.cpp's draft sampler keeps


def upcast(values: Tensor) -> Tensor:
    """The same numbers in float32 or wider."""
    return values if values.itemsize >= 4 else values.float()


class Normalised:
    """Logits and their softmax, from which all signals are read: the softmax is computed once.

    Attributes:
        logits: of q, in float32 or wider.
        probs: softmax(logits).
        max_prob: max_v q(v).
        log_total: log sum_v exp(logit_v), so that log q(v) = logit_v - log_total.
    """

    def __init__(self, logits: Logits, probs: Logits | None = None) -> None:
        """`probs`: softmax(logits), if it is known; it is changed and restored while a signal is computed."""
        self.logits = upcast(logits)
        self._odds: tuple[Tokens, Numbers] | None = None
        if probs is not None:
            self.probs = probs

    @cached_property
    def probs(self) -> Logits:
        return self.logits.softmax(-1)

    @cached_property
    def best(self) -> Tokens:
        """The most probable token."""
        if self.probs.is_cpu:  # where torch's search takes as long as a softmax, and numpy's a tenth of it
            return torch.from_numpy(np.asarray(array_of(self.probs).argmax(-1)))
        return self.probs.argmax(-1)

    @cached_property
    def max_prob(self) -> Numbers:
        return _at(self.probs, self.best)

    @cached_property
    def log_total(self) -> Numbers:
        return _at(self.logits, self.best) - self.max_prob.log()  # of a token whose probability is never 0

    @cached_property
    def entropy(self) -> Numbers:
        """H = log_total - sum_v q(v) logit_v >= 0, in nats."""
        return (self.log_total - self.mean(self.logits)).clamp_min(0.0)  # rounding would bring it below 0

    def mean(self, values: Logits) -> Numbers:
        """sum_v q(v) values_v, where an impossible token adds nothing even if its value is -inf."""
        if self.probs.is_cpu:  # where torch would keep all products in memory
            width = values.shape[-1]
            rows = zip(array_of(self.probs).reshape(-1, width), array_of(values).reshape(-1, width), strict=True)
            with np.errstate(invalid="ignore"):
                means = torch.tensor([probs.dot(row) for probs, row in rows], dtype=values.dtype)
            if not means.isnan().any():
                return means.view(values.shape[:-1])
        return torch.linalg.vecdot(self.probs, values.clamp_min(torch.finfo(values.dtype).min))

    def log_odds(self, token: Tokens) -> Numbers:
        """log(q(y) / (1 - q(y))), unclamped; the last one is kept for other signals of the same token.

        1 - q(y) is the sum over the other tokens, so it is not lost where q(y) rounds to 1; without other tokens
        it is 0 and the result infinite.
        """
        if self._odds is None or self._odds[0] is not token:
            index = token.unsqueeze(-1)
            prob = self.probs.gather(-1, index)
            self.probs.scatter_(-1, index, 0.0)  # a copy of all rows would cost more than all else
            rest = self.probs.sum(-1)
            self.probs.scatter_(-1, index, prob)
            prob = prob.squeeze(-1)
            log_prob = _at(self.logits, token) - self.log_total
            odds = torch.where(prob > 0.5, (prob / rest).log(), log_prob - torch.log1p(-prob))
            self._odds = token, odds
        return self._odds[1]


def _at(values: Logits, token: Tokens) -> Numbers:
    return values.gather(-1, token.unsqueeze(-1)).squeeze(-1)


def entropy(logits: Logits) -> Numbers:
    """H = -sum_v softmax(logits)_v log softmax(logits)_v >= 0, in nats, float32 or wider."""
    return Normalised(logits).entropy


def cross_entropy(q_logits: Logits, p_logits: Logits) -> Numbers:
    """H(q, p) = -sum_v q_v log p_v >= H(q), in nats, float32 or wider. SVIP (2411.18462) bounds acceptance by it."""
    p = Normalised(p_logits)
    logits = p.logits.clamp_min(p.log_total.unsqueeze(-1) - 1e4)  # of tokens that are impossible under p
    return p.log_total - Normalised(q_logits).mean(logits)


class Scalar(NamedTuple):
    """One number that a head may read."""

    symbol: str
    """Its formula as model cards print it."""
    reads_token: bool
    """Whether it depends on y. If not, it is known before y is drawn, so a prefix head may read it."""
    formula: Callable[[Normalised, Ids], Float[Tensor, " position"]]
    """From logits and probabilities of q, and y (`POSITION`: response tokens before y), position by position."""


def _top_prob(q: Normalised, _: Ids) -> Numbers:
    """max_v q(v) / (sum of the ten largest q(v))."""
    largest = q.probs.topk(min(_NUM_TOP, q.probs.shape[-1]), dim=-1).values
    return largest[..., 0] / largest.sum(-1)


def _clamped(log_odds: Numbers) -> Numbers:
    return log_odds.clamp(-LARGEST_LOGIT, LARGEST_LOGIT)


def logit_of_log(log_prob: Numbers) -> Numbers:
    """log(q / (1 - q)), within ±16, of log q <= 0. Near q = 1 its error is the relative error of log q, which is
    small for a stored `log_token_prob`, but not for the difference of two larger numbers in float32.
    """
    log_prob = log_prob.clamp(max=0.0)
    return _clamped(log_prob - torch.log(-torch.expm1(log_prob)))


SCALARS = {
    "log_token_prob": Scalar("log q(y)", True, lambda q, y: logsigmoid(q.log_odds(y))),
    "entropy": Scalar("H(q)", False, lambda q, _: q.entropy),
    "logit_token_prob": Scalar("logit q(y)", True, lambda q, y: _clamped(q.log_odds(y))),
    "logit_max_prob": Scalar("logit max q", False, lambda q, _: _clamped(q.log_odds(q.best))),
    POSITION: Scalar("log(1 + response tokens before y)", False, lambda q, count: count.to(q.logits.dtype).log1p()),
}
"""Every scalar that a head can read, by name."""
# what only policies read: max_v q(v), and its share of the ten largest q(v)
_OF_POLICIES = {
    "max_prob": Scalar("max q", False, lambda q, _: q.max_prob),
    "top_prob": Scalar("max q / top ten", False, _top_prob),
}


def stored_scalars() -> tuple[str, ...]:
    """Names of the scalars that data and traces store: all but `POSITION`."""
    return tuple(name for name in SCALARS if name != POSITION)


def signals_of(
    q: Normalised, token: Ids, names: Iterable[str] | None = None, count: Ids | None = None
) -> dict[str, Float[Tensor, " position"]]:
    """The named signals of drawn tokens (None: the stored scalars), from the draft's logits before truncation and
    temperature; `POSITION` needs `count`, the tokens of the response before each token.
    """
    columns: dict[str, Tensor] = {}
    for name in stored_scalars() if names is None else names:
        given = count if name == POSITION else token
        assert given is not None, f"{POSITION} needs count"
        columns[name] = (SCALARS.get(name) or _OF_POLICIES[name]).formula(q, given)
    return columns


class TokenStats(NamedTuple):
    """Signals of one token, as numbers."""

    entropy: float
    max_prob: float
    log_token_prob: float
    logit_token_prob: float
    logit_max_prob: float


def token_stats(
    logits: Row, token_id: int, *, probs: Row | None = None, has_entropy: bool = True, has_logits: bool = True
) -> TokenStats:
    """`signals_of` one token on the CPU, in numpy, whose calls on single rows cost a fraction of torch's. `probs`:
    softmax(logits), if it is known; without `has_entropy` the entropy is 0, without `has_logits` both logits are.
    """
    row = array_of(logits)
    probs = upcast(logits).softmax(-1) if probs is None else probs
    weights = array_of(probs)
    best = int(weights.argmax())
    max_prob = weights.item(best)
    log_total = row.item(best) - math.log(max_prob)  # from the most probable token, whose probability is never 0
    log_token_prob = row.item(token_id) - log_total
    entropy = logit_token_prob = logit_max_prob = 0.0
    if has_entropy:
        with np.errstate(invalid="ignore"):
            mean = float(weights.dot(row))
        if mean != mean:  # a token of probability 0 has logit -inf, and adds nothing
            mean = float(weights.dot(np.maximum(row, np.finfo(row.dtype).min)))
        entropy = max(log_total - mean, 0.0)  # rounding would bring near-certain tokens below 0
    if has_logits:
        others = 1.0 - max_prob
        if max_prob > 0.5:  # else lost to rounding where it is small; torch sums many numbers faster than numpy
            others = float(probs[:best].sum()) + float(probs[best + 1 :].sum())
        log_odds = math.log(max_prob / others) if others > 0 else math.inf
        logit_max_prob = min(log_odds, LARGEST_LOGIT)
        if token_id == best:
            logit_token_prob = logit_max_prob
            log_token_prob = -math.log1p(others / max_prob)
        else:  # q(y) is at most 1/2
            odds = log_token_prob - math.log1p(-min(math.exp(log_token_prob), 0.5))
            logit_token_prob = max(odds, -LARGEST_LOGIT)
    return TokenStats(entropy, max_prob, log_token_prob, logit_token_prob, logit_max_prob)
