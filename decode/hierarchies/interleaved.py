"""Chen's hierarchical variant (design 4.12): m times (n tokens of the small model, then one of the medium), then the target verifies all.

Lossless here: every token is verified against the distribution that it was drawn from, the small model's or the medium's, and a
rejected one is replaced by a draw from the residual of that same proposal, norm(max(0, p - q)) with its own q. Law 4.2 asks for nothing
else, so the output has the target's law although the proposals alternate.

With `lossless=False` the medium model's row stands as q for every token, also for those that the small model drew: the whole draft is
verified as if the medium model had made it. Those rows cost nothing (the forward that draws the medium's token runs over the small ones
too), which is the temptation. For constant p, small q' and medium q the token at a position of the small model then has the law

    q' a + (1 - sum_v q'(v) a(v)) norm(max(0, p - q)),     a = min(1, p / q),

which is p only if q' = q. It exists so that the bias can be shown and tested.

Departures. The paper's own listing was not at hand: the biased form is our reading of the flaw that design 4.12 names, a token verified
against a proposal that it was not drawn from and replaced from the residual of the wrong one. A draft may end inside a block, at EOS or at
the length limit.
"""

from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from decode.loop.drafter import Proposal, Session
from lm import CachedModel


class InterleavedDrafter:
    """Alternates between two models on a fixed schedule."""

    def __init__(
        self,
        small: PreTrainedModel | CachedModel,
        medium: PreTrainedModel | CachedModel,
        *,
        m: int = 2,
        n: int = 3,
        lossless: bool = True,
        vocab_size: int | None = None,
    ) -> None:
        """Args:
            small: drafts n tokens of each block; counted as micro.
            medium: drafts the last token of each block; counted as draft.
            m: blocks per draft.
            n: tokens of the small model per block; 0 leaves the medium model alone.
            lossless: False hands on the medium model's rows for every token, which is biased.
            vocab_size: `Pair.vocab_size` where logits are wider than the tokenizer.

        Raises:
            ValueError: a negative m or n.
        """
        for name, value in (("m", m), ("n", n)):
            if value < 0:
                raise ValueError(f"{name} is {value}; it must be at least 0")
        self.small, self.medium = (
            CachedModel(model, vocab_size=vocab_size) if isinstance(model, PreTrainedModel) else model for model in (small, medium)
        )
        self.m, self.n, self.lossless = m, n, lossless

    def start(self, session: Session) -> None:
        self.small.reset()
        self.medium.reset()
        self._session = session

    def propose(self, committed: list[int], max_tokens: int) -> Proposal:
        proposal = Proposal(num_allowed=max_tokens)
        ids = list(committed)
        context = min(self.small.max_length, self.medium.max_length)
        # The last token is drawn and never fed, so it may lie one beyond the context; unless lossless, a last forward feeds it.
        num_tokens = min(self.m * (self.n + 1), max_tokens, context - len(committed) + self.lossless)
        num_unread = 0
        while len(proposal.tokens) < num_tokens and proposal.stop_reason == "limit":
            if len(proposal.tokens) % (self.n + 1) < self.n:
                self._extend(proposal, ids, self._session.sampling.laws_after(self.small.forward(ids), ids)[0])
                proposal.num_micro += 1
                proposal.num_micro_forwards += 1
                num_unread += 1
            else:
                self._extend(proposal, ids, self._medium_rows(proposal, ids, num_unread)[-1])
                num_unread = 0
        if num_unread and not self.lossless:
            self._medium_rows(proposal, ids, num_unread)
        return proposal

    def conclude(self, committed: list[int], num_accepted: int) -> None:
        self.roll_back(len(committed) - 1)

    def roll_back(self, length: int) -> None:
        self.small.roll_back(length)
        self.medium.roll_back(length)

    def _extend(self, proposal: Proposal, ids: list[int], q: Float[Tensor, " vocab"]) -> None:
        """Draw one token and add it, with the row it was drawn from."""
        token = self._session.draws.token(q)
        ids.append(token)
        proposal.tokens.append(token)
        proposal.laws.append(q)
        proposal.entropies.append(0.0)
        if token in self._session.eos_ids:
            proposal.stop_reason = "eos"

    def _medium_rows(self, proposal: Proposal, ids: list[int], num_unread: int) -> Float[Tensor, "rows vocab"]:
        """Distributions of one medium forward; unless lossless, they replace those of the small model's tokens since the last one."""
        proposal.num_draft_forwards += 1
        num_rows = 1 if self.lossless else num_unread + 1
        q = self._session.sampling.laws_after(self.medium.forward(ids, num_rows), ids)
        if num_rows > 1:
            proposal.laws[-num_unread:] = list(q[:-1])
        return q
