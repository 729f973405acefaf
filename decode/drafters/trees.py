"""Drafts that are trees: an ordinary policy stops them by what it sees along the best path.

At every level the best candidate has the largest sum of log q. The policy sees the draft steps of its path as if
they were a chain; if another path takes the lead, it sees that one from its beginning. If `after` says stop, this
level is the last; if `stop_before` does, the level is dropped, its forward paid; `limit` is a number of levels.
`read_every` = 2 checks for a stop only after every second level, as SVIP's paper does on EAGLE-2. The paper does
not say whose entropy it reads in a tree; here it is the best path's.

The candidates depend only on the text, so a stop may depend on their values. They are numbered as they are made,
parents first, and expanded ones are fed to the draft. Those to verify are selected at the end; since no child is
more probable than its parent, they form a tree. Candidate heads are for trees (law 4.8b); fed-time and drawn-time
heads overestimate survival here.

EAGLE-2 (arXiv 2406.16858; `topK_genrate` of SafeAILab/EAGLE at cb7e084): every level offers the `width` most probable
    children of each expanded node; of these the `width` best by the sum of log q along their path are expanded next; of
    all candidates the best `num_nodes` are verified. Published: width 10, 59 nodes, 6 levels.
CaPE (GliDe with a CaPE, arXiv 2402.02082; cape.sh of its code at edf4c9a): a greedy chain (published: of 4) whose
    tokens get siblings, more where the draft is less sure: 8 candidates if the largest probability is below .3, 6 below
    .6, 4 below .8, else 2, including the chain's own token. All are verified.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from math import exp, inf

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from decode.loop.drafter import PolicyDrafter, Proposal
from decode.policies.base import Policy
from lm.features.model import BlockModel, GlideModel, TreeDraft
from lm.masks import ROOT, Tree
from lm.signals import entropy, upcast


@dataclass(frozen=True)
class Shape:
    """How a tree branches; ValueError for a size below 1."""

    bands: tuple[tuple[float, int], ...]
    """(upper bound of the largest probability, number of candidates), in rising order; the last is for all larger."""
    num_expanded: int = 1
    """Number of nodes of a level, the best, that get children."""
    num_nodes: int | None = None
    """Number of candidates, the best of all, that are verified; None: all."""

    def __post_init__(self) -> None:
        if min(self.num_expanded, 1 if self.num_nodes is None else self.num_nodes, *(num for _, num in self.bands)) < 1:
            raise ValueError(f"{self}: every size must be at least 1; num_nodes=None verifies all candidates")

    def num_children(self, max_prob: float) -> int:
        """Number of candidates after a node where the draft's largest probability is `max_prob`."""
        return next((num for below, num in self.bands if max_prob < below), self.bands[-1][1])


def dynamic(width: int = 10, num_nodes: int | None = 59) -> Shape:
    """EAGLE-2's shape, which grows where the draft is confident."""
    return Shape(((1.0, width),), width, num_nodes)


SHAPES = {"eagle2": dynamic(), "cape": Shape(((0.3, 8), (0.6, 6), (0.8, 4), (1.0, 2)))}
"""Published shapes, by their names in commands."""


class Growth:
    """The candidates of one tree."""

    def __init__(self, shape: Shape, eos_ids: Set[int]) -> None:
        """`eos_ids`: tokens after which nothing is drafted."""
        self._shape = shape
        self._eos_ids = eos_ids
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.scores: list[float] = []
        """Sum of log q along the path of each candidate."""
        self.levels: list[list[int]] = []
        """The candidates of each level."""
        self.expanded = [ROOT]
        """The nodes whose distributions make the next level."""
        self._fed: list[int] = []

    def add_level(self, log_q: Float[Tensor, "expanded vocab"]) -> None:
        """Add the children of the expanded nodes, from their log probabilities; ValueError if these are not finite."""
        if log_q.is_cpu:
            num_read = max(map(self._shape.num_children, log_q.amax(-1).exp().tolist()))
        else:
            num_read = max(num for _, num in self._shape.bands)
        top = log_q.topk(min(num_read, log_q.shape[-1]))
        # in one transfer: float32 holds every id below 2^24 exactly
        rows = torch.cat([top.values, top.indices.to(log_q.dtype)], -1).tolist()
        start = len(self.tokens)
        for node, row in zip(self.expanded, rows, strict=True):
            before = 0.0 if node == ROOT else self.scores[node]
            values = row[: len(row) // 2]
            num = self._shape.num_children(exp(values[0]))
            for value, token in zip(values[:num], row[len(values) :], strict=False):
                if value > -inf:
                    self.tokens.append(int(token))
                    self.parents.append(node)
                    self.scores.append(before + min(value, 0.0))
        if start == len(self.tokens):
            raise ValueError(
                "a distribution to choose candidates from is not finite; load the model in float32 or check its weights"
            )
        self.levels.append(list(range(start, len(self.tokens))))

    def drop_level(self) -> None:
        """Remove the last level."""
        start = self.levels.pop()[0]
        for column in (self.tokens, self.parents, self.scores):
            del column[start:]

    def expand(self) -> Tree | None:
        """Select the nodes that get children; returns the tree of all nodes that are fed, None if none is expanded."""
        # nothing is drafted after an EOS
        candidates = [node for node in self.levels[-1] if self.tokens[node] not in self._eos_ids]
        self.expanded = sorted(self._best(candidates, self._shape.num_expanded))
        self._fed += self.expanded
        return self._tree_of(self._fed) if self.expanded else None

    def best_path(self) -> list[int]:
        """Candidates from the first level to the best one of the deepest level."""
        path = self._best(self.levels[-1], 1)
        while self.parents[path[0]] != ROOT:
            path.insert(0, self.parents[path[0]])
        return path

    def selected(self) -> tuple[list[int], Tree]:
        """The candidates that are verified, in the order of their numbers, and their tree."""
        nodes = sorted(self._best(range(len(self.tokens)), self._shape.num_nodes))
        return nodes, self._tree_of(nodes)

    def _best(self, nodes: Sequence[int], num: int | None) -> list[int]:
        """The most probable, best first; of equals the first, so a parent comes before its children."""
        return sorted(nodes, key=lambda node: -self.scores[node])[:num]

    def _tree_of(self, nodes: Sequence[int]) -> Tree:
        indices = {node: index for index, node in enumerate(nodes)} | {ROOT: ROOT}
        return Tree([self.tokens[node] for node in nodes], [indices[self.parents[node]] for node in nodes])


class TreeDrafter(PolicyDrafter):
    """One model drafts a tree level by level until its policy stops."""

    drafts_trees = True
    model: TreeDraft

    def __init__(
        self,
        model: PreTrainedModel | TreeDraft | BlockModel,
        policy: Policy,
        shape: Shape | None = None,
        *,
        read_every: int = 1,
        vocab_size: int | None = None,
    ) -> None:
        """Args, beside those of `PolicyDrafter`:
        shape: how the tree branches; None: as EAGLE-2's. ValueError if the model cannot hold such a tree.
        read_every: levels between checks for the policy's stop.
        """
        if read_every < 1:
            raise ValueError(f"read_every is {read_every}; it must be at least 1")
        super().__init__(model, policy, vocab_size=vocab_size)
        if isinstance(self.model, BlockModel):
            raise ValueError("a DSpark draft makes one block, which is a chain; draft without a tree")
        self.shape = shape or dynamic()
        self.read_every = read_every
        if isinstance(self.model, GlideModel) and self.shape.num_expanded > 1:
            raise ValueError(f"a GliDe draft feeds one chain, but {self.shape} expands more nodes; use CaPE's tree")

    def propose(self, committed: list[int], max_tokens: int) -> Proposal:
        """Draft at most `max_tokens` levels after `committed`."""
        num_levels = self.begin(committed, max_tokens)
        self._path: list[int] = []
        self._outputs: dict[int, tuple[Float[Tensor, " vocab"], Float[Tensor, "1 hidden"] | None]] = {}
        self._growth = Growth(self.shape, self._session.eos_ids)
        fed: Tree | None = Tree()
        while len(self._growth.levels) < num_levels and fed is not None:
            if not self._grow(committed, fed):
                self.run.stop("policy")
                break
            fed = self._growth.expand()
        if fed is None:  # nothing follows the last level
            self.run.stop("eos")
        self._nodes, tree = self._growth.selected()
        indices = {node: index for index, node in enumerate(self._nodes)}
        best = [indices[node] for node in self._path if node in indices]
        self.proposal = replace(self.proposal, tokens=list(tree.tokens), tree=tree, best=best, run=self.run)
        return self.proposal

    def conclude(self, committed: list[int], num_accepted: int) -> None:
        """The accepted path was rejected if it ends at a node with children."""
        self.model.roll_back(len(committed) - 1)
        tree = self.proposal.tree
        assert tree is not None
        accepted = self.proposal.accepted
        best = self.proposal.best
        last = accepted[-1] if accepted else ROOT
        below = [depth for node, depth in enumerate(tree.depths) if last == ROOT or last in tree.path(node)]
        rejected_entropy = 0.0
        if tree.children(last) and "entropy" in self.policy.signals:
            rejected_entropy = float(entropy(self._outputs[ROOT if last == ROOT else self._nodes[last]][0]))
        num_passed = next((index for index, node in enumerate(best) if node not in accepted), len(best))
        probs = self.proposal.acceptance_probs[: num_passed + 1]
        self.run.end(max(below, default=0), num_accepted, probs, rejected_entropy=rejected_entropy)

    def _grow(self, committed: list[int], fed: Tree) -> bool:
        """Add a level; returns whether the policy continues."""
        growth = self._growth
        logits = self.model.feed_tree(committed[len(self.model) :], fed)
        self.proposal.num_draft_forwards += 1
        hidden = self.model.hidden
        rows = [None] * len(logits) if hidden is None else list(hidden[-len(logits) :].split(1))
        self._outputs.update(zip(growth.expanded, zip(logits, rows, strict=True), strict=True))
        growth.add_level(upcast(logits).log_softmax(-1))
        if not self._reads_tokens:
            return True
        is_checked = len(growth.levels) % self.read_every == 0
        path = growth.best_path()
        run = self.run.branched(is_longer=path[:-1] == self._path)
        stops = False
        for node in path[len(run.steps) :]:
            logits, states = self._outputs[growth.parents[node]]
            drawn = self._signals.read(len(run.steps), logits, growth.tokens[node], states=states)
            if is_checked and node == path[-1] and run.stops_before(drawn):
                growth.drop_level()
                return False
            stops = run.keep(drawn)
        self.run = run
        self._path = path
        return not (is_checked and stops)
