"""Closed forms under i.i.d. acceptance, in time units of one target forward; tests hold the real loop to them.

Every drafted token passes independently with probability a (the acceptance_rate). One draft forward takes c.

    expected_tokens     sum_{i=0}^{K} a^i = (1 - a^{K+1}) / (1 - a)                     Leviathan, 2211.17192, Eq. 1
    speedup             expected_tokens / (1 + c K)                                     Leviathan, Theorem 3.8
    pinsker             acceptance_rate >= 1 - sqrt(KL / 2)                             SVIP, arXiv 2411.18462
    bretagnolle_huber   acceptance_rate >= 1 - sqrt(1 - e^{-KL})                        SVIP

with KL(q || p) = H(q, p) - H(q) in nats; SVIP puts H(q, p) = rho H(q), so that KL = (rho - 1) H(q) needs no target.

Chen's variant (An Exploration of Hierarchical Speculative Decoding), m blocks of n small tokens (rate a, cost c) and
one medium token (rate b, cost d); the paper's alpha is b, its beta a, its c our d, its c_s our c / d. With Q = a^n b,
the survival of a whole block,

    interleaved_tokens  (1 - a^{n+1}) / (1 - a) * (1 - Q^m) / (1 - Q) + Q^m             Theorem 3.2, Eq. 2
    speedup             the same / (1 + m (n c + d))                                    Theorem 3.4, Eq. 3

Pre-verified (HSDDW with fixed lengths), m inner rounds of n micro tokens (rate a, cost c) that the draft verifies (cost
d), every token that leaves passing the target with rate b. A round emits j <= n tokens with probability (1 - a) a^{j-1}
and n + 1 with probability a^n; with phi(x) = E[x^G] of the round's length G, the draft has generating function phi^m,
and E[(1 - b^{L+1}) / (1 - b)] over its length L, derived here in the shape of Cascade Speculative Drafting's (arXiv
2312.11462), is

    pre_verified_tokens  (1 - b phi(b)^m) / (1 - b)
"""

from collections.abc import Callable
from itertools import product
from math import exp, sqrt

Rates = tuple[float, float]
"""Of the small model and of the medium one; pre-verified: of the micro under the draft, of the draft under the target.
Costs have the same order.
"""
Tokens = Callable[..., float]
"""`interleaved_tokens` or `pre_verified_tokens`."""


def expected_tokens(acceptance_rate: float, draft_length: int) -> float:
    """Mean tokens per target forward of a draft of fixed length K: 1 … K + 1."""
    return 1 + acceptance_rate * sum(_powers(acceptance_rate, draft_length))


def speedup(tokens: float, *costs: float) -> float:
    """How much faster than the target alone: tokens per round, over its target forward and the costs of its draft."""
    if min(costs, default=0.0) < 0:
        raise ValueError(f"a cost is {min(costs)} target forwards; it must be at least 0")
    return tokens / (1 + sum(costs))


def best_draft_length(acceptance_rate: float, cost: float, *, longest: int = 64) -> int:
    """The K in 0 … longest of the largest speed-up, the smallest if several."""
    return max(range(longest + 1), key=lambda k: speedup(expected_tokens(acceptance_rate, k), cost * k))


def pinsker(divergence: float) -> float:
    """Lower bound of the acceptance_rate, from KL(q || p) in nats; below 0 (vacuous) for KL > 2."""
    return 1 - sqrt(divergence / 2)


def bretagnolle_huber(divergence: float) -> float:
    """Lower bound of the acceptance_rate, from KL(q || p) in nats; never vacuous, tighter for KL above about 1.6."""
    return 1 - sqrt(1 - exp(-divergence))


def interleaved_tokens(rates: Rates, *, m: int, n: int) -> float:
    """Mean tokens per target forward of Chen's m and n: 1 … m (n + 1) + 1."""
    survival = rates[0] ** n * rates[1]
    return sum(_powers(rates[0], n + 1)) * sum(_powers(survival, m)) + survival**m


def pre_verified_tokens(rates: Rates, *, m: int, n: int) -> float:
    """Mean tokens per target forward of m inner rounds of n micro tokens: at most m (n + 1) + 1."""
    inner, outer = rates
    if outer == 1:
        return 1 + m * expected_tokens(inner, n)
    powers = _powers(inner, n)
    phi = (1 - inner) * sum(power * outer ** (j + 1) for j, power in enumerate(powers)) + inner**n * outer ** (n + 1)
    return (1 - outer * phi**m) / (1 - outer)


def schedule_speedup(tokens: Tokens, rates: Rates, costs: Rates, *, m: int, n: int) -> float:
    """How much faster than the target alone m blocks or inner rounds of n tokens are."""
    return speedup(tokens(rates, m=m, n=n), m * n * costs[0], m * costs[1])


def best_schedule(tokens: Tokens, rates: Rates, costs: Rates, *, most: int = 12) -> tuple[int, int]:
    """The (m, n) with m in 1 … most and n in 0 … most of the largest speed-up."""
    pairs = product(range(1, most + 1), range(most + 1))
    return max(pairs, key=lambda pair: schedule_speedup(tokens, rates, costs, m=pair[0], n=pair[1]))


def _powers(rate: float, count: int) -> list[float]:
    if not 0 <= rate <= 1:
        raise ValueError(f"an acceptance rate is {rate}; a probability lies in [0, 1]")
    return [rate**power for power in range(count)]
