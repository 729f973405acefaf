"""Law 4.13: the rule of law 4.11 for a batch, whose sequences draft in lockstep and are verified together.

    t_draft(n)    a draft step of n sequences            t_target(m)    a verification of m tokens, one of each sequence
                  among them

With lambda the batch's tokens per second, worth_r = S_r * g(a_r) (as in `decode.policies.auto`) and m tokens
drafted so far, those sequences continue that together gain most from one more step:

    the G of the largest  sum over r in G of worth_r - lambda * (t_target(m + |G|) - t_target(m) + t_draft(|G|)) >= 0

A stopped sequence stays stopped until the next round. So the tokens of one sequence decide whether another
continues to draft, never whether a drawn token is verified: law 4.3 holds.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

import numpy as np

from decode.policies.auto import LONGEST, Auto
from decode.policies.base import AfterDraw, BeforeDraw, Head, Number, Outcome, Policy, PolicyRun, State
from decode.policies.learning import learned_from
from decode.policies.scores import ScoringPolicy


@dataclass(frozen=True)
class Curve:
    """Seconds by a number of sequences or tokens: linear between points, constant before the first, and after the
    last point with the slope of the last segment.
    """

    numbers: tuple[float | int, ...]
    seconds: tuple[float | int, ...]

    def __post_init__(self) -> None:
        numbers = np.array(self.numbers)
        seconds = np.array(self.seconds)
        is_rising = len(numbers) == len(seconds) > 0 and bool((np.diff(numbers) > 0).all())
        if not is_rising or not ((seconds > 0) & (seconds < inf)).all():
            raise ValueError(
                f"a cost curve has numbers {list(self.numbers)} and seconds {list(self.seconds)}; use rising numbers, "
                "and as many positive seconds"
            )

    @classmethod
    def line(cls, first_s: float | int, each_s: float | int = 0.0) -> "Curve":
        """first_s for one, and each_s for every further one."""
        return cls((1.0, 2.0), (first_s, first_s + each_s))

    def __call__(self, number: Number) -> Number:
        number = np.asarray(number, dtype=np.float64)
        within = np.interp(number, self.numbers, self.seconds)
        if len(self.numbers) == 1:
            return within
        before, last = self.numbers[-2:]
        before_s, last_s = self.seconds[-2:]
        return within + np.maximum(number - last, 0.0) * (last_s - before_s) / (last - before)

    def plus(self, seconds: float) -> "Curve":
        """This curve, raised by `seconds` everywhere."""
        return Curve(self.numbers, tuple(seconds_ + seconds for seconds_ in self.seconds))


class BatchCosts(NamedTuple):
    """The two curves of law 4.13."""

    draft: Curve
    target: Curve

    def round_s(self, steps: Number, num_tokens: Number) -> Number:
        """Seconds of a round with these numbers of sequences in its draft steps, and so many tokens verified."""
        return self.draft(steps).sum() + self.target(num_tokens)


@dataclass(frozen=True)
class BatchAuto(ScoringPolicy):
    """`auto` in a batch, in which a `Controller` chooses sequences by their `expected_tokens`.

    Attributes:
        head, next_mean, index_offset, index_slope, first_index: as in `Auto`.
        costs: the two curves; t_draft includes this rule's own work.
        batch_size: number of sequences, for the prior of lambda.
        throughput: lambda in tokens per second, of the whole batch; None: learned from `costs` and emitted tokens.
        prior_rounds: weight of the prior of lambda, in rounds.
        is_learning: refit the head's calibration, for each sequence from its own rounds.
        block_size: tokens of a block, which is one forward (DSpark), paid before the round: a further token then costs
            only its verification. With a prefix head, such as the draft's own confidence head, the next token's
            acceptance a_r is known before it is drawn, and worth_r = S_r * a_r. None: each token has its own forward.
    """

    head: Head
    costs: BatchCosts
    batch_size: int = 1
    throughput: float | None = None
    next_mean: float = 0.6
    index_offset: float = 0.6
    index_slope: float = 0.0
    first_index: float = 0.6
    prior_rounds: float = 16.0
    is_learning: bool | None = False
    block_size: int | None = None

    # the state of one sequence: (survival, expected_tokens, learned calibration)

    def start(self) -> State:
        return 1.0, 0.0, self.initial_calibration

    def begin(self, state: State) -> State:
        survival, _, learned = state
        # a fed-time head's first_index is worth of the second token; the first one alone is worth next_mean
        return 1.0 + 0.0 * survival, 0.0 * survival + max(self.first_index, self.next_mean), learned

    def after(self, state: State, drawn: AfterDraw) -> tuple[State, Number]:
        survival, _, learned = state
        newest = self.score(learned, drawn)
        survival = survival * newest
        index = self.index_offset + self.index_slope * newest
        if self.scores_late:  # nothing is scored yet at the first token
            index = np.where(drawn.position == 0, self.first_index, index)
        return (survival, survival * index, learned), False

    def end(self, state: State, outcome: Outcome) -> State:
        survival, expected_tokens, learned = state
        return survival, expected_tokens, learned_from(learned, outcome.feedback)

    @property
    def looks_ahead(self) -> bool:
        """Whether `expected_tokens` needs the signals of the next step before its draw."""
        return self.block_size is not None and self.head.timing == "prefix"

    def expected_tokens(self, state: State, signals: BeforeDraw | None = None) -> Number:
        """worth_r; `signals` are those of the next step before its draw, and None unless the rule `looks_ahead`."""
        return state[1] if signals is None else state[0] * self.score(state[2], signals)

    def step_cost_s(self, numbers: Number, num_tokens: int) -> Number:
        """Seconds of one more draft step for `numbers` sequences if `num_tokens` are verified without it."""
        verifying_s = self.costs.target(num_tokens + numbers) - self.costs.target(num_tokens)
        return verifying_s if self.block_size else verifying_s + self.costs.draft(numbers)

    def prior(self) -> float:
        """lambda of the best fixed length, if every token were accepted with probability `next_mean`."""
        lengths = np.arange((self.block_size or LONGEST) + 1)
        tokens = self.batch_size * np.cumsum(self.next_mean**lengths)
        draft_s = (1 if self.block_size else lengths) * self.costs.draft(self.batch_size)
        return float((tokens / (draft_s + self.costs.target(self.batch_size * (lengths + 1)))).max())


class Controller:
    """Decides for a batch; subclasses say what a step costs, and what a second is worth."""

    throughput: float
    """lambda, in tokens per second of the whole batch."""
    step_cost_s: Callable[[Number, int], Number]
    """Seconds of one more draft step for so many sequences, if so many tokens are verified without it."""

    def continuing(self, expected_tokens: Number, num_tokens: int) -> Number:
        """The sequences that together gain most from one more step, bool [sequence]; none if every set loses.

        Args:
            expected_tokens: [sequence] tokens that the step is expected to add to each.
            num_tokens: tokens that the whole batch feeds the verification if none of them continues.
        """
        order = np.argsort(-expected_tokens, kind="stable")
        sizes = np.arange(1, len(expected_tokens) + 1)
        gain = np.cumsum(expected_tokens[order]) - self.throughput * self.step_cost_s(sizes, num_tokens)
        best = int(gain.argmax())
        result = np.zeros(len(expected_tokens), dtype=bool)
        result[order[: best + 1]] = gain[best] >= 0
        return result

    def stop_losing(self, runs: Sequence[PolicyRun], num_tokens: int) -> None:
        """Stop those of these drafts whose next step does not pay."""
        values = [run.policy.expected_tokens(run.state) for run in runs]  # type: ignore[attr-defined]
        for run, continues in zip(runs, self.continuing(np.array(values, dtype=float), num_tokens), strict=True):
            if not continues:
                run.stop("policy")


class BatchController(Controller):
    """A run of a batch whose costs are given, which learns lambda: tokens over seconds."""

    def __init__(self, rule: BatchAuto) -> None:
        self.rule = rule
        self.step_cost_s = rule.step_cost_s
        rate = rule.prior() if rule.throughput is None else rule.throughput
        self.seconds = rule.prior_rounds * float(rule.costs.target(rule.batch_size))
        self.tokens = rate * self.seconds

    @property
    def throughput(self) -> float:  # type: ignore[override]
        return self.tokens / self.seconds

    def end(self, steps: Sequence[int], num_tokens: int, num_emitted: int) -> None:
        """Learn lambda from a finished round."""
        if self.rule.throughput is None:
            self.tokens += num_emitted
            self.seconds += float(self.rule.costs.round_s(np.array(steps, dtype=np.float64), num_tokens))


def batched(policy: Policy, batch_size: int, costs: BatchCosts | None = None) -> Policy:
    """The policy for a batch: the batch rule for `auto`, with `costs` or lines from its times; else unchanged."""
    if not isinstance(policy, Auto):
        return policy
    costs = costs or BatchCosts(Curve.line(policy.t_draft_s), Curve.line(policy.t_target_s, policy.t_verify_s))
    return BatchAuto(
        policy.head,
        costs,
        batch_size,
        next_mean=policy.next_mean,
        index_offset=policy.index_offset,
        index_slope=policy.index_slope,
        first_index=policy.first_index,
        is_learning=policy.is_learning,
    )
