"""Design 4.12: a drafter whose proposals a second model has already verified, so that hierarchies are drafters made of
drafters.

One draft is a sequence of inner rounds, each of them law 4.2 one level down: the inner drafter proposes y_1 … y_k with
the rows q' that they were drawn from, `model` gives its rows q in one forward, y_i passes with probability min(1,
q(y_i) / q'(y_i)), the first that fails is replaced by a draw from norm(max(0, q - q')), and after full acceptance the
row q_{k+1} yields a free token, if `InnerRounds.bonus`. A round in which the inner drafter proposed nothing always
draws that token: it is then plain drafting by `model`.

Why the whole stays lossless. Given everything before it, a token that leaves an inner round has the law q of `model` at
its position (law 4.2), so q is the row handed on, and the outer verification sees a draft like any other; by induction
this holds at any depth.

Why the stops are legal (law 4.3). The policy of this level is asked at each emitted position with the signals of
`model`: before the token, of distributions and earlier tokens alone, or after it, and then the token is kept. Tokens
further on that this inner round had verified are dropped unseen. What the policies are told of dropped tokens (how far
the inner verification got) moves only later stops, never the token it is about.

Counts: `num_draft_forwards` are forwards of `model`; `num_micro` tokens that the level right below proposed;
`num_micro_forwards`
forwards of all levels below together.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, repeat

from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from decode.loop.drafter import Drafter, Proposal
from decode.loop.session import Session, cached
from decode.loop.signals import reader_of
from decode.policies.base import AfterDraw, Policy, Seen, lessons_of
from lm import CachedModel, next_law, num_accepted


@dataclass(frozen=True, kw_only=True)
class InnerRounds:
    """How many inner rounds make one draft, and how long each may be."""

    window: int = 10
    """The most tokens that the inner drafter proposes per inner round (HSDDW: K = 10)."""
    max_rounds: int | None = None
    """Inner rounds per draft; None: until the policy stops or the draft is full."""
    num_alone: int = 0
    """Tokens that `model` then drafts on its own, the inner drafter resting."""
    bonus: bool = True
    """Emit the free token of a fully accepted inner round."""

    def __post_init__(self) -> None:
        least = {"window": (self.window, 0), "max_rounds": (self.max_rounds, 0), "num_alone": (self.num_alone, 0)}
        for name, (value, limit) in least.items():
            if value is not None and value < limit:
                raise ValueError(f"{name} is {value}; it must be at least {limit}")

    def lengths(self) -> Iterator[int]:
        """The window of each inner round; 0 where `model` drafts alone."""
        together = repeat(self.window) if self.max_rounds is None else repeat(self.window, self.max_rounds)
        return chain(together, repeat(0, self.num_alone))


class PreVerifiedDrafter:
    """Drafts the tokens that the inner drafter proposes and `model` lets pass, until the policy of this level says
    stop, or a context is full.
    """

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
        inner: any drafter, also one of these.
        model: verifies what `inner` proposes; a `PreTrainedModel` is wrapped in a `CachedModel`.
        policy: of this level; its signals are `model`'s, a head in it reads `model`'s hidden states.
        rounds: None is `InnerRounds()`, full HSDDW's.
        vocab_size: `Pair.vocab_size` where the model's logits are wider than the tokenizer.
        """
        self.model: CachedModel = cached(model, CachedModel, vocab_size=vocab_size, with_hidden=bool(policy.heads))
        self.inner = inner
        self.policy = policy
        self.rounds = rounds or InnerRounds()
        self._signals = reader_of(policy, self.model)

    def start(self, session: Session) -> None:
        session.take(self.model, "draft that pre-verifies", verifies=True)
        self.model.reset()
        self._signals = reader_of(self.policy, self.model, self._signals)
        self.inner.start(session)
        self._session = session
        self._state = self.policy.start()

    def propose(self, committed: list[int], max_tokens: int) -> Proposal:
        self._state = self.policy.begin(self._state)
        self._proposal = proposal = Proposal(num_allowed=max_tokens, takes_lessons=bool(self.policy.nothing_learned))
        self._seen: list[Seen] = []
        limit = int(min(self.policy.limit(self._state), max_tokens, self.model.max_length - len(committed) + 1))
        ids = list(committed)
        for window in self.rounds.lengths():
            room = limit - len(proposal.tokens)
            if room < 1 or proposal.stop_reason != "limit":
                break
            # A bonus token may follow the inner draft, and needs room too; the model's forward over both must fit its
            # context.
            self._inner_round(ids, int(min(window, room - self.rounds.bonus, self.model.max_length - len(ids))))
        return proposal

    def conclude(self, committed: list[int], num_accepted: int) -> None:
        self.roll_back(len(committed) - 1)
        lesson = lessons_of(self.policy, self._seen, self._proposal.acceptance_probs)
        self._state = self.policy.end(self._state, self._proposal.outcome(num_accepted, lesson))

    def roll_back(self, length: int) -> None:
        self.model.roll_back(length)
        self.inner.roll_back(length)

    def _inner_round(self, ids: list[int], window: int) -> None:
        """Play one inner round; extends `ids` and the proposal by what it emits."""
        inner = self.inner.propose(ids, window) if window > 0 else Proposal()
        fed = ids + inner.tokens
        logits = self.model.forward(fed, len(inner.tokens) + 1)
        q = self._session.sampling.laws_after(logits, fed)
        count = num_accepted(inner.tokens, inner.laws, q, self._session.draws)
        inner.reveal(count, q, self._session.draws)
        for row, token_id in enumerate(inner.tokens[:count]):
            if not self._emit(
                ids, token_id, self._signals.read(len(self._proposal.tokens), logits[row], token_id, row=row), q[row]
            ):
                break
        else:  # no stop among the accepted tokens
            if count < len(inner.tokens) or self.rounds.bonus or not inner.tokens:
                law = next_law(count, inner.laws, q, self._session.draws)
                token_id, drawn = self._signals.draw(
                    len(self._proposal.tokens), logits[count], law, self._session.draws, row=count
                )
                self._emit(ids, token_id, drawn, q[count])
        self.model.roll_back(len(ids) - 1)  # the last token is fed with the next forward (law 4.5)
        if window > 0:
            self.inner.conclude(ids, count)
        self._count(inner)

    def _emit(self, ids: list[int], token_id: int, drawn: AfterDraw, q: Float[Tensor, " vocab"]) -> bool:
        """Ask the policy about one position and, unless it stops before, add the token; False when the draft ends
        here.
        """
        proposal = self._proposal
        if self.policy.stop_before(self._state, drawn.before):
            proposal.stop_reason = "policy"
            return False
        ids.append(token_id)
        proposal.tokens.append(token_id)
        proposal.laws.append(q)
        proposal.entropies.append(drawn.entropy)
        self._seen.append((self._state, drawn))
        self._state, stop = self.policy.after(self._state, drawn)
        if token_id in self._session.eos_ids or stop:
            proposal.stop_reason = "eos" if token_id in self._session.eos_ids else "policy"
        return proposal.stop_reason == "limit"

    def _count(self, inner: Proposal) -> None:
        proposal = self._proposal
        proposal.num_draft_forwards += 1
        proposal.num_micro += len(inner.tokens)
        proposal.num_micro_forwards += inner.num_draft_forwards + inner.num_micro_forwards
