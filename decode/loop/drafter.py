"""Drafters (law 4.12): they propose tokens *and the distribution each was drawn from*, all that verification needs.

`ModelDrafter` is the plain one: one model, one policy. Hierarchies are drafters made of drafters.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from decode.loop.models import cached
from decode.loop.session import Session
from decode.loop.signals import reader_of
from decode.policies.base import AfterDraw, Policy, PolicyRun
from lm import DraftModel
from lm.draws import refuse_no_token
from lm.features.model import BlockModel
from lm.masks import Tree


@dataclass
class Proposal:
    """A draft: tokens, the distributions they were drawn from, and what it cost."""

    tokens: list[int] = field(default_factory=list)
    dists: list[Float[Tensor, " vocab"]] = field(default_factory=list)
    """q of each token, in the form of `lm.draws`; none for the nodes of a tree, which are chosen and not drawn."""
    tree: Tree | None = None
    """The nodes' parents, if the tokens are the nodes of a tree."""
    best: list[int] = field(default_factory=list)
    """Of a tree: nodes of the path that the policy saw."""
    run: PolicyRun = field(default_factory=lambda: PolicyRun(Policy()))
    """The policy's run through the generation; by default nothing but a limit stops the draft."""
    accepted: Sequence[int] = ()
    """Indices of the accepted tokens, set after verification."""
    acceptance_probs: Sequence[float] = ()
    """Of the accepted tokens and the first rejected one (of a tree: of `best`), set for feedback."""
    num_draft_forwards: int = 0
    num_micro: int = 0
    num_micro_forwards: int = 0

    def set_accepted(self, num_accepted: int, probs: Sequence[float]) -> None:
        """Record the verification of a chain; `probs`: `lm.verification.revealed_probs`."""
        self.accepted = range(num_accepted)
        if self.run.takes_feedback:
            self.acceptance_probs = probs[: num_accepted + 1]


@runtime_checkable
class Drafter(Protocol):
    """Anything that drafts. One object serves one sequence at a time."""

    def start(self, session: Session) -> None:
        """Start a generation, which `take`s the models: empty caches, new policy state."""

    def propose(self, committed: list[int], max_tokens: int) -> Proposal:
        """Draft at most `max_tokens` tokens after `committed`; none is drafted after EOS."""

    def conclude(self, committed: list[int], num_accepted: int) -> None:
        """End a round, whose tokens `committed` now ends with: roll caches back (law 4.5) and update the policies."""

    def roll_back(self, length: int) -> None:
        """Drop cached tokens beyond the first `length`, which an outer level rejected; policies are not informed."""


class PolicyDrafter:
    """A model that drafts under a policy. Subclasses say where tokens come from."""

    role = "draft"
    """Name of the model in messages."""
    drafts_trees = False
    verifies = False
    """Whether the model verifies what is drafted below it."""

    def __init__(self, model: PreTrainedModel | DraftModel, policy: Policy, *, vocab_size: int | None = None) -> None:
        """Args:
        model: a `PreTrainedModel` is wrapped in a `CachedModel`. A feature draft (`lm.FeatureModel`) reads the
            target that verifies, and drafts nothing until the target has read the prompt.
        policy: when to stop (law 4.3).
        vocab_size: `Pair.vocab_size` if the model's logits are wider than the tokenizer.
        """
        self.policy = policy
        self.model = cached(
            model, self, vocab_size=vocab_size, with_hidden=bool(policy.heads), holds_trees=self.drafts_trees
        )
        self._signals = reader_of(policy, self.model)
        looks = type(policy).after is not Policy.after or policy.stops_before
        self._reads_tokens = looks or bool(policy.signals or policy.zero_feedback)

    def start(self, session: Session) -> None:
        session.take(self.model, self.role, verifies=self.verifies)
        self._signals = reader_of(self.policy, self.model, self._signals)
        self._session = session
        self.proposal = Proposal()
        self.run = PolicyRun(self.policy)

    def begin(self, committed: list[int], max_tokens: int) -> int:
        """Begin a draft after `committed`: `proposal` is empty. Returns the maximum draft length."""
        self.proposal = Proposal(run=self.run)
        self._signals.num_before = len(committed) - self._session.num_prompt
        return self.run.begin(max_tokens, self.model.max_length - len(committed) + 1)

    def take(self, token: int, drawn: AfterDraw, q: Float[Tensor, " vocab"]) -> bool:
        """Add a token drawn from q, unless the policy stops before it; returns whether the draft continues."""
        if self.run.take(drawn, is_eos=token in self._session.eos_ids):
            self.proposal.tokens.append(token)
            self.proposal.dists.append(q)
        return self.run.is_going

    def roll_back(self, length: int) -> None:
        self.model.roll_back(length)

    def conclude(self, committed: list[int], num_accepted: int) -> None:
        self.roll_back(len(committed) - 1)
        self.run.end(len(self.proposal.tokens), num_accepted, self.proposal.acceptance_probs)


class ModelDrafter(PolicyDrafter):
    """One model drafts token by token until its policy stops or its context is full."""

    def reads_at_end(self) -> bool:
        """Whether the whole draft stays on an accelerator, since its policy sees no token (fixed length)."""
        return self.model.device.type != "cpu" and not self._reads_tokens and self._session.sampling.sees_no_tokens

    def propose(self, committed: list[int], max_tokens: int) -> Proposal:
        num_tokens = self.begin(committed, max_tokens)
        pending = committed[len(self.model) :]
        if num_tokens > 0 and self.reads_at_end():
            self._propose_on_device(pending, num_tokens)
            return self.proposal
        while num_tokens > 0 and self.take(*self._step(committed, pending)):
            pending = self.proposal.tokens[-1:]
        return self.proposal

    def take(self, token: int, drawn: AfterDraw, q: Float[Tensor, " vocab"]) -> bool:
        # law 4.9: a forward for each token, or one for a whole block
        if not self.proposal.num_draft_forwards or not isinstance(self.model, BlockModel):
            self.proposal.num_draft_forwards += 1
        return super().take(token, drawn, q)

    def _step(self, committed: list[int], pending: list[int]) -> tuple[int, AfterDraw, Float[Tensor, " vocab"]]:
        """Feed the pending tokens and draw one; returns the arguments of `take`."""
        session = self._session
        drafted = self.proposal.tokens
        logits = self.model.feed(pending)
        q = session.sampling.dists(logits, committed, drafted)[0]
        probs = q if session.sampling.is_plain else None
        return *self._signals.draw(len(drafted), logits[0], q, session.draws, probs=probs), q

    def _propose_on_device(self, pending: list[int], num_tokens: int) -> None:
        """Draft on the device, then read all tokens in one transfer and keep those up to the first EOS.

        Forwards beyond an EOS are wasted, and count.
        """
        proposal = self.proposal
        session = self._session
        logits = self.model.feed(pending)
        drawn: list[Tensor] = []
        for position in range(num_tokens):
            # a row with NaN draws an id beyond the last; embedding it would crash the device before the host raises
            logits = self.model.feed_drawn(drawn[-1].clamp(max=logits.shape[-1] - 1)) if position else logits
            q = session.sampling.dists(logits)[0]
            drawn.append(session.draws.draw(q))
            proposal.dists.append(q)
        tokens = torch.cat(drawn).tolist()
        refuse_no_token(max(tokens), proposal.dists[0])
        num_kept = next((index + 1 for index, token in enumerate(tokens) if token in session.eos_ids), num_tokens)
        if tokens[num_kept - 1] in session.eos_ids:
            self.run.stop("eos")
        proposal.tokens = tokens[:num_kept]
        del proposal.dists[num_kept:]
        proposal.num_draft_forwards = 1 if isinstance(self.model, BlockModel) else num_tokens
        self.run.steps = [(self.run.state, AfterDraw(index)) for index in range(num_kept)]
