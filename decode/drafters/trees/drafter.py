"""Drafts that are trees: an ordinary policy stops them by what it sees along the best path.

At every level the best candidate has the largest sum of log q. The policy sees the draft steps of its path as if they
were a chain: entropies, probabilities and head scores of its tokens. If another path takes the lead, the policy sees
that one from its beginning, so that no score of one path counts for another. If `after` says stop, this level is the
last; if `stop_before` does, the level is dropped, its forward paid; `limit` is a number of levels. `read_every` = 2
checks for a stop only after every second level, as SVIP's paper does on EAGLE-2. The paper does not say whose entropy
it reads in a tree; here it is the best path's.

The candidates depend only on the text, so a stop may depend on their values. A tree accepts its candidate x with p(x),
for which candidate heads are trained; fed-time and drawn-time heads, trained for a chain's min(1, p / q), overestimate
survival here.
"""

from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from decode.drafters.trees.growth import Growth
from decode.drafters.trees.shapes import Dynamic, Shape
from decode.loop.drafter import PolicyDrafter, Proposal
from decode.loop.session import cached
from decode.policies.base import Policy
from lm.features.model import BlockModel, GlideModel, TreeDraft
from lm.masks import ROOT, Tree
from lm.signals import entropy, upcast


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
        """Args:
            model: the draft; a `PreTrainedModel` is wrapped in a `CachedModel`. A feature draft (`lm.feature_model`)
                reads the target that verifies; a draft of blocks is refused.
            policy: when to stop.
            shape: how the tree branches; None: as EAGLE-2's.
            read_every: levels between checks for the policy's stop.
            vocab_size: `Pair.vocab_size` if the model's logits are wider than the tokenizer.

        Raises:
            ValueError: a model that cannot hold this tree, a head that does not fit, read_every below 1.
        """
        if read_every < 1:
            raise ValueError(f"read_every is {read_every}; it must be at least 1")
        wrapped = cached(model, vocab_size=vocab_size, with_hidden=bool(policy.heads), holds_trees=True)
        super().__init__(wrapped, policy)
        if isinstance(self.model, BlockModel):
            raise ValueError("a DSpark draft makes one block, which is a chain; draft without a tree")
        self.shape, self.read_every = shape or Dynamic(), read_every
        if isinstance(self.model, GlideModel) and self.shape.num_expanded > 1:
            raise ValueError(
                f"a GliDe draft feeds one chain, but {self.shape} expands {self.shape.num_expanded} nodes a level; use "
                "CaPE's tree"
            )
        self._looks = type(policy).after is not Policy.after or policy.stops_before or bool(policy.zero_feedback)

    def propose(self, committed: list[int], max_tokens: int) -> Proposal:
        """Draft at most `max_tokens` levels after `committed`."""
        num_levels = self.begin(committed, max_tokens)
        self._path: list[int] = []
        self._outputs: dict[int, tuple[Float[Tensor, " vocab"], Float[Tensor, "1 hidden"] | None]] = {}
        self._growth = Growth(self.shape, self._session.eos_ids)
        fed: Tree | None = Tree()
        while self._growth.depth < num_levels and fed is not None and self._grow(committed, fed):
            fed = self._growth.expand()
            self.proposal.stop_reason = "limit" if self._growth.open else "eos"
        self._nodes = self._growth.selected()
        indices = {node: index for index, node in enumerate(self._nodes)}
        self.proposal.tree = tree = self._growth.tree()
        self.proposal.tokens = list(tree.tokens)
        self.proposal.best = [indices[node] for node in self._path if node in indices]
        return self.proposal

    def conclude(self, committed: list[int], num_accepted: int) -> None:
        """The accepted path was rejected if it ends at a node with children."""
        self.model.roll_back(len(committed) - 1)
        tree, accepted, best = self.proposal.tree, self.proposal.accepted, self.proposal.best
        assert tree is not None
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
        logits = self.model.forward_tree(committed, fed)
        self.proposal.num_draft_forwards += 1
        hidden = self.model.hidden
        rows = [None] * len(logits) if hidden is None else list(hidden[-len(logits) :].split(1))
        self._outputs.update(zip(growth.expanded, zip(logits, rows, strict=True), strict=True))
        growth.add_level(upcast(logits).log_softmax(-1))
        if not self._looks:
            return True
        is_checked, path = growth.depth % self.read_every == 0, growth.best_path()
        run = self.run.branched(is_longer=path[:-1] == self._path)
        stops = False
        for node in path[len(run.steps) :]:
            logits, self.model.hidden = self._outputs[growth.parents[node]]
            drawn = self._signals.read(len(run.steps), logits, growth.tokens[node])
            if is_checked and node == path[-1] and run.stops_before(drawn):
                growth.drop_level()
                self.proposal.stop_reason = "policy"
                return False
            stops = run.keep(drawn)
        self.run, self._path = run, path
        if is_checked and stops:
            self.proposal.stop_reason = "policy"
            return False
        return True
