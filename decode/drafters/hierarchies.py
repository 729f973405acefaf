"""Law 4.12: a drafter whose proposals a second model has already verified, so that drafters can be nested.

One draft is a sequence of inner rounds, each of them law 4.2 one level down: `model` verifies what the inner
drafter proposes, and full acceptance yields a free token, if `InnerRounds.bonus`. If the inner drafter proposed
nothing, that token is always drawn: plain drafting by `model`.

A token that leaves an inner round has the distribution q of `model`, so the outer verification sees an ordinary
draft. The stops are legal (law 4.3): the policy of this level sees the signals of `model` at each emitted
position. Tokens after a stop are dropped unseen.

HSDDW (Syu & Lee, Findings of NAACL 2025) has micro, draft and target. Micro and draft stop by `SelfVerify`, and
propose at most `window` tokens (K) at a time:

    pre-verify                   the micro drafts K tokens, the draft verifies them in one forward and then drafts K
                                 tokens alone
    pre-verify + self-verify     the same, each level stopping itself
    full                         inner rounds (micro drafts, draft verifies) until H of the draft at an emitted position
                                 is above its threshold (Algorithm 2)

Chen's variant (An Exploration of Hierarchical Speculative Decoding, Algorithm 2) alternates: m times n tokens of the
small model and one of the medium, then the target verifies all. docs/hierarchies.md lists the departures from both.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Literal, get_args

from transformers import PreTrainedModel

from decode.loop.drafter import Drafter, ModelDrafter, PolicyDrafter, Proposal
from decode.loop.models import cached
from decode.loop.session import Session
from decode.policies.base import AfterDraw, Policy, PolicyRun
from decode.policies.plain import FixedLength, SelfVerify
from lm import CachedModel, next_dist
from lm.verification import revealed_probs


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
        if min(self.window, self.max_rounds or 0, self.num_alone) < 0:
            raise ValueError(f"{self}: every number must be at least 0")

    def lengths(self) -> Iterator[int]:
        """The window of each inner round; 0 if `model` drafts alone."""
        together = repeat(self.window) if self.max_rounds is None else repeat(self.window, self.max_rounds)
        return chain(together, repeat(0, self.num_alone))


class PreVerifiedDrafter(PolicyDrafter):
    """Drafts what the inner drafter proposes and `model` accepts, until its own policy stops or a context is full."""

    role = "draft that pre-verifies"
    verifies = True
    model: CachedModel

    def __init__(
        self,
        inner: Drafter,
        model: PreTrainedModel | CachedModel,
        policy: Policy,
        *,
        rounds: InnerRounds | None = None,
        vocab_size: int | None = None,
    ) -> None:
        """`model` verifies what `inner` proposes, any drafter, and its signals and hidden states show `policy`
        when this level stops. `rounds` are by default those of full HSDDW.
        """
        super().__init__(model, policy, vocab_size=vocab_size)
        self.inner = inner
        self.rounds = rounds or InnerRounds()

    def start(self, session: Session) -> None:
        super().start(session)
        self.inner.start(session)

    def propose(self, committed: list[int], max_tokens: int) -> Proposal:
        limit = self.begin(committed, max_tokens)
        text = list(committed)
        for window in self.rounds.lengths():
            room = limit - len(self.proposal.tokens)
            if room < 1 or self.run.stop_reason != "limit":
                break
            # a bonus token needs room too, and the model's forward must fit its context
            self._inner_round(text, int(min(window, room - self.rounds.bonus, self.model.max_length - len(text))))
        return self.proposal

    def roll_back(self, length: int) -> None:
        super().roll_back(length)
        self.inner.roll_back(length)

    def _inner_round(self, text: list[int], window: int) -> None:
        proposal = self.proposal
        draws = self._session.draws
        num_before = len(proposal.tokens)
        inner = self.inner.propose(text, window) if window > 0 else Proposal()
        logits = self.model.feed(text[len(self.model) :] + inner.tokens, len(inner.tokens) + 1)
        q = self._session.sampling.dists(logits, text, inner.tokens)
        probs = revealed_probs(inner.tokens, inner.dists, q, draws)
        count = draws.num_accepted(probs)
        inner.set_accepted(count, probs)
        for row, token in enumerate(inner.tokens[:count]):
            drawn = self._signals.read(len(proposal.tokens), logits[row], token, row=row)
            if not self.take(token, drawn, q[row]):
                break
        else:  # no stop among the accepted tokens
            if count < len(inner.tokens) or self.rounds.bonus or not inner.tokens:
                dist = next_dist(count, inner.dists, q, draws)
                token, drawn = self._signals.draw(len(proposal.tokens), logits[count], dist, draws, row=count)
                self.take(token, drawn, q[count])
        text += proposal.tokens[num_before:]
        self.model.roll_back(len(text) - 1)  # the last token is fed with the next forward (law 4.5)
        if window > 0:
            self.inner.conclude(text, count)
        proposal.num_draft_forwards += 1
        proposal.num_micro += len(inner.tokens)
        proposal.num_micro_forwards += inner.num_draft_forwards + inner.num_micro_forwards


Configuration = Literal["pre-verify", "pre-verify + self-verify", "full"]
CONFIGURATIONS: tuple[Configuration, ...] = get_args(Configuration)


def hsddw(
    micro: PreTrainedModel | CachedModel,
    draft: PreTrainedModel | CachedModel,
    *,
    configuration: Configuration = "full",
    window: int = 10,
    policies: tuple[Policy, Policy] | None = None,
    bonus: bool = True,
) -> PreVerifiedDrafter:
    """The drafter of one of HSDDW's configurations, whose policies `policies` replace: (micro's, draft's).

    The paper's micro is a 68M Llama, and its draft Llama-2 7B. `window` is K, the maximum number of tokens that a
    level drafts at a time; `bonus` is as in `InnerRounds`.
    """
    if configuration not in CONFIGURATIONS:
        raise ValueError(f"configuration is {configuration!r}; one of {', '.join(CONFIGURATIONS)}")
    alternates = {} if configuration == "full" else {"max_rounds": 1, "num_alone": window}
    rounds = InnerRounds(window=window, bonus=bonus, **alternates)
    stops = (FixedLength(window), Policy()) if configuration == "pre-verify" else (SelfVerify(), SelfVerify())
    micro_policy, draft_policy = policies or stops
    return PreVerifiedDrafter(ModelDrafter(micro, micro_policy), draft, draft_policy, rounds=rounds)


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
        """A draft has m blocks of n tokens of the small model, counted as micro, and one of the medium model."""
        if min(m, n) < 0:
            raise ValueError(f"m is {m} and n is {n}; both must be at least 0")
        self.small: CachedModel = cached(small, self, vocab_size=vocab_size)
        self.medium: CachedModel = cached(medium, self, vocab_size=vocab_size)
        self.m = m
        self.n = n

    def start(self, session: Session) -> None:
        self._session = session
        self._run = PolicyRun(Policy())
        for model, role in ((self.small, "small draft"), (self.medium, "medium draft")):
            session.take(model, role)

    def propose(self, committed: list[int], max_tokens: int) -> Proposal:
        proposal = Proposal(run=self._run)
        ids = list(committed)
        context = min(self.small.max_length, self.medium.max_length)
        # the last token is drawn and never fed, so it may be one beyond the context
        self._run.begin(min(self.m * (self.n + 1), max_tokens), context - len(committed) + 1)
        while self._run.is_going:
            is_small = len(proposal.tokens) % (self.n + 1) < self.n
            model = self.small if is_small else self.medium
            q = self._session.sampling.dists(model.feed(ids[len(model) :]), ids)[0]
            token = self._session.draws.token(q)
            ids.append(token)
            proposal.tokens.append(token)
            proposal.dists.append(q)
            proposal.num_micro += is_small
            proposal.num_draft_forwards += not is_small
            self._run.take(AfterDraw(len(proposal.tokens) - 1), is_eos=token in self._session.eos_ids)
        proposal.num_micro_forwards = proposal.num_micro
        return proposal

    def conclude(self, committed: list[int], num_accepted: int) -> None:
        self.roll_back(len(committed) - 1)

    def roll_back(self, length: int) -> None:
        self.small.roll_back(length)
        self.medium.roll_back(length)
