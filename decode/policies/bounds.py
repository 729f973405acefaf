"""The bound that stands beside every result (law 4.10)."""

from dataclasses import dataclass
from typing import ClassVar

from decode.policies.base import Policy


@dataclass(frozen=True)
class Oracle(Policy):
    """Knows the outcomes: drafts exactly the tokens that will be accepted, and leaves the last token of a response to the target.

    N_discarded = 0 and N_target = |rejected| + 1 (SpecDec++, arXiv 2405.19715, Lemma 2.1; more where max_draft_length ends a round). Only
    replay can run it; the real loop refuses its signal.
    """

    signals: ClassVar[frozenset[str]] = frozenset({"outcomes"})
