"""The lossless loop with trees of drafts (laws 4.2, 4.4, 4.5): a tree, one forward of the target, the accepted path.

As `SpeculativeDecoder`, with a `TreeDrafter` in it. Of law 4.4 N_draft counts every node that is verified; the nodes
beside the accepted path are discarded. A level of a tree is one forward of the draft.
"""

from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from decode.drafters.trees.drafter import TreeDrafter, TreeProposal
from decode.loop.counts import Counts
from decode.loop.decoder import SpeculativeDecoder
from decode.loop.drafter import Drafter
from decode.loop.rounds import Round
from decode.loop.session import cached
from lm import Sampler, Sampling
from lm.trees.cached import TreeModel
from lm.trees.tree import ROOT, Tree
from lm.trees.verification import node_probs, verify_tree


@dataclass(frozen=True)
class TreeRound(Round):
    """One tree and one verification; `drafted` are its nodes' tokens."""

    parents: tuple[int, ...] = ()
    """Parent of each node, -1 for those right after the text."""
    path: tuple[int, ...] = ()
    """The accepted nodes."""

    @property
    def next_kind(self) -> str | None:
        """residual where candidates were refused, bonus where there were none, None where the draft's EOS ended the
        generation.
        """
        if len(self.emitted) == self.num_accepted:
            return None
        return "residual" if (self.path[-1] if self.path else ROOT) in self.parents else "bonus"

    @property
    def refused(self) -> tuple[int, ...]:
        """The likeliest of the candidates after the accepted path, and the likeliest path below it: siblings come in
        that order.
        """
        tree, path = Tree(self.drafted, self.parents), [self.path[-1] if self.path else ROOT]
        while below := tree.children(path[-1]):
            path.append(below[0])
        return tuple(tree.tokens_of(path[1:]))

    def as_dict(self) -> dict[str, Any]:
        return super().as_dict() | {"parents": list(self.parents), "path": list(self.path)}


class TreeDecoder(SpeculativeDecoder):
    """A target and a drafter of trees."""

    def __init__(
        self,
        target: PreTrainedModel | TreeModel,
        drafter: Drafter,
        *,
        sampling: Sampling | None = None,
        max_draft_length: int = 20,
        eos_ids: frozenset[int] | None = None,
        vocab_size: int | None = None,
    ) -> None:
        """Args are those of `SpeculativeDecoder`; max_draft_length is the most levels.

        Args:
            drafter: a `TreeDrafter`.

        Raises:
            ValueError: a drafter of chains, a target that cannot hold a tree.
        """
        if not isinstance(drafter, TreeDrafter):
            raise ValueError(
                f"a {type(drafter).__name__} drafts chains, and a TreeDecoder verifies trees; use a "
                "SpeculativeDecoder, or a TreeDrafter"
            )
        model: TreeModel = cached(target, TreeModel, vocab_size=vocab_size)
        super().__init__(model, drafter, sampling=sampling, max_draft_length=max_draft_length, eos_ids=eos_ids)
        self._tree_target = model

    @torch.inference_mode()
    def _round(self, committed: list[int], num_left: int, draws: Sampler) -> TreeRound:
        started_s = perf_counter()
        proposal = self.drafter.propose(committed, min(self.max_draft_length, num_left - 1))
        assert isinstance(proposal, TreeProposal)
        drafted_s = perf_counter()
        tree, target = proposal.tree, self._tree_target
        p = self._laws(target.forward_tree(committed, tree), committed, tree)
        path, next_token = verify_tree(tree, p, draws)
        if proposal.takes_feedback:
            proposal.acceptance_probs = node_probs(tree, proposal.best, p, draws)
        proposal.accepted = path
        emitted = tree.tokens_of(path)
        if not (emitted and emitted[-1] in self.eos_ids):
            emitted = [*emitted, next_token]
        committed += emitted
        counts = Counts(
            num_emitted=len(emitted),
            num_drafted=len(tree),
            num_target=1,
            num_accepted=len(path),
            num_draft_forwards=proposal.num_draft_forwards,
        )
        self._forget(committed, path, counts)
        self.drafter.conclude(committed, len(path))
        times_s = drafted_s - started_s, perf_counter() - drafted_s
        found = tuple(tree.parents), tuple(path)
        return TreeRound(tuple(tree.tokens), len(path), tuple(emitted), proposal.stop_reason, counts, *times_s, *found)

    def _forget(self, committed: list[int], path: list[int], counts: Counts) -> None:
        """The target's cache keeps the accepted path, and holds committed[:-1]; N_discarded is observed as what it
        gives back.
        """
        num_held = len(self.target)
        self._tree_target.keep(path)
        self.target.roll_back(len(committed) - 1)
        num_beyond = num_held - len(self.target)
        assert counts.num_discarded == num_beyond, (
            f"law 4.4: {counts.num_discarded} discarded, the cache gives back {num_beyond}"
        )

    def _laws(
        self, logits: Float[Tensor, "rows vocab"], committed: list[int], tree: Tree
    ) -> Float[Tensor, "rows vocab"]:
        """The target's laws after the text, and after each node."""
        if self.sampling.sees_no_tokens:
            return self.sampling.laws_after(logits, ())
        texts = [committed, *(committed + tree.tokens_of(tree.path(node)) for node in range(len(tree)))]
        return torch.cat([self.sampling.laws_after(row[None], text) for row, text in zip(logits, texts, strict=True)])
