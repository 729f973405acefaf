"""What rounds cost in tokens and forwards (law 4.4).

    N_draft + N_target = N + N_discarded            (SpecDec++, arXiv 2405.19715, section 2)

N counts emitted tokens; all others are discarded, also at EOS and at the length limit.
"""

from dataclasses import dataclass, fields

from decode.policies.base import Number


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Totals over rounds, as numbers or as arrays of one number per lane of replay; `+` adds prompts."""

    num_emitted: Number = 0
    """N, emitted tokens."""
    num_drafted: Number = 0
    """N_draft: tokens that the draft proposed; of a tree, every node that is verified."""
    num_target: Number = 0
    """N_target: target forwards, which is rounds."""
    num_accepted: Number = 0
    """Drafted tokens that were accepted and emitted."""
    num_draft_forwards: Number = 0
    """Forwards of the draft (in a hierarchy, of the level below the target): one for each token, block or level of a
    tree. A stop between a forward and its draw costs one too, as does a token beyond an EOS if it `reads_at_end`.
    """
    num_micro: Number = 0
    """N_micro: tokens that the level below the draft proposed (hierarchies)."""
    num_micro_forwards: Number = 0
    """Forwards of all levels below the draft: only of the micro if there are three levels."""

    @property
    def num_discarded(self) -> Number:
        """N_discarded = N_draft + N_target - N."""
        return self.num_drafted + self.num_target - self.num_emitted

    @property
    def discard_rate(self) -> Number:
        """Discarded draft tokens per emitted token, N_discarded / N."""
        return self.num_discarded / self.num_emitted

    @property
    def verification_rate(self) -> Number:
        """Target forwards per emitted token, N_target / N."""
        return self.num_target / self.num_emitted

    @property
    def acceptance_length(self) -> Number:
        """Mean number of tokens that a round emits, 1 + accepted / rounds."""
        return 1 + self.num_accepted / self.num_target

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(Counts)})
