"""llama.cpp's n-min: drafts of fewer tokens are discarded unverified, and their forwards are paid.

Whether a draft is verified then depends on its tokens, which keeps the output's distribution only where they are not
drawn (law 4.3): llama.cpp drafts its likeliest token. So this rule is replayed on traces of likeliest drafts, and no
loop has it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from decode.policies.base import Number
from decode.policies.checks import check_count
from decode.policies.engines import LlamaCpp
from decode.policies.registry import COARSE, lengths_within


@dataclass(frozen=True)
class ShortDrafts(LlamaCpp):
    """llama.cpp's rule with its minimum length.

    No draft begins where fewer than `n_min` tokens are allowed. A draft that an end-of-text token ends is verified
    whatever its length.
    """

    n_min: Number = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("n_min", self.n_min, 0)

    @property
    def discards_below(self) -> Number:
        """Replay discards shorter drafts (`evaluation.traces.replay`)."""
        return self.n_min


def values(longest: int) -> Mapping[str, Sequence[Any]]:
    """Settings that `flags` compares."""
    return {"n_max": lengths_within(longest), "n_min": (0, 1, 2, 3, 5), "p_min": COARSE}
