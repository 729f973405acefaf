"""What trained heads say of a draft: the probability that its tokens survive verification (design laws 4.8, 4.8b and
4.8c).

fed-time head       the forward that yields q_i scores y_{i-1}: at y_i the product covers j < i, and the first token has
                    no score yet
drawn-time head     scores y_i when it is drawn: the product covers j <= i
prefix head         scores y_i before it is drawn, whichever it will be: the product covers j <= i, and is known before
                    the draw
candidate head      as a drawn-time head, of the candidates of a tree
both                the fed-time head scores every token once it has been fed, and the drawn-time head only the newest:
                    its score
                    takes part in this token's decision and is then dropped in favour of the fed-time head's
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from decode.policies.base import JOINT, AfterDraw, BeforeDraw, Number, Policy, State
from decode.policies.learning import LEARNER, NOTHING, LessonInputs, cut, lesson_of, logit_of, score_of, sigmoid

if TYPE_CHECKING:
    from heads.model.head import AcceptanceHead


_MOMENTS = {"candidate": "drawn"}


def moment_of(head: Any) -> str:
    """When a head is asked: fed, drawn or prefix, as its timing says; a candidate head when a drawn-time one is."""
    return _MOMENTS.get(head.timing, head.timing)


class _Calibration(NamedTuple):
    """Calibrated logit = (logit + shift) / temperature."""

    shift: float
    temperature: float


@dataclass(frozen=True)
class Scores:
    """A head, or two of different timings, as one source of scores.

    Attributes:
        head: of any timing.
        also: beside a fed-time head a drawn-time one, or the other way round.
        is_calibrated: calibrated probabilities; False: raw ones.
    """

    head: AcceptanceHead
    also: AcceptanceHead | None = None
    is_calibrated: bool = True

    def __post_init__(self) -> None:
        if self.also is None:
            return
        if alone := {"prefix", "candidate"} & {self.head.timing, self.also.timing}:
            raise ValueError(
                f"a {alone.pop()} head goes alone; `also` is for a fed-time and a drawn-time head together"
            )
        if self.also.timing == self.head.timing:
            raise ValueError(f"both heads are {self.head.timing}-time; `also` takes a head of the other timing")

    def of_timing(self, timing: str) -> AcceptanceHead | None:
        """The head of that timing, or what is asked at that moment in its place."""
        return next((head for head in (self.head, self.also) if head is not None and moment_of(head) == timing), None)

    @property
    def signals(self) -> frozenset[str]:
        """The signals that the loop has to compute for these heads."""
        return frozenset(f"{moment_of(head)}_logit" for head in (self.head, self.also) if head is not None)

    @property
    def stop_kind(self) -> str:
        """Name of the stop's cost (`Policy.stop_kind`): the shapes of the heads. A perfect head has none, and costs
        nothing.
        """
        return JOINT.join(
            sorted(head.shape_name for head in (self.head, self.also) if head is not None and head.shape_name)
        )

    @property
    def is_lagging(self) -> bool:
        """Whether the token just drawn has no score yet."""
        return self._calibrations[1] is None

    def after(self, carried: Number, drawn: AfterDraw) -> tuple[Number, Number, Number]:
        """Survival with the drawn token in it: (product of all scores, what the next token starts from, newest score).

        A plain tuple, and no call that can be spared: the loop comes here once per drafted token, and a named one would
        double its time.

        Args:
            carried: 1 at the start of a round, then the second number that came of the token before.
        """
        fed, late = self._calibrations
        newest: Number = 1.0
        if fed is not None:
            newest = sigmoid((drawn.fed_logit + fed.shift) / fed.temperature if self.is_calibrated else drawn.fed_logit)
            carried = carried * newest
        if late is None:
            return carried, carried, newest
        logit = drawn.prefix_logit if self._is_prefix else drawn.drawn_logit
        newest = sigmoid((logit + late.shift) / late.temperature if self.is_calibrated else logit)
        product = carried * newest
        return product, product if fed is None else carried, newest

    def before(self, carried: Number, seen: BeforeDraw) -> Number:
        """Survival with the next token in it, by a prefix head, before that token is drawn; `carried` as of `after`."""
        late = self._late
        return carried * sigmoid(
            (seen.prefix_logit + late.shift) / late.temperature if self.is_calibrated else seen.prefix_logit
        )

    def logit(self, seen: AfterDraw | BeforeDraw) -> Number:
        """The drawn-time or prefix head's calibrated logit for the token."""
        logit = seen.prefix_logit if self._is_prefix else seen.drawn_logit  # type: ignore[union-attr]
        return (logit + self._late.shift) / self._late.temperature

    @cached_property
    def _calibrations(self) -> tuple[_Calibration | None, _Calibration | None]:
        """Calibrations of the head that scores late and of the one that does not, read once: a head works them out anew
        each time it is asked.
        """
        heads = self.of_timing("fed"), self.of_timing("drawn") or self.of_timing("prefix")
        fed, late = (None if head is None else _Calibration(head.calibration_shift, head.temperature) for head in heads)
        return fed, late

    @property
    def _late(self) -> _Calibration:
        late = self._calibrations[1]
        assert late is not None
        return late

    @cached_property
    def _is_prefix(self) -> bool:
        return self.head.timing == "prefix"


class ScoringPolicy(Policy):
    """A policy that asks heads. Subclasses are dataclasses with the fields `head` and `also`."""

    head: AcceptanceHead
    also: AcceptanceHead | None
    is_calibrated: bool = True
    is_learning: bool | None = False

    @cached_property
    def scores(self) -> Scores:
        """The heads as one source of scores.

        Raises:
            ValueError: heads that cannot go together, or cannot learn.
        """
        if self.is_learning and not self.can_learn:
            kind = f"{self.head.timing}-time head" if self.also is None else "pair of heads"
            raise ValueError(
                f"is_learning is for one drawn-time, prefix or candidate head, and this is a {kind}; leave it out"
            )
        return Scores(self.head, self.also, self.is_calibrated)

    @property
    def fed_head(self) -> AcceptanceHead | None:  # type: ignore[override]
        return self.scores.of_timing("fed")

    @property
    def drawn_head(self) -> AcceptanceHead | None:  # type: ignore[override]
        return self.scores.of_timing("drawn")

    @property
    def prefix_head(self) -> AcceptanceHead | None:  # type: ignore[override]
        return self.scores.of_timing("prefix")

    @cached_property
    def stops_before(self) -> bool:  # type: ignore[override]
        return self.head.timing == "prefix" and super().stops_before

    @property
    def signals(self) -> frozenset[str]:  # type: ignore[override]
        return self.scores.signals | ({self._own_signal} if self.is_learning else frozenset())

    @property
    def stop_kind(self) -> str:
        return self.scores.stop_kind

    @property
    def untaught(self) -> State:
        """State that a generation starts from; () where nothing is learned."""
        return LEARNER.start() if self.is_learning else ()

    @property
    def nothing_learned(self) -> State:
        return NOTHING if self.is_learning else ()

    @property
    def can_learn(self) -> bool:
        """A fed-time head scores a token one step late; only what is scored when it is drawn is refitted."""
        return self.head.timing != "fed" and self.also is None

    def scored(self, carried: Number, learned: Any, drawn: AfterDraw) -> tuple[Number, Number, Number]:
        """`Scores.after`, or the same by what was learned."""
        if not self.is_learning:
            return self.scores.after(carried, drawn)
        newest = score_of(learned.weights, self._inputs(drawn))
        product = carried * newest
        return product, product, newest

    def scored_before(self, carried: Number, learned: Any, seen: BeforeDraw) -> Number:
        """`Scores.before`, or the same by what was learned."""
        return (
            carried * score_of(learned.weights, self._inputs(seen))
            if self.is_learning
            else self.scores.before(carried, seen)
        )

    def lesson(self, state: Any, drawn: AfterDraw, acceptance_prob: Number) -> State:
        return lesson_of(state[-1].weights, self._inputs(drawn), acceptance_prob) if self.is_learning else ()

    def _inputs(self, seen: Any) -> LessonInputs:
        return LessonInputs(cut(self.scores.logit(seen)), logit_of(getattr(seen, self._own_signal)))

    @property
    def _own_signal(self) -> str:
        """The probability that is learned from beside the head: q(y), or with a prefix head, which knows no y, the
        largest q.
        """
        return "max_prob" if self.head.timing == "prefix" else "token_prob"
