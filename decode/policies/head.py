"""Stop on what a trained head predicts: SpecDec++ (arXiv 2405.19715, Algorithm 2; laws 4.8 and 4.8c)."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from decode.policies.auto import Auto
from decode.policies.base import AfterDraw, BeforeDraw, Head, Number, Outcome, State
from decode.policies.learning import learned_from
from decode.policies.recommended import one_head
from decode.policies.scores import ScoringPolicy
from heads.model.head import AcceptanceHead

AUTO = "auto"
"""Instead of a threshold: law 4.11's rule, which needs none."""


@dataclass(frozen=True)
class HeadPolicy(ScoringPolicy):
    """Keep the token, stop after it when 1 - (product of predicted acceptance probabilities so far) >
    max_rejection_prob. A prefix head stops before that token, which is then not drawn (B in law 4.3).

    Attributes, beside those of `ScoringPolicy`:
        max_rejection_prob: the threshold; 0.7 in the paper, on raw probabilities of a head trained with reject
            weight 6. For the rule without a threshold see `head_policy`.
        is_calibrated: whether the threshold is on calibrated probabilities, as those that `tune` chooses are but
            for SpecDec++'s own heads.
        is_learning: None: as False.
        keeps_newest: a prefix head draws that token all the same, keeps it and stops after it (A in law 4.3).
    """

    head: Head
    max_rejection_prob: Number = 0.7
    is_calibrated: Number = False
    is_learning: bool | None = None
    keeps_newest: bool = False
    ranges = (("max_rejection_prob", 0, 1),)

    @classmethod
    def from_pretrained(cls, path_or_hub_id: str | Path, **parameters: Any) -> "HeadPolicy | Auto":
        """The policy of an exported head, at the threshold that `evaluation tune` wrote into its config.json.

        Args:
            path_or_hub_id: the directory of the head, or owner/name on the hub; or a folder of exported heads, of
                which the best one is taken: the fastest that was tuned.
            parameters: of `head_policy`, instead of what was tuned, such as max_rejection_prob="auto".

        Raises:
            FileNotFoundError: no exported head at this path.
            ValueError: no threshold was tuned, and none is given.
        """
        path = one_head(path_or_hub_id)
        head = AcceptanceHead.from_pretrained(path)
        known = head.provenance.recommended
        if "max_rejection_prob" not in parameters:
            if "max_rejection_prob" not in known:
                raise ValueError(
                    f"{path} has no recommended threshold; run `acceptance-heads tune`, or give one: "
                    "max_rejection_prob=0.4, is_calibrated=True"
                )
            parameters = {key: known[key] for key in ("max_rejection_prob", "is_calibrated")} | parameters
        return head_policy(head, **parameters)

    def __post_init__(self) -> None:
        if isinstance(self.max_rejection_prob, str):
            raise ValueError(
                f"max_rejection_prob is {self.max_rejection_prob!r}; it must be a probability. For the rule without a "
                f'threshold use decode.policies.head_policy(head, "{AUTO}")'
            )
        if self.keeps_newest and self.head.timing != "prefix":
            raise ValueError(f"keeps_newest is for a prefix head, not a {self.head.timing}-time one; leave it out")
        super().__post_init__()

    @cached_property
    def stops_before(self) -> bool:  # type: ignore[override]
        return super().stops_before and not self.keeps_newest

    @property
    def has_memory(self) -> bool:
        return bool(self.is_learning)

    def start(self) -> State:
        return 1.0, self.initial_calibration

    def begin(self, state: State) -> State:
        return 1.0, *state[1:]

    def stop_before(self, state: State, signals: BeforeDraw) -> Number:
        survival = state[0] * self.score(state[1], signals)
        # at least one token: only rules that know costs skip a draft
        return (1.0 - survival > self.max_rejection_prob) & (signals.position > 0)

    def after(self, state: State, drawn: AfterDraw) -> tuple[State, Number]:
        survival = state[0] * self.score(state[1], drawn)
        return (survival, state[1]), False if self.stops_before else 1.0 - survival > self.max_rejection_prob

    def end(self, state: State, outcome: Outcome) -> State:
        return 1.0, learned_from(state[1], outcome.feedback)


def head_policy(
    head: Head,
    max_rejection_prob: Number = 0.7,
    *,
    is_calibrated: Number = False,
    is_learning: bool | None = None,
    keeps_newest: bool = False,
) -> HeadPolicy | Auto:
    """The `HeadPolicy` of these parameters; or for the threshold "auto" the rule of law 4.11, with the times that
    `evaluation tune` wrote into the head's config. That rule reads calibrated probabilities, and it learns if it
    can, unless `is_learning` is False.

    Raises:
        ValueError: nothing was tuned for the head; a threshold that is neither a probability nor "auto".
    """
    if isinstance(max_rejection_prob, str):
        if max_rejection_prob != AUTO:
            raise ValueError(f"max_rejection_prob is {max_rejection_prob!r}; it must be a probability, or {AUTO}")
        return Auto.recommended(head, is_learning=is_learning)
    return HeadPolicy(
        head, max_rejection_prob, is_calibrated=is_calibrated, is_learning=is_learning, keeps_newest=keeps_newest
    )
