"""Law 4.5 for a feature draft: fed token by token like a `CachedModel`, beside the target whose states it reads; or
level by level with a tree's nodes, like a `TreeModel`; or with a block at once, which is then told token by token.

Its cache holds, of the committed tokens, a prefix that was fed with what the target said (`kept`), and during a draft
an extension that was fed with the draft's own outputs. Rolling back always drops the extension: what of it was accepted
is fed again with the target's features, as it was in training. So the next forward feeds committed[kept:], whatever
happened since.

In the first round of a generation the target has read nothing, and the draft has nothing to read: `max_length` is then
0, so that a drafter proposes nothing, and the verification of the empty draft is the target's reading of the prompt
(law 4.4 counts it as any other).
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lm.features.draft import FeatureDraft, Outputs, roll_back
from lm.features.dspark import DSpark, Memory
from lm.features.eagle import Eagle
from lm.features.glide import Glide
from lm.features.taps import TappedModel
from lm.models.cached import CachedModel
from lm.models.masked import tree_feed
from lm.models.mode import refuse_training
from lm.trees.cached import TreeModel
from lm.trees.tree import EMPTY, Tree

_CAPACITY = 256


class FeatureModel:
    """One sequence through one feature draft, with the face of a `CachedModel` that drafts.

    Attributes:
        hidden: [rows, hidden] what the output head read in the last forward, which has one row; a tree's has more.
        outputs: outputs of the last forward, whose states deeper nodes are fed; None once they are rolled back.
    """

    with_hidden = True
    session: Any = None
    """The generation that uses this model, or did last (`decode.loop.session`)."""

    def __init__(self, draft: FeatureDraft, target: TappedModel, *, vocab_size: int | None = None) -> None:
        """Args:
        draft: a draft that is bound to the target's model.
        target: the very object that verifies, since its states are read.
        vocab_size: width that logits are cut to; None keeps all.
        """
        self.draft, self.target, self.vocab_size = draft.eval(), target, vocab_size
        self.reset()

    def __len__(self) -> int:
        """Tokens that are fed and not rolled back."""
        return self._length

    @property
    def device(self) -> torch.device:
        """Device that it computes on."""
        return self.draft.device

    @property
    def output_device(self) -> torch.device:
        """Device that hidden states come out on."""
        return self.draft.device

    @property
    def hidden_size(self) -> int:
        """Width of what heads read."""
        return self.draft.hidden_size

    @property
    def max_length(self) -> float:
        """The most tokens that may be fed: none before the target has read anything."""
        return float(self.draft.config.max_position_embeddings) if self.target.num_features else 0.0

    def check_mode(self) -> None:
        """Raise ValueError if the draft is in train mode."""
        refuse_training(self.draft)

    @property
    def num_logits(self) -> int:
        """Width of its distributions."""
        return self.draft.num_logits if self.vocab_size is None else min(self.draft.num_logits, self.vocab_size)

    @property
    def num_embeddings(self) -> int:
        """Rows of the input embeddings."""
        return next(self.draft.embedding.parameters()).shape[0]

    def embedding(self, tokens: Int[Tensor, " tokens"]) -> Float[Tensor, "tokens hidden"]:
        """Rows of the input embeddings, on the device of `tokens`."""
        return self.draft.embed(tokens).to(tokens.device)

    def reset(self) -> None:
        """Empty the cache, for a new sequence."""
        self._cache = self.draft.new_cache(_CAPACITY)
        self._length = self.kept = 0
        self.hidden: Float[Tensor, "rows hidden"] | None = None
        self.roll_back(0)

    def roll_back(self, length: int) -> None:
        """Keep at most the first `length` tokens, and none that was fed with the draft's own outputs."""
        self._length = self.kept = min(self.kept, length)
        self.outputs: Outputs | None = None
        roll_back(self._cache, max(self._length - self.draft.lag, 0))

    @torch.inference_mode()
    def forward(self, token_ids: Sequence[int], num_rows: int = 1) -> Float[Tensor, "1 vocab"]:
        """Logits that follow the last token of `token_ids`, of which the first len(self) were fed before."""
        assert len(token_ids) > self._length, "no token to feed"
        assert num_rows == 1, f"{num_rows} rows asked; a feature draft verifies nothing"
        known = self.target.num_features + 1
        if self.outputs is None and self._length >= known:
            self.roll_back(known - 1)  # the outputs that the next token is fed with were dropped
        while self._length < len(token_ids):
            # the target's features serve many tokens at once; the draft's own outputs come one at a time
            end = min(known, len(token_ids)) if self._length < known else self._length + 1
            fed = token_ids[max(self._length, self.draft.lag) : end]
            logits = self._fed(torch.tensor([fed], device=self.device), end)
            self.kept = min(end, known)
        return logits

    @torch.inference_mode()
    def forward_drawn(self, token: Int[Tensor, " 1"]) -> Float[Tensor, "1 vocab"]:
        """Logits that follow a token which was drawn from the last forward: it never visits the host."""
        return self._fed(token.view(1, 1).to(self.device), self._length + 1)

    def _fed(self, tokens: Int[Tensor, "1 fed"], end: int) -> Float[Tensor, "1 vocab"]:
        """Feed tokens, the last of which is number `end` of the text: the logits that follow it."""
        last = end - self.draft.lag
        positions = torch.arange(last - tokens.shape[1], last, device=self.device)[None]
        self.outputs = self._outputs(tokens, positions, last)
        self._length = end
        self.hidden = self.outputs.hidden[0, -1:]
        return self._cut(self.draft.logits(self.hidden))

    def _outputs(self, tokens: Int[Tensor, "1 fed"], positions: Int[Tensor, "1 fed"], last: int) -> Outputs:
        """Outputs of the entries of these tokens, which end before position `last`."""
        raise NotImplementedError

    def _cut(self, logits: Float[Tensor, "*node all"]) -> Float[Tensor, "*node vocab"]:
        return logits[..., : self.vocab_size]


class EagleModel(FeatureModel):
    """One sequence through an EAGLE draft."""

    draft: Eagle

    def _outputs(self, tokens: Int[Tensor, "1 fed"], positions: Int[Tensor, "1 fed"], last: int) -> Outputs:
        if last <= self.target.num_features:
            states = self.draft.entering(self.target.features(last - tokens.shape[1], last))
        else:
            assert self.outputs is not None
            states = self.outputs.states[:, -1:]
        return self.draft(tokens, states, positions, cache=self._cache)

    def roll_back(self, length: int) -> None:
        super().roll_back(length)
        self._tree = EMPTY

    @torch.inference_mode()
    def forward_tree(self, token_ids: Sequence[int], tree: Tree) -> Float[Tensor, "rows vocab"]:
        """The same as `TreeModel.forward_tree`; a node is fed with its parent's output, so nodes whose parents are new
        as well wait for the next call.

        Args:
            token_ids: the whole text.
            tree: begins with the nodes that were fed before, which extend the cache until the next `roll_back`.
        """
        new = slice(len(self._tree), len(tree))
        logits, hidden = [], []
        if len(token_ids) > len(self):
            assert not len(self._tree), "a text that has grown leaves its tree behind: roll back first"
            logits.append(self.forward(token_ids))
            assert self.outputs is not None
            self._states, hidden = self.outputs.states[0, -1:], [self.outputs.hidden[0, -1:]]
        if new.stop > new.start:
            parents, tokens = (torch.tensor(column[new], device=self.device) for column in (tree.parents, tree.tokens))
            num_text = self._length - self.draft.lag
            assert self._cache.get_seq_length() == num_text + len(self._tree), "the cache holds the text and the tree"
            fed = tree_feed(tree.depths[new], tree.sees()[new], num_text)
            positions, mask = fed[0][None].to(self.device), fed[1][None, None].to(self.device)
            states = self._states[parents + 1][None]
            outputs = self.draft(tokens[None], states, positions, cache=self._cache, mask=mask)
            self._states = torch.cat([self._states, outputs.states[0]])
            logits.append(self._cut(self.draft.logits(outputs.hidden[0])))
            hidden.append(outputs.hidden[0])
        self._tree, self.hidden = tree, torch.cat(hidden)
        return torch.cat(logits)


class GlideModel(FeatureModel):
    """One sequence through a GliDe draft."""

    draft: Glide

    def _outputs(self, tokens: Int[Tensor, "1 fed"], positions: Int[Tensor, "1 fed"], last: int) -> Outputs:
        return self.draft(tokens, self.target.keys_values(), positions, cache=self._cache)

    @torch.inference_mode()
    def forward_tree(self, token_ids: Sequence[int], tree: Tree) -> Float[Tensor, "1 vocab"]:
        """The same as `TreeModel.forward_tree`, for trees that are one chain: the siblings beside it are leaves, which
        no draft feeds.
        """
        assert list(tree.parents) == list(range(-1, len(tree) - 1)), "a GliDe draft feeds one chain; use CaPE's shape"
        return self.forward([*token_ids, *tree.tokens])


class BlockModel(FeatureModel):
    """One sequence through a DSpark draft: a block is one forward, from the first token whose features the target has
    not told; the tokens drawn from it are only told to its Markov head.

    Its cache holds the context, `kept` entries, and behind it the block, until it is rolled back.
    """

    draft: DSpark

    @property
    def max_length(self) -> float:
        known = self.target.num_features
        return min(float(known + self.draft.block_size), super().max_length) if known else 0.0

    def roll_back(self, length: int) -> None:
        super().roll_back(length)
        self._states: Float[Tensor, "1 place hidden"] | None = None

    @torch.inference_mode()
    def forward(self, token_ids: Sequence[int], num_rows: int = 1) -> Float[Tensor, "1 vocab"]:
        assert num_rows == 1, f"{num_rows} rows asked; a feature draft verifies nothing"
        if self._states is None:
            self._begin(token_ids, min(self.target.num_features, len(token_ids) - 1))
        assert len(token_ids) > self._length, "no token to feed"
        told = torch.tensor(token_ids[self._length :], device=self.device)
        for place in range(len(told)):
            logits = self._told(told[place : place + 1])
        return logits

    @torch.inference_mode()
    def forward_drawn(self, token: Int[Tensor, " 1"]) -> Float[Tensor, "1 vocab"]:
        return self._told(token.to(self.device))

    @torch.inference_mode()
    def confidence(self) -> Float[Tensor, " 1"]:
        """Logit that the draft's own head gives to the acceptance rate of the next token."""
        assert self.hidden is not None, "no block has begun"
        return self.draft.confidence(self.hidden)

    def _begin(self, token_ids: Sequence[int], anchor: int) -> None:
        """Run the block whose anchor has this place."""
        if anchor > self.kept:
            context = self.draft.context(self.target.features(self.kept, anchor))
            self.draft.remember(context, torch.arange(self.kept, anchor, device=self.device)[None], self._cache)
            self.kept = anchor
        anchors, places = (torch.tensor([[number]], device=self.device) for number in (token_ids[anchor], anchor))
        self._states = self.draft.block(anchors, places, cache=self._cache)[0]
        self._base, self._length = self._cut(self.draft.base(self._states)), anchor
        self._memory: Memory = None

    def _told(self, token: Int[Tensor, " 1"]) -> Float[Tensor, "1 vocab"]:
        """The logits of the place that follows this token."""
        assert self._states is not None, "no block has begun"
        place = self._length - self.kept
        assert place < self.draft.block_size, f"a block has {self.draft.block_size} places"
        self.hidden, self._memory = self.draft.follow(self._states[:, place], token, self._memory)
        self._length += 1
        return self._base[:, place] + self._cut(self.draft.bias(self.hidden))


def feature_model(
    draft: FeatureDraft, target: TappedModel, *, vocab_size: int | None = None
) -> EagleModel | GlideModel | BlockModel:
    """One sequence through `draft`, beside the target whose states it reads; args are those of `FeatureModel`."""
    if isinstance(draft, DSpark):
        return BlockModel(draft, target, vocab_size=vocab_size)
    return (GlideModel if isinstance(draft, Glide) else EagleModel)(draft, target, vocab_size=vocab_size)


DraftModel = CachedModel | FeatureModel
"""A model that drafts token by token."""
TreeDraft = TreeModel | EagleModel | GlideModel
"""A model that drafts trees; of feature drafts, EAGLE's grow EAGLE-2's trees, GliDe's CaPE's chain with siblings."""
