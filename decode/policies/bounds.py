"""The bounds that stand beside every result (law 4.10). Only a trace can offer them: the real loop refuses them."""

from dataclasses import dataclass
from typing import ClassVar

from decode.policies.base import Number, Policy


@dataclass(frozen=True)
class Oracle(Policy):
    """Knows the outcomes: drafts exactly the tokens that will be accepted, and leaves the last token of a response to the target.

    N_discarded = 0 and N_target = |rejected| + 1 (SpecDec++, arXiv 2405.19715, Lemma 2.1; more where max_draft_length ends a round).
    """

    signals: ClassVar[frozenset[str]] = frozenset({"outcomes"})


@dataclass(frozen=True)
class PerfectHead:
    """Takes a head's place and says logit(acceptance_prob): it knows the true probabilities, but not the coin."""

    timing: str
    shape_name: ClassVar[str] = ""
    calibration_shift: ClassVar[float] = 0.0
    temperature: ClassVar[float] = 1.0

    def calibrated_logit(self, logit: Number) -> Number:
        """The logit itself: what is true is calibrated."""
        return logit
