"""What only a trace can offer: the policy that knows outcomes (law 4.10)."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from jaxtyping import Int

from decode.policies.base import Policy

Array = np.ndarray


@dataclass(frozen=True)
class Oracle(Policy):
    """Knows the outcomes, and drafts only tokens that will be accepted; the target adds the last token of a response.

    With no times it drafts all of them: N_discarded = 0 and N_target = |rejected| + 1 (SpecDec++, arXiv 2405.19715,
    Lemma 2.1; more where max_draft_length ends a round). That is the least time as long as a drafted token costs less
    than the target's own: with d = t_draft and t_target(k) = t + v k, T = (d + v) N + (t - d - v) N_target. Else it may
    be best to draft none, and where t_target(k) is no line, some of them, or long runs only; so with times it takes the
    shortest way through each response,

        left(i) = min over k <= accepted ahead of (k d + t_target(k) + left(i + k + 1))
    """

    round_s: tuple[float, ...] = ()
    """Seconds of a round that drafts 0, 1, … max_draft_length tokens, k d + t_target(k); empty: all are drafted."""

    signals: ClassVar[frozenset[str]] = frozenset({"outcomes"})

    def lengths(
        self, rejected: Int[Array, " positions"], offsets: Int[Array, " row_offsets"]
    ) -> Int[Array, " positions"]:
        """Tokens drafted by a round that starts at each position, from the first rejected position from each on (any
        beyond the row if there is none); row r covers positions offsets[r] to offsets[r + 1].
        """
        ends = np.repeat(offsets[1:], np.diff(offsets))
        ahead = np.minimum(rejected, ends - 1) - np.arange(len(rejected))
        if not self.round_s:
            return ahead
        longest = np.minimum(ahead, len(self.round_s) - 1)
        widths = np.diff(offsets)
        lengths = np.zeros_like(longest)
        # of each row by the number of positions that are left: 0 at its end
        left_s = np.zeros((len(widths), int(widths.max(initial=0)) + 1))
        drafted = np.arange(len(self.round_s))
        for num_left in range(1, left_s.shape[1]):
            rows = (widths >= num_left).nonzero()[0]
            at = offsets[rows + 1] - num_left
            after = np.maximum(num_left - 1 - drafted, 0)
            options = np.array(self.round_s) + left_s[rows][:, after]
            options[drafted > longest[at, None]] = np.inf
            lengths[at] = len(drafted) - 1 - options[:, ::-1].argmin(axis=1)  # the longest of equals
            left_s[rows, num_left] = options[np.arange(len(rows)), lengths[at]]
        return lengths
