"""Law 4.3: what a stopping policy may look at, and when.

A policy ends a draft in one of three ways, none of which lets the value of a drawn token decide whether that token is
verified:

    limit        before the round: a number of tokens, from the past alone                 (no forward is paid for what
                 is not drafted)
    stop_before  after the draft's forward, before the draw: distributions and earlier tokens   (B in law 4.3; the
        forward is paid)
    after        after the draw: the drawn token is kept whatever the answer; if that is to stop, it is the last   (A in
                 law 4.3)

There is no way to say "drop the token just drawn", which would change the output distribution. Every method is
*elementwise*: it works on Python floats (the loop, one sequence) and, unchanged, on numpy arrays (replay, one lane per
setting and prompt), so branch with `numpy.where` and combine conditions with `&` and `|`. State is a tuple of numbers,
or a NamedTuple of them or of such tuples, that each method returns anew; parameters may be arrays.

A policy of your own, in full:

    @dataclass(frozen=True)
    class Unsure(Policy):
        \"""Keep the token, stop after it, when it or its whole distribution looks unsure.\"""

        min_token_prob: float = 0.3
        max_entropy: float = 2.0
        signals = frozenset({"token_prob", "entropy"})

        def after(self, state, drawn):
            return state, (drawn.token_prob < self.min_token_prob) | (drawn.entropy > self.max_entropy)
"""

from collections.abc import Callable, Mapping, Sequence
from math import inf
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from decode.policies.checks import check_kinds

if TYPE_CHECKING:
    from heads.model.head import AcceptanceHead

Number = Any
"""A float, or an array of one number per lane."""
State = tuple[Any, ...]
"""A policy's state: a tuple of numbers, or of states."""
JOINT = " & "
"""Between the parts of a `stop_kind`."""


class BeforeDraw(NamedTuple):
    """Signals that are known once the draft's forward has run and no token is drawn yet. Signals are those of the
    untruncated temperature-1 q.
    """

    position: Number
    """Tokens drafted so far in this round."""
    entropy: Number
    """H(q) in nats."""
    max_prob: Number
    """max_v q(v)."""
    fed_logit: Number
    """The fed-time head's logit for the token drafted before; +inf (probability 1) for the first, which has no drafted
    predecessor.
    """
    prefix_logit: Number
    """The prefix head's logit for the token that is to be drawn, whichever it will be."""
    top_prob: Number = 0.0
    """max_v q(v) over the sum of the ten largest q(v), which is what llama.cpp takes for it."""
    confidence_logit: Number = 0.0
    """Logit that a DSpark draft's own head gives to the acceptance rate of the token that is to be drawn."""


class AfterDraw(NamedTuple):
    """Signals that are known once the token is drawn, and kept; those that nobody reads have these defaults."""

    position: Number
    entropy: Number = 0.0
    max_prob: Number = 0.0
    fed_logit: Number = inf
    prefix_logit: Number = 0.0
    token_prob: Number = 0.0
    """q(y) of the drawn token y."""
    drawn_logit: Number = 0.0
    """The drawn-time head's logit for y."""
    top_prob: Number = 0.0
    confidence_logit: Number = 0.0

    @property
    def before(self) -> BeforeDraw:
        """The signals among these that were known before the draw."""
        return BeforeDraw(
            self.position,
            self.entropy,
            self.max_prob,
            self.fed_logit,
            self.prefix_logit,
            self.top_prob,
            self.confidence_logit,
        )


class Outcome(NamedTuple):
    """Result of a round, as verification told it."""

    num_drafted: Number
    num_accepted: Number
    num_allowed: Number
    """The most tokens that the loop let this round draft."""
    rejected_entropy: Number
    """H(q) where the first rejected token was drawn; 0 where none was rejected."""
    feedback: State = ()
    """Sum of `Policy.feedback` over the accepted tokens and the first rejected one."""


class Policy:
    """When to stop drafting. Subclasses are frozen dataclasses that override what they need."""

    signals: ClassVar[frozenset[str]] = frozenset()
    """Fields of `AfterDraw` that the policy reads; the loop computes no other."""
    grid: ClassVar[Mapping[str, Sequence[Any]]] = MappingProxyType({})
    """Parameter -> values that an evaluation compares, of a policy that is written module:Class; none: its defaults."""
    fed_head: "AcceptanceHead | None" = None
    drawn_head: "AcceptanceHead | None" = None
    prefix_head: "AcceptanceHead | None" = None

    def __post_init__(self) -> None:
        """Refuse parameters of the wrong type; a subclass with a `__post_init__` calls this one first.

        Raises:
            ValueError: a parameter with a number as its default that is no number, or one that is neither true nor
                false where it has to be.
        """
        check_kinds(self)

    @property
    def heads(self) -> "tuple[AcceptanceHead, ...]":
        """The heads that it asks for scores."""
        return tuple(head for head in (self.fed_head, self.drawn_head, self.prefix_head) if head is not None)

    @property
    def stops_before(self) -> bool:
        """Whether `stop_before` may ever say so; where not, nobody asks it."""
        return type(self).stop_before is not Policy.stop_before

    @property
    def has_memory(self) -> bool:
        """Whether `end` does anything; where not, replay spares itself the outcomes."""
        return type(self).end is not Policy.end

    @property
    def stop_kind(self) -> str:
        """Name under which the cost of its stop goes (law 4.9): policies of one kind do the same work in a draft step;
        "" is none.

        Signals and heads in their order, with JOINT between them.
        """
        return JOINT.join(sorted(self.signals & frozenset(AfterDraw._fields)))

    def start(self) -> State:
        """State at the start of a generation."""
        return ()

    def begin(self, state: State) -> State:
        """State at the start of a round."""
        return state

    def limit(self, state: State) -> Number:
        """The most tokens to draft in this round; 0 skips the draft."""
        return float("inf")

    def stop_before(self, state: State, seen: BeforeDraw) -> Number:
        """Is nothing more to be drawn in this round?"""
        return False

    def after(self, state: State, drawn: AfterDraw) -> tuple[State, Number]:
        """The state with the drawn token in it, and True to stop after it."""
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


def mapped(function: Callable[..., Any], *states: State) -> State:
    """The function of each number of the states, as a state of the same type: its numbers may have names, and be
    states.
    """
    values = (
        mapped(function, *each) if isinstance(each[0], tuple) else function(*each) for each in zip(*states, strict=True)
    )
    kind: Any = type(states[0])
    return kind._make(values) if hasattr(kind, "_make") else tuple(values)
