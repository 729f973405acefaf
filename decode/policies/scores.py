"""What trained heads predict of a draft: the probability that its tokens survive verification (laws 4.8, 4.8b, 4.8c).

fed-time head       the forward that yields q_i scores y_{i-1}: at y_i the product covers j < i, and the first token has
                    no score yet
drawn-time head     scores y_i when it is drawn: the product covers j <= i
prefix head         scores y_i before it is drawn, whichever it will be: the product covers j <= i, and is known before
                    the draw
candidate head      as a drawn-time head, for the candidates of a tree
both                the fed-time head scores every token once it has been fed, and the drawn-time head only the newest:
                    its score counts in this token's decision and is then replaced by the fed-time head's
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from decode.policies.base import JOINT, AfterDraw, BeforeDraw, Number, Policy, State
from decode.policies.learning import FIRST, NOTHING, clip, logit_of, score_of, sigmoid, token_feedback

if TYPE_CHECKING:
    from heads.model.head import AcceptanceHead

Scale = tuple[float, float]
"""(shift, temperature) of a head: calibrated logit = (logit + shift) / temperature."""


def timing_of(head: Any) -> str:
    """When a head scores a token in a loop: fed, drawn (also a candidate head) or prefix."""
    return "drawn" if head.timing == "candidate" else head.timing


class ScoringPolicy(Policy):
    """A policy that reads one head, or two of different timings. Subclasses are dataclasses with these fields.

    Attributes:
        head: of any timing.
        also: a drawn-time head beside a fed-time one, or the other way round.
        is_calibrated: calibrated probabilities; False: raw ones.
        is_learning: refit the head's calibration during generation (`decode.policies.learning`).
    """

    head: AcceptanceHead
    also: AcceptanceHead | None
    is_calibrated: bool = True
    is_learning: bool | None = False

    def __post_init__(self) -> None:
        """Raises ValueError for heads that cannot be combined, or cannot learn."""
        super().__post_init__()
        if self.is_learning and not self.can_learn:
            kind = f"{self.head.timing}-time head" if self.also is None else "pair of heads"
            raise ValueError(
                f"is_learning is for one drawn-time, prefix or candidate head, and this is a {kind}; leave it out"
            )
        if self.also is None:
            return
        if alone := {"prefix", "candidate"} & {self.head.timing, self.also.timing}:
            raise ValueError(
                f"a {alone.pop()} head cannot be combined; `also` is for a fed-time and a drawn-time head together"
            )
        if self.also.timing == self.head.timing:
            raise ValueError(f"both heads are {self.head.timing}-time; `also` takes a head of the other timing")

    @cached_property
    def _by_timing(self) -> dict[str, AcceptanceHead]:
        return {timing_of(head): head for head in (self.head, self.also) if head is not None}

    @property
    def fed_head(self) -> AcceptanceHead | None:  # type: ignore[override]
        return self._by_timing.get("fed")

    @property
    def drawn_head(self) -> AcceptanceHead | None:  # type: ignore[override]
        return self._by_timing.get("drawn")

    @property
    def prefix_head(self) -> AcceptanceHead | None:  # type: ignore[override]
        return self._by_timing.get("prefix")

    @cached_property
    def stops_before(self) -> bool:  # type: ignore[override]
        return self.head.timing == "prefix" and super().stops_before

    @property
    def signals(self) -> frozenset[str]:  # type: ignore[override]
        logits = frozenset(f"{timing}_logit" for timing in self._by_timing)
        return logits | ({self._own_signal} if self.is_learning else frozenset())

    @property
    def stop_kind(self) -> str:
        """The shapes of the heads; a substitute for a head in replay has none and costs nothing."""
        return JOINT.join(sorted(head.shape_name for head in self._by_timing.values() if head.shape_name))

    @property
    def is_lagging(self) -> bool:
        """Whether the token just drawn has no score yet."""
        return self._scales[1] is None

    @property
    def can_learn(self) -> bool:
        """Only scores that are known when the token is drawn can be refitted, so not those of a fed-time head."""
        return self.head.timing != "fed" and self.also is None

    @property
    def initial_calibration(self) -> State:
        """The learned state at the start of a generation; () where nothing is learned."""
        return FIRST if self.is_learning else ()

    @property
    def zero_feedback(self) -> State:
        return NOTHING if self.is_learning else ()

    def scored(self, carried: Number, learned: Any, drawn: AfterDraw) -> tuple[Number, Number, Number]:
        """(product of all scores with the drawn token's, what the next token starts from, newest score).

        The loop calls this once per drafted token: a NamedTuple and further calls would double its time.

        Args:
            carried: 1 at the start of a round, then the second number of the result for the token before.
            learned: state of `decode.policies.learning`, by which the token is scored if the policy learns.
            drawn: signals of the token.
        """
        if self.is_learning:
            newest: Number = score_of(learned.weights, self._inputs(drawn))
            product = carried * newest
            return product, product, newest
        fed, late = self._scales
        newest = 1.0
        if fed is not None:
            newest = sigmoid((drawn.fed_logit + fed[0]) / fed[1])
            carried = carried * newest
        if late is None:
            return carried, carried, newest
        newest = sigmoid(((drawn.prefix_logit if self._is_prefix else drawn.drawn_logit) + late[0]) / late[1])
        product = carried * newest
        return product, product if fed is None else carried, newest

    def scored_before(self, carried: Number, learned: Any, signals: BeforeDraw) -> Number:
        """Product of scores with the next token's, by a prefix head, before the token is drawn; see `scored`."""
        if self.is_learning:
            return carried * score_of(learned.weights, self._inputs(signals))
        _, late = self._scales
        assert late is not None
        return carried * sigmoid((signals.prefix_logit + late[0]) / late[1])

    def feedback(self, state: Any, drawn: AfterDraw, acceptance_prob: Number) -> State:
        return token_feedback(state[-1].weights, self._inputs(drawn), acceptance_prob) if self.is_learning else ()

    def _inputs(self, signals: Any) -> tuple[Number, Number]:
        """Inputs of the regression for the token: the head's calibrated logit, and that of `_own_signal`."""
        shift, temperature = self._calibration
        logit = signals.prefix_logit if self._is_prefix else signals.drawn_logit
        return clip((logit + shift) / temperature), logit_of(getattr(signals, self._own_signal))

    @property
    def _own_signal(self) -> str:
        """The draft's probability that the regression reads beside the head: q(y), or with a prefix head max q."""
        return "max_prob" if self._is_prefix else "token_prob"

    @cached_property
    def _is_prefix(self) -> bool:
        return self.head.timing == "prefix"

    @cached_property
    def _calibration(self) -> Scale:
        """Shift and temperature of `head`; cached, since a head computes them at each access."""
        return self.head.calibration_shift, self.head.temperature

    @cached_property
    def _scales(self) -> tuple[Scale | None, Scale | None]:
        """Shift and temperature of the fed-time head, and of the head that scores the newest token."""

        def scale(head: AcceptanceHead | None) -> Scale | None:
            if head is None:
                return None
            return (head.calibration_shift, head.temperature) if self.is_calibrated else (0.0, 1.0)

        return scale(self.fed_head), scale(self.drawn_head or self.prefix_head)
