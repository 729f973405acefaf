"""Signals: numbers that describe a distribution q and a token y drawn from it, for heads, policies and traces.

They are those of the untruncated distribution at temperature 1, in nats (law 4.1): a truncated or greedy one has an
entropy near zero everywhere.

A *scalar* is a signal that a head may read beside the hidden state. To add one, add an entry to `SCALARS`, where all
code looks them up by name (docs/extending.md). `POSITION` describes the text instead: tokens of the response before y.
Nothing stores it; readers count. The prompt is left out: its length would hide how far a long answer is.
"""

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import logsigmoid

from lm.draws import array_of

Row = Float[Tensor, " vocab"]
Rows = Float[Tensor, "position vocab"]
Logits = Float[Tensor, "*position vocab"]
Numbers = Float[Tensor, "*position"]
Ids = Int[Tensor, " position"]
POSITION = "text_position"  # scalar of a token's index in its response
LARGEST_LOGIT = 16.0
"""Logits of probabilities are clamped to ±16 (1 - q = 1.1e-7), so that a certain token gives a head a finite input."""
_NUM_TOP = 10  # tokens that llama.cpp's draft sampler keeps


def upcast(values: Tensor) -> Tensor:
    """The same numbers in float32 or wider."""
    return values if values.itemsize >= 4 else values.float()


def entropy(logits: Logits) -> Numbers:
    """H = -sum_v softmax(logits)_v log softmax(logits)_v >= 0, in nats, float32 or wider."""
    log_probs = upcast(logits).log_softmax(-1)
    return -(log_probs.exp() * log_probs.clamp_min(-1e4)).sum(-1).clamp_max(0.0)  # else -1e-7 for a near-certain token


def cross_entropy(q_logits: Logits, p_logits: Logits) -> Numbers:
    """H(q, p) = -sum_v q_v log p_v >= H(q), in nats, float32 or wider. SVIP (2411.18462) bounds acceptance by it."""
    q, log_p = upcast(q_logits).log_softmax(-1).exp(), upcast(p_logits).log_softmax(-1)
    return -(q * log_p.clamp_min(-1e4)).sum(-1)


class Scalar(NamedTuple):
    """One number that a head may read."""

    symbol: str
    """Its formula as model cards print it."""
    reads_token: bool
    """Whether it depends on y. If not, it is known before y is drawn, so a prefix head may read it."""
    formula: Callable[[Rows, Ids], Float[Tensor, " position"]]
    """From logits of q in float32 or wider and y (`POSITION`: response tokens before y), position by position."""


def _top_prob(logits: Tensor, _: Tensor) -> Tensor:
    """max_v q(v) / (sum of the ten largest q(v))."""
    largest = logits.topk(min(_NUM_TOP, logits.shape[-1]), dim=-1).values
    return (largest - largest[..., :1]).exp().sum(-1).reciprocal()


def _log_odds(logits: Tensor, ids: Tensor) -> Tensor:
    """log(q(v) / (1 - q(v))) of one token per position, unclamped. 1 - q(v) is the sum over the other tokens, so it is
    not lost where q(v) rounds to 1; without other tokens it is 0 and the result infinite.
    """
    index = ids.unsqueeze(-1)
    others = logits.scatter(-1, index, -torch.inf).logsumexp(-1)
    return logits.gather(-1, index).squeeze(-1) - others


def _logit_of_max(logits: Tensor, _: Tensor) -> Tensor:
    return _log_odds(logits, logits.argmax(-1)).clamp(max=LARGEST_LOGIT)


def logit_of_log(log_prob: Numbers) -> Numbers:
    """log(q / (1 - q)), within ±16, of log q <= 0. Near q = 1 its error is the relative error of log q, which is small
    for a stored `log_token_prob`, but not for the difference of two larger numbers in float32.
    """
    log_prob = log_prob.clamp(max=0.0)
    return (log_prob - torch.log(-torch.expm1(log_prob))).clamp(-LARGEST_LOGIT, LARGEST_LOGIT)


SCALARS = {
    "log_token_prob": Scalar("log q(y)", True, lambda logits, y: logsigmoid(_log_odds(logits, y))),
    "entropy": Scalar("H(q)", False, lambda logits, _: entropy(logits)),
    "logit_token_prob": Scalar(
        "logit q(y)", True, lambda logits, y: _log_odds(logits, y).clamp(-LARGEST_LOGIT, LARGEST_LOGIT)
    ),
    "logit_max_prob": Scalar("logit max q", False, _logit_of_max),
    POSITION: Scalar("log(1 + response tokens before y)", False, lambda logits, count: count.to(logits.dtype).log1p()),
}
"""Every scalar that a head can read, by name."""
_OF_POLICIES = {"max_prob": lambda logits, _: (logits.amax(-1) - logits.logsumexp(-1)).exp(), "top_prob": _top_prob}
"""Signals that only policies read: max_v q(v), and its share of the ten largest q(v)."""


def stored_scalars() -> tuple[str, ...]:
    """Names of the scalars that data and traces store: all but `POSITION`."""
    return tuple(name for name in SCALARS if name != POSITION)


def signals_of(
    logits: Rows, token: Ids, names: Iterable[str] | None = None, count: Ids | None = None
) -> dict[str, Float[Tensor, " position"]]:
    """The named signals of drawn tokens (None: the stored scalars), from the draft's logits before truncation and
    temperature; `POSITION` needs `count`, the tokens of the response before each token.
    """
    logits = upcast(logits)
    columns: dict[str, Tensor] = {}
    for name in stored_scalars() if names is None else names:
        formula = _OF_POLICIES[name] if name in _OF_POLICIES else SCALARS[name].formula
        given = count if name == POSITION else token
        assert given is not None, f"{POSITION} needs count"
        columns[name] = formula(logits, given)
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
    weights = array_of(upcast(logits).softmax(-1) if probs is None else probs)
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
        # all but the largest: 1 - max_prob would round to 0
        others = float(weights[:best].sum()) + float(weights[best + 1 :].sum())
        log_odds = math.log(max_prob / others) if others > 0 else math.inf
        logit_max_prob = min(log_odds, LARGEST_LOGIT)
        if token_id == best:
            logit_token_prob = logit_max_prob
            log_token_prob = -math.log1p(others / max_prob)
        else:  # q(y) is at most 1/2
            odds = log_token_prob - math.log1p(-min(math.exp(log_token_prob), 0.5))
            logit_token_prob = max(odds, -LARGEST_LOGIT)
    return TokenStats(entropy, max_prob, log_token_prob, logit_token_prob, logit_max_prob)
