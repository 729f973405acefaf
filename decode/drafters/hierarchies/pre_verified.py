"""Law 4.12: a drafter whose proposals a second model has already verified, so that drafters can be nested.

One draft is a sequence of inner rounds, each of them law 4.2 one level down: the inner drafter proposes y_1 ... y_k
with their distributions q', `model` gives its distributions q in one forward, y_i passes with probability min(1,
q(y_i) / q'(y_i)), the first that fails is replaced by a draw from norm(max(0, q - q')), and after full acceptance
q_{k+1} yields a free token, if `InnerRounds.bonus`. If the inner drafter proposed nothing, that token is always drawn:
plain drafting by `model`.

The whole is lossless: given everything before it, a token that leaves an inner round has the distribution q of `model`
(law 4.2). So the outer verification gets q and sees an ordinary draft; by induction this holds at any depth.

The stops are legal (law 4.3): the policy of this level sees the signals of `model` at each emitted position, either
before the token, or after it, and then the token is kept. Tokens after a stop are dropped unseen. The length of the
inner acceptance, which policies learn, affects only later stops.

Counts: `num_draft_forwards` are forwards of `model`; `num_micro` tokens that the level right below proposed;
`num_micro_forwards` forwards of all levels below.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, repeat

from transformers import PreTrainedModel

from decode.loop.drafter import Drafter, PolicyDrafter, Proposal
from decode.loop.session import Session, cached
from decode.policies.base import Policy
from lm import CachedModel, next_dist, num_accepted


@dataclass(frozen=True, kw_only=True)
class InnerRounds:
    """How many inner rounds make one draft, and how long each may be."""

    window: int = 10
    """Maximum inner draft length (HSDDW: K = 10)."""
    max_rounds: int | None = None
    """Inner rounds per draft; None: until the policy stops or the draft is full."""
    num_alone: int = 0
    """Tokens that `model` then drafts alone."""
    bonus: bool = True
    """Emit the free token of a fully accepted inner round."""

    def __post_init__(self) -> None:
        for name in ("window", "max_rounds", "num_alone"):
            if (value := getattr(self, name)) is not None and value < 0:
                raise ValueError(f"{name} is {value}; it must be at least 0")

    def lengths(self) -> Iterator[int]:
        """The window of each inner round; 0 if `model` drafts alone."""
        together = repeat(self.window) if self.max_rounds is None else repeat(self.window, self.max_rounds)
        return chain(together, repeat(0, self.num_alone))


class PreVerifiedDrafter(PolicyDrafter):
    """Drafts the tokens that the inner drafter proposes and `model` accepts, until the policy of this level stops or a
    context is full.
    """

    role, verifies = "draft that pre-verifies", True

    def __init__(
        self,
        inner: Drafter,
        model: PreTrainedModel | CachedModel,
        policy: Policy,
        *,
        rounds: InnerRounds | None = None,
        vocab_size: int | None = None,
    ) -> None:
        """Args:
        inner: any drafter, also a pre-verified one.
        model: verifies what `inner` proposes; a `PreTrainedModel` is wrapped in a `CachedModel`.
        policy: when this level stops, by the signals and hidden states of `model`.
        rounds: None: `InnerRounds()`, those of full HSDDW.
        vocab_size: `Pair.vocab_size` if the model's logits are wider than the tokenizer.
        """
        wrapped = cached(model, vocab_size=vocab_size, with_hidden=bool(policy.heads))
        super().__init__(wrapped, policy)
        self.inner, self.rounds = inner, rounds or InnerRounds()

    def start(self, session: Session) -> None:
        super().start(session)
        self.inner.start(session)

    def propose(self, committed: list[int], max_tokens: int) -> Proposal:
        limit = self.begin(committed, max_tokens)
        for window in self.rounds.lengths():
            room = limit - len(self.proposal.tokens)
            if room < 1 or self.proposal.stop_reason != "limit":
                break
            ids = committed + self.proposal.tokens
            # a bonus token needs room too, and the model's forward must fit its context
            self._inner_round(ids, int(min(window, room - self.rounds.bonus, self.model.max_length - len(ids))))
        return self.proposal

    def roll_back(self, length: int) -> None:
        super().roll_back(length)
        self.inner.roll_back(length)

    def _inner_round(self, ids: list[int], window: int) -> None:
        """Play one inner round after `ids`; extends the proposal by its tokens."""
        proposal, draws = self.proposal, self._session.draws
        num_before = len(proposal.tokens)
        inner = self.inner.propose(ids, window) if window > 0 else Proposal()
        fed = ids + inner.tokens
        logits = self.model.forward(fed, len(inner.tokens) + 1)
        q = self._session.sampling.dists(logits, fed)
        count = num_accepted(inner.tokens, inner.dists, q, draws)
        inner.set_accepted(count, q, draws)
        for row, token in enumerate(inner.tokens[:count]):
            drawn = self._signals.read(len(proposal.tokens), logits[row], token, row=row)
            if not self.take(token, drawn, q[row]):
                break
        else:  # no stop among the accepted tokens
            if count < len(inner.tokens) or self.rounds.bonus or not inner.tokens:
                dist = next_dist(count, inner.dists, q, draws)
                token, drawn = self._signals.draw(len(proposal.tokens), logits[count], dist, draws, row=count)
                self.take(token, drawn, q[count])
        ids = ids + proposal.tokens[num_before:]
        self.model.roll_back(len(ids) - 1)  # the last token is fed with the next forward (law 4.5)
        if window > 0:
            self.inner.conclude(ids, count)
        proposal.num_draft_forwards += 1
        proposal.num_micro += len(inner.tokens)
        proposal.num_micro_forwards += inner.num_draft_forwards + inner.num_micro_forwards
