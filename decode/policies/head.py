"""Stop on what a trained head predicts: SpecDec++ (arXiv 2405.19715, Algorithm 2; design law 4.8)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from decode.policies.auto import Auto
from decode.policies.base import AfterDraw, Number, Policy, State
from decode.policies.confidence import check_unit
from decode.policies.scores import sigmoid

if TYPE_CHECKING:
    from heads.model.head import AcceptanceHead


@dataclass(frozen=True)
class HeadPolicy(Policy):
    """Keep the token, stop after it when 1 - (product of predicted acceptance probabilities so far) > max_rejection_prob.

    With a fed-time head, the forward that yields q_i also scores y_{i-1}: at y_i the product covers j < i, and the first drafted token has
    no scored predecessor. With a drawn-time head the product covers j <= i.

    Attributes:
        head: fed-time or drawn-time; a second head of the other timing may go into `also`: the lagging product is then corrected by it, in
            that the newest token is scored by the drawn-time head and all earlier ones by the fed-time head.
        max_rejection_prob: the threshold; 0.7 in the paper, on raw probabilities of a head trained with reject weight 6. "auto" is the rule
            of law 4.11.
        is_calibrated: use the head's calibrated probabilities in place of the raw ones.
        min_draft_length: no stop before this many tokens. The paper's bounds are 2 and 20: a fed-time head cannot stop before 2 anyway, and
            the upper bound is the loop's max_draft_length.
    """

    head: AcceptanceHead
    max_rejection_prob: Number = 0.7
    is_calibrated: bool = False
    min_draft_length: Number = 1
    also: AcceptanceHead | None = None

    def __new__(cls, head: Any = None, max_rejection_prob: Any = 0.7, **others: Any) -> Any:
        """`max_rejection_prob="auto"` makes the rule of law 4.11 from what `python -m decode tune` wrote into the head's config."""
        if isinstance(max_rejection_prob, str) and max_rejection_prob == "auto":
            return Auto.recommended(head, **others)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        check_unit("max_rejection_prob", self.max_rejection_prob)
        if self.also is not None and self.also.timing == self.head.timing:
            raise ValueError(f"both heads are {self.head.timing}-time; `also` takes a head of the other timing")

    @cached_property
    def fed_head(self) -> AcceptanceHead | None:  # type: ignore[override]
        return self._of_timing("fed")

    @cached_property
    def drawn_head(self) -> AcceptanceHead | None:  # type: ignore[override]
        return self._of_timing("drawn")

    @cached_property
    def signals(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset(f"{head.timing}_logit" for head in (self.head, self.also) if head is not None)

    def start(self) -> State:
        return (1.0,)

    def begin(self, state: State) -> State:
        return (1.0,)

    def after(self, state: State, drawn: AfterDraw) -> tuple[State, Number]:
        survival = state[0]
        if self.fed_head is not None:
            survival = survival * self._prob(self.fed_head, drawn.fed_logit)
        kept = survival
        if self.drawn_head is not None:
            survival = survival * self._prob(self.drawn_head, drawn.drawn_logit)
            kept = survival if self.fed_head is None else kept
        stop = (1.0 - survival > self.max_rejection_prob) & (drawn.position + 1 >= self.min_draft_length)
        return (kept,), stop

    def _of_timing(self, timing: str) -> AcceptanceHead | None:
        return next((head for head in (self.head, self.also) if head is not None and head.timing == timing), None)

    def _prob(self, head: AcceptanceHead, logit: Number) -> Number:
        """sigmoid of the raw or of the calibrated logit."""
        logit = head.calibrated_logit(logit) if self.is_calibrated else logit
        return sigmoid(logit)
