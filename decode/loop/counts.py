"""Law 4.4: what a generation cost, in tokens and forwards.

    N_draft + N_target = N + N_discarded            (SpecDec++, arXiv 2405.19715, section 2)

N counts emitted tokens; everything that draft or target produced and that was not emitted is discarded, also at EOS and
at the length limit. The loop asserts it in every round: N_discarded follows here from the other three, and has to be
what the target's cache gives back. Fields are numbers, or arrays of one number per lane (replay of many settings at
once).
"""

from dataclasses import dataclass, fields

from decode.policies.base import Number


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Totals over rounds; add them up over prompts with `+`."""

    num_emitted: Number = 0
    """N, tokens that were emitted."""
    num_drafted: Number = 0
    """N_draft: tokens that the draft proposed."""
    num_target: Number = 0
    """N_target: target forwards, which is rounds."""
    num_accepted: Number = 0
    """Drafted tokens that verification accepted and that were emitted."""
    num_draft_forwards: Number = 0
    """Forwards of the draft (in a hierarchy, of the level below the target): N_draft, one more for each stop between a
    forward and its draw (AdaEDL), and one for each token beyond an EOS where a draft is read at its end only
    (`ModelDrafter.reads_at_end`). A block of a DSpark draft is one, whatever is kept of it."""
    num_micro: Number = 0
    """N_micro: tokens that the level right below the draft proposed (hierarchies)."""
    num_micro_forwards: Number = 0
    """Forwards of all levels below the draft together: of the micro alone where there are three levels."""

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
