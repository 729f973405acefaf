"""A draft that proposes its likeliest token whatever the sampling, as engines draft by default (law 4.2).

The distribution of each drafted token is a point mass at y = argmax q: it is accepted with probability p(y), and after
a rejection the token comes from p without y, norm(max(0, p - q)). llama.cpp's target draws its own token and compares,
which is the same distribution: the drawn token is y with probability p(y), and is else drawn from p without y. At
temperature 0 this is the ordinary drafter.

The length of such a draft depends on no draw, so that a short one may be discarded: an engine's loop, which `flags`
replays (`evaluation.flags.engines.ShortDrafts`).
"""

from jaxtyping import Float
from torch import Tensor

from decode.loop.drafter import ModelDrafter, Proposal
from decode.loop.session import Session
from decode.policies.base import AfterDraw
from lm import Sampling

_LIKELIEST = Sampling(temperature=0)


class PointMassDrafter(ModelDrafter):
    def start(self, session: Session) -> None:
        super().start(session)
        self.reads_at_end = lambda: False  # both draw from the session's own distribution

    @property
    def _min_length(self) -> int:
        return getattr(self.policy, "discards_below", 0)

    def begin(self, committed: list[int], max_tokens: int) -> int:
        num_tokens = super().begin(committed, max_tokens)
        self.run.num_tokens = num_tokens if num_tokens >= self._min_length else 0
        return self.run.num_tokens

    def propose(self, committed: list[int], max_tokens: int) -> Proposal:
        proposal = super().propose(committed, max_tokens)
        if len(proposal.tokens) < self._min_length and proposal.run.stop_reason != "eos":
            proposal.tokens, proposal.dists, self.run.steps = [], [], []
            self.run.stop("policy")
        return proposal

    def _step(self, committed: list[int], pending: list[int]) -> tuple[int, AfterDraw, Float[Tensor, " vocab"]]:
        logits = self.model.feed(pending)
        greedy = self._session.sampling.is_greedy  # where laws are logits, and the largest is taken
        law: Tensor = logits[0] if greedy else _LIKELIEST.probs(logits[0])
        token, drawn = self._signals.draw(len(self.proposal.tokens), logits[0], law, self._session.draws)
        return token, drawn, law
