"""Chen's hierarchical variant (Algorithm 2): m times (n tokens of the small model, then one of the medium), then the
target verifies all.

Source: H. Chen, An Exploration of Hierarchical Speculative Decoding. Every token is verified against the distribution
that it was drawn from, the small model's or the medium's, as in the paper. A rejected one is replaced by a draw from
the residual of that same proposal, norm(max(0, p - q)) with its own q. Law 4.2 requires nothing else, so the output has
the target's distribution although the proposals alternate.

As printed, the replacement is drawn from plain p. Then a drafted position has, whatever proposed it, the distribution

    min(p, q) + (1 - sum_v min(p, q)(v)) p

which is p only if q = p: the paper admits that "the distribution of outputs may differ". A test shows the bias.

Departures: the printed k is the index of the first rejected token; the listing returns x_1 ... x_k, including the
rejected token, and draws the next from p_{k+1}, while Table A.1 and Theorem 3.2 count k tokens in all. Here, as they
count: k - 1 tokens are accepted, and the replacement is drawn at the rejected position. A draft may end inside a block,
at EOS or at the length limit.
"""

from transformers import PreTrainedModel

from decode.loop.drafter import Proposal
from decode.loop.session import Session, cached
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
        vocab_size: int | None = None,
    ) -> None:
        """Args:
            small: drafts n tokens of each block; counted as micro.
            medium: drafts the last token of each block; counted as draft.
            m: blocks per draft.
            n: tokens of the small model per block; 0: only the medium model drafts.
            vocab_size: `Pair.vocab_size` if logits are wider than the tokenizer.

        Raises:
            ValueError: a negative m or n.
        """
        for name, value in (("m", m), ("n", n)):
            if value < 0:
                raise ValueError(f"{name} is {value}; it must be at least 0")
        self.small: CachedModel = cached(small, vocab_size=vocab_size)
        self.medium: CachedModel = cached(medium, vocab_size=vocab_size)
        self.m, self.n = m, n

    def start(self, session: Session) -> None:
        for model, role in ((self.small, "small draft"), (self.medium, "medium draft")):
            session.take(model, role)
            model.reset()
        self._session = session

    def propose(self, committed: list[int], max_tokens: int) -> Proposal:
        proposal = Proposal()
        ids = list(committed)
        context = min(self.small.max_length, self.medium.max_length)
        # the last token is drawn and never fed, so it may be one beyond the context
        num_tokens = min(self.m * (self.n + 1), max_tokens, context - len(committed) + 1)
        while len(proposal.tokens) < num_tokens and proposal.stop_reason == "limit":
            if len(proposal.tokens) % (self.n + 1) < self.n:
                self._extend(proposal, ids, self.small)
                proposal.num_micro += 1
                proposal.num_micro_forwards += 1
            else:
                self._extend(proposal, ids, self.medium)
                proposal.num_draft_forwards += 1
        return proposal

    def conclude(self, committed: list[int], num_accepted: int) -> None:
        self.roll_back(len(committed) - 1)

    def roll_back(self, length: int) -> None:
        self.small.roll_back(length)
        self.medium.roll_back(length)

    def _extend(self, proposal: Proposal, ids: list[int], model: CachedModel) -> None:
        """Add one token drawn from a model."""
        q = self._session.sampling.dists(model.forward(ids), ids)[0]
        token = self._session.draws.token(q)
        ids.append(token)
        proposal.tokens.append(token)
        proposal.dists.append(q)
        if token in self._session.eos_ids:
            proposal.stop_reason = "eos"
