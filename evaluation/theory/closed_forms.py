"""Closed forms under i.i.d. acceptance, in time units of one target forward; tests hold the real loop to them.

Every drafted token passes with the same probability, independently: a (the acceptance_rate). One draft forward takes c.

    expected_tokens     sum_{i=0}^{K} a^i = (1 - a^{K+1}) / (1 - a)                     Leviathan, 2211.17192, Eq. 1
    speedup             expected_tokens / (1 + c K)                                     Leviathan, Theorem 3.8
    pinsker             acceptance_rate >= 1 - sqrt(KL / 2)                             SVIP, arXiv 2411.18462
    bretagnolle_huber   acceptance_rate >= 1 - sqrt(1 - e^{-KL})                        SVIP

with KL(q || p) = H(q, p) - H(q) in nats; SVIP puts H(q, p) = rho H(q), so that KL = (rho - 1) H(q) needs no target.

Chen's variant (An Exploration of Hierarchical Speculative Decoding), m blocks of n small tokens (rate a, cost c) and
one medium token (rate b, cost d); the paper's alpha is b, its beta a, its c our d, its c_s our c / d. With Q = a^n b,
the survival of a whole block,

    interleaved_tokens  (1 - a^{n+1}) / (1 - a) * (1 - Q^m) / (1 - Q) + Q^m             Theorem 3.2, Eq. 2
    interleaved_speedup the same / (1 + m (n c + d))                                    Theorem 3.4, Eq. 3

Pre-verified (HSDDW with fixed lengths), m inner rounds of n micro tokens (rate a, cost c) that the draft verifies (cost
d), every token that leaves passing the target with rate b. A round emits j <= n tokens with probability (1 - a) a^{j-1}
and n + 1 with probability a^n; with phi(x) = E[x^G] of the round's length G, the draft has generating function phi^m,
and E[(1 - b^{L+1}) / (1 - b)] over its length L is

    pre_verified_tokens  (1 - b phi(b)^m) / (1 - b)

The pre-verified form has the shape of Cascade Speculative Drafting's expected walltime improvement (arXiv 2312.11462)
and is derived here.
"""

from collections.abc import Callable
from itertools import product
from math import exp, sqrt


def expected_tokens(acceptance_rate: float, draft_length: int) -> float:
    """Mean tokens per target forward of a draft of fixed length K: 1 … K + 1."""
    return 1 + acceptance_rate * sum(_powers(acceptance_rate, draft_length))


def speedup(acceptance_rate: float, draft_length: int, cost: float) -> float:
    """How much faster than the target alone; `cost` is one draft forward in target forwards."""
    _check_costs(cost)
    return expected_tokens(acceptance_rate, draft_length) / (1 + cost * draft_length)


def best_draft_length(acceptance_rate: float, cost: float, *, longest: int = 64) -> int:
    """The K in 0 … longest of the largest speed-up, the smallest if several."""
    return max(range(longest + 1), key=lambda length: speedup(acceptance_rate, length, cost))


def pinsker(divergence: float) -> float:
    """Lower bound of the acceptance_rate, from KL(q || p) in nats; below 0 (vacuous) for KL > 2."""
    return 1 - sqrt(_divergence(divergence) / 2)


def bretagnolle_huber(divergence: float) -> float:
    """Lower bound of the acceptance_rate, from KL(q || p) in nats; never vacuous, tighter for KL above about 1.6."""
    return 1 - sqrt(1 - exp(-_divergence(divergence)))


def interleaved_tokens(small_rate: float, medium_rate: float, *, m: int, n: int) -> float:
    """Mean tokens per target forward of Chen's m and n: 1 … m (n + 1) + 1."""
    survival = small_rate**n * medium_rate
    return sum(_powers(small_rate, n + 1)) * sum(_powers(survival, m)) + survival**m


def interleaved_speedup(rates: tuple[float, float], costs: tuple[float, float], *, m: int, n: int) -> float:
    """How much faster than the target alone; rates and costs are (small, medium)."""
    _check_costs(*costs)
    return interleaved_tokens(*rates, m=m, n=n) / (1 + m * (n * costs[0] + costs[1]))


def pre_verified_tokens(inner_rate: float, outer_rate: float, *, m: int, n: int) -> float:
    """Mean tokens per target forward of m inner rounds of n micro tokens: at most m (n + 1) + 1."""
    if outer_rate == 1:
        return 1 + m * expected_tokens(inner_rate, n)
    phi = inner_length_generating(inner_rate, n)(outer_rate)
    return (1 - outer_rate * phi**m) / (1 - outer_rate)


def pre_verified_speedup(rates: tuple[float, float], costs: tuple[float, float], *, m: int, n: int) -> float:
    """How much faster than the target alone; rates: (micro under draft, draft under target), costs: (micro, draft)."""
    _check_costs(*costs)
    return pre_verified_tokens(*rates, m=m, n=n) / (1 + m * (n * costs[0] + costs[1]))


def inner_length_generating(inner_rate: float, n: int) -> Callable[[float], float]:
    """phi(x) = E[x^G] of the number G of tokens that one inner round emits."""
    powers = _powers(inner_rate, n)
    return lambda x: (
        (1 - inner_rate) * sum(power * x ** (j + 1) for j, power in enumerate(powers)) + inner_rate**n * x ** (n + 1)
    )


def best_schedule(speedup_of: Callable[..., float], *, most: int = 12) -> tuple[int, int]:
    """The (m, n) with m in 1 … most and n in 0 … most of the largest `speedup_of(m=m, n=n)`."""
    return max(product(range(1, most + 1), range(most + 1)), key=lambda pair: speedup_of(m=pair[0], n=pair[1]))


def _powers(rate: float, count: int) -> list[float]:
    """rate^0 … rate^(count - 1), of a probability."""
    if not 0 <= rate <= 1:
        raise ValueError(f"an acceptance rate is {rate}; a probability lies in [0, 1]")
    if count < 0:
        raise ValueError(f"a draft length is {count}; it must be at least 0")
    return [rate**power for power in range(count)]


def _check_costs(*costs: float) -> None:
    if min(costs) < 0:
        raise ValueError(f"a cost is {min(costs)} target forwards; it must be at least 0")


def _divergence(divergence: float) -> float:
    if not divergence >= 0:
        raise ValueError(f"a divergence is {divergence} nats; KL(q || p) is at least 0")
    return divergence
