"""Law 4.3: what a stopping policy may look at, and when.

A policy ends a draft in one of three ways:

    limit        before the round: a number of tokens, from the past alone; no forward is paid for the others
    stop_before  after the draft's forward and before the draw: distributions and earlier tokens    (B in law 4.3)
    after        after the draw: the drawn token is kept in any case, and may be the last           (A in law 4.3)

There is no way to drop the token just drawn, which would change the output distribution. Every method is
*elementwise*: it works on Python floats (the loop, one sequence) and unchanged on numpy arrays (replay, one number per
setting and prompt), so branch with `numpy.where` and combine conditions with `&` and `|`. Parameters may be arrays. The
state is a tuple of numbers or of such tuples; each method returns a new one. docs/extending.md has a complete policy.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import Field, fields
from functools import partial, reduce
from math import inf
from operator import add
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import numpy as np

Number = Any
"""A float, or an array of one number per lane."""
State = tuple[Any, ...]
"""A policy's state: a tuple of numbers, or of states."""
Head = Any
"""An `AcceptanceHead`, or a substitute for one in replay."""
JOINT = " & "
"""Between the parts of a `stop_kind`."""


class BeforeDraw(NamedTuple):
    """Signals of the untruncated q at temperature 1 that are known after the draft's forward and before the draw."""

    position: Number
    """Tokens drafted so far in this round."""
    entropy: Number
    """H(q) in nats."""
    max_prob: Number
    """max_v q(v)."""
    fed_logit: Number
    """The fed-time head's logit for the token drafted before; +inf (probability 1) at the first token."""
    prefix_logit: Number
    """The prefix head's logit for the token to be drawn, whichever it will be."""
    top_prob: Number = 0.0
    """max_v q(v) over the sum of the ten largest q(v), as llama.cpp computes it."""
    confidence_logit: Number = 0.0
    """A DSpark draft's own logit of the acceptance rate of the token to be drawn."""


class AfterDraw(NamedTuple):
    """Signals that are known once the token is drawn: three more. Those that nobody reads have these defaults."""

    position: Number
    entropy: Number = 0.0
    max_prob: Number = 0.0
    fed_logit: Number = inf
    prefix_logit: Number = 0.0
    top_prob: Number = 0.0
    confidence_logit: Number = 0.0
    token_prob: Number = 0.0
    """q(y) of the drawn token y."""
    drawn_logit: Number = 0.0
    """The drawn-time head's logit for y."""
    logit_token_prob: Number = 0.0
    """log(q(y) / (1 - q(y))), within ±16, to full precision where q(y) is near 1."""

    @property
    def before(self) -> BeforeDraw:
        """The signals that were known before the draw."""
        return BeforeDraw(*self[:-3])


class Outcome(NamedTuple):
    """Result of a round's verification."""

    num_drafted: Number
    num_accepted: Number
    num_allowed: Number
    """Maximum draft length that the loop set."""
    rejected_entropy: Number
    """H(q) where the first rejected token was drawn; 0 where none was rejected."""
    feedback: State = ()
    """Sum of `Policy.feedback` over the accepted tokens and the first rejected one."""


class Policy:
    """When to stop drafting. Subclasses are frozen dataclasses that override what they need."""

    signals: ClassVar[frozenset[str]] = frozenset()
    """Fields of `AfterDraw` that the policy reads; the loop computes no other."""
    grid: ClassVar[Mapping[str, Sequence[object]]] = MappingProxyType({})
    """Of a custom policy (module:Class): parameter -> values that an evaluation compares; empty: its defaults alone."""
    ranges: ClassVar[tuple[tuple[str, float, float], ...]] = ()
    """(parameter, least value, largest value); a parameter whose default is an int takes whole numbers."""
    is_trained: ClassVar[bool] = False
    """Whether a policy that is written module:Class reads a network that was trained, so that an evaluation does
    not call it training-free.
    """
    heads: tuple[Head, ...] = ()
    """The heads whose scores it reads, at most one of each `timing_of`."""

    def __post_init__(self) -> None:
        """Check the parameters; a subclass with a `__post_init__` calls this one first.

        Raises:
            ValueError: a parameter of another type than its default, or out of its range.
        """
        limits = {name: (least, most) for name, least, most in self.ranges}
        for parameter in fields(self):  # type: ignore[arg-type]
            _check(parameter, getattr(self, parameter.name), *limits.get(parameter.name, (-inf, inf)))

    @property
    def stops_before(self) -> bool:
        """Whether `stop_before` is ever true; otherwise it is not called."""
        return type(self).stop_before is not Policy.stop_before

    @property
    def has_memory(self) -> bool:
        """Whether `end` does anything; otherwise replay computes no outcomes."""
        return type(self).end is not Policy.end

    @property
    def stop_kind(self) -> str:
        """Signals and heads that it reads, joined by JOINT. Policies of one kind pay the same for a stop (law 4.9)."""
        return JOINT.join(sorted(self.signals & frozenset(AfterDraw._fields)))

    def start(self) -> State:
        """State at the start of a generation."""
        return ()

    def begin(self, state: State) -> State:
        """State at the start of a round."""
        return state

    def limit(self, state: State) -> Number:
        """Maximum draft length of this round; 0 skips the draft."""
        return float("inf")

    def stop_before(self, state: State, signals: BeforeDraw) -> Number:
        """True to draw no further token in this round."""
        return False

    def after(self, state: State, drawn: AfterDraw) -> tuple[State, Number]:
        """The state that includes the drawn token, and True to stop after it."""
        return state, False

    @property
    def zero_feedback(self) -> State:
        """Feedback of a round without verified tokens; () if the policy takes no feedback."""
        return ()

    def feedback(self, state: State, drawn: AfterDraw, acceptance_prob: Number) -> State:
        """Numbers that the policy learns from one verified token; they are summed over the tokens of a round.

        Args:
            state: the state that `after` received with the token, which does not include that token.
            drawn: the token as `after` received it.
            acceptance_prob: min(1, p(y) / q(y)); 0 or 1 at temperature 0.
        """
        return ()

    def end(self, state: State, outcome: Outcome) -> State:
        """The state after the round's verification."""
        return state


def timing_of(head: Head) -> str:
    """When a head scores a token in a loop: fed, drawn (also a candidate head) or prefix."""
    return "drawn" if head.timing == "candidate" else head.timing


class PolicyRun:
    """One policy through one generation. A round is `begin`, then `take` for each token, then `end`."""

    stop_reason = "limit"
    """Why the draft of this round ended, or will: limit, policy, eos."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.state = policy.start()
        self.takes_feedback = bool(policy.zero_feedback)
        self._may_stop_before = policy.stops_before
        self.steps: list[tuple[State, AfterDraw]] = []
        """Arguments of `Policy.after` for each kept token of the round."""
        self.is_going = False
        """Whether the policy wants another token in this round."""

    def begin(self, num_allowed: int, room: float = inf) -> int:
        """Begin a round; returns its maximum draft length, at most `num_allowed` and the `room` in the context."""
        self.state = self._first_state = self.policy.begin(self.state)
        self._num_allowed = num_allowed
        self.num_tokens = int(min(self.policy.limit(self.state), num_allowed, room))
        self.steps = []
        self.stop_reason = "limit"
        self.is_going = self.num_tokens > 0
        return self.num_tokens

    def take(self, drawn: AfterDraw, *, is_eos: bool = False) -> bool:
        """Show the policy a drawn token: returns whether it is kept, and sets `is_going` and `stop_reason`."""
        if self.stops_before(drawn):
            self.stop("policy")
            return False
        stops = self.keep(drawn)
        if is_eos or stops:
            self.stop("eos" if is_eos else "policy")
        elif len(self.steps) >= self.num_tokens:
            self.is_going = False
        return True

    def stop(self, reason: str) -> None:
        """End the draft of this round."""
        self.stop_reason = reason
        self.is_going = False

    def stops_before(self, drawn: AfterDraw) -> bool:
        """Whether the policy ends the draft before this token, which it is not shown."""
        return self._may_stop_before and bool(self.policy.stop_before(self.state, drawn.before))

    def keep(self, drawn: AfterDraw) -> bool:
        """Add a token to the draft; returns whether the policy stops after it."""
        self.steps.append((self.state, drawn))
        self.state, stops = self.policy.after(self.state, drawn)
        return bool(stops)

    def branched(self, *, is_longer: bool) -> "PolicyRun":
        """A copy for another path of a tree, which extends this path (`is_longer`) or starts the round over."""
        run = copy(self)
        run.steps = [*self.steps] if is_longer else []
        if not is_longer:
            run.state = self._first_state
        return run

    def end(
        self,
        num_drafted: int,
        num_accepted: int,
        acceptance_probs: Iterable[float] = (),
        *,
        rejected_entropy: float | None = None,
    ) -> None:
        """Report a round's verification: acceptance probabilities of the first tokens, as far as they are known,
        and H(q) at the first rejected token (None: as the policy saw it).
        """
        if rejected_entropy is None:
            rejected_entropy = self.steps[num_accepted][1].entropy if num_accepted < num_drafted else 0.0
        verified = zip(self.steps, acceptance_probs, strict=False)
        feedback = (self.policy.feedback(*step, prob) for step, prob in verified)
        total = reduce(partial(mapped, add), feedback, self.policy.zero_feedback)
        outcome = Outcome(num_drafted, num_accepted, self._num_allowed, rejected_entropy, total)
        self.state = self.policy.end(self.state, outcome)


def mapped(function: Callable[..., Number], *states: State) -> State:
    """The function of each number of the states, as a state of the same type."""
    values = (
        mapped(function, *each) if isinstance(each[0], tuple) else function(*each) for each in zip(*states, strict=True)
    )
    return getattr(type(states[0]), "_make", tuple)(values)  # of a NamedTuple, or of a plain tuple


def _check(parameter: Field[object], value: object, least: Number, most: Number) -> None:
    """Raise unless the value, or each number of an array, is of the type of the default and within the range."""
    default = parameter.default
    annotation = str(parameter.type)
    if value is default or (value is None and "None" in annotation):
        return
    if "bool" in annotation or isinstance(default, bool):
        is_valid = np.asarray(value).dtype.kind == "b"
        expected = "true or false"
    elif isinstance(default, int | float) or least > -inf:
        values = np.asarray(value)
        is_count = isinstance(default, int) and least > -inf
        is_valid = values.dtype.kind in "iuf" and bool(np.all((values >= least) & (values <= most)))  # no NaN is
        is_valid = is_valid and not (is_count and np.any(np.isinf(values) | (values != np.floor(values))))
        expected = "a whole number" if is_count else "a probability" if most == 1 else "a number"
        if least > -inf:
            expected += f", at least {least}" if most == inf else f", between {least} and {most}"
    else:
        return
    if not is_valid:
        raise ValueError(f"{parameter.name} is {value!r}; it must be {expected}")
