"""Toy models that hold trees, and the loop on them: what `toys.loop` is for chains."""

import torch
from torch import Tensor

from decode.drafters.trees import Shape, TreeDrafter
from decode.loop.decoder import SpeculativeDecoder
from decode.policies import Policy
from lm import Sampling
from lm.masks import Tree
from tests.toys.enumeration import ToyModel, _logits


class ToyTreeModel(ToyModel):
    """A toy whose cache holds a text and, behind it, a tree; logits depend on what was fed and kept."""

    holds_trees = True

    def reset(self) -> None:
        super().reset()
        self.tree = Tree()

    def __len__(self) -> int:
        return len(self.fed) + len(self.tree)

    def roll_back(self, length: int) -> None:
        self.tree = Tree()
        super().roll_back(length)

    def forward_tree(self, token_ids: list[int], tree: Tree) -> Tensor:
        new = token_ids[len(self.fed) :]
        assert not (new and len(self.tree))
        assert list(tree.tokens[: len(self.tree)]) == list(self.tree.tokens)
        self.fed += new
        nodes = [tree.path(node) for node in range(len(self.tree), len(tree))]
        prefixes = [tuple(self.fed + tree.tokens_of(path)) for path in ([[]] if new else []) + nodes]
        self.forwards.append(len(new) + len(nodes))
        self.tree = tree
        self.hidden = torch.stack([_logits(self.seed + 1000, prefix, 4, 1.0) for prefix in prefixes])
        return torch.stack([_logits(self.seed, prefix, self.width, self.sharpness) for prefix in prefixes])[
            :, : self.vocab_size
        ]

    def keep(self, path: list[int]) -> None:
        self.fed += self.tree.tokens_of(path)
        self.tree = Tree()


def tree_decoder_of(
    policy: Policy,
    shape: Shape,
    *,
    sampling: Sampling | None = None,
    eos_ids: tuple[int, ...] = (2,),
    length: int = 20,
    vocab_size: int = 3,
    read_every: int = 1,
) -> SpeculativeDecoder:
    """The real loop on two toys that disagree."""
    drafter = TreeDrafter(ToyTreeModel(2, vocab_size), policy, shape, read_every=read_every)
    target = ToyTreeModel(1, vocab_size)
    return SpeculativeDecoder(target, drafter, sampling=sampling, eos_ids=frozenset(eos_ids), max_draft_length=length)
