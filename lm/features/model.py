"""Law 4.5 for a feature draft: one sequence, fed token by token like a `CachedModel`, beside the target whose states it
reads; with the nodes of a tree level by level; or with a block at once, whose tokens are then drawn one by one.

Its cache holds a prefix of the committed tokens that was fed with the target's features (`num_kept`), and during a
draft an extension that was fed with the draft's own outputs. Rolling back always drops the extension: its accepted
tokens are fed again with the target's features, as in training. So callers feed committed[num_kept:] next.

In the first round of a generation the target has read nothing: `max_length` is then 0, so that a drafter proposes
nothing, and the verification of the empty draft reads the prompt (law 4.4 counts it as any other).
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lm.batch import BatchRow
from lm.cache import CAPACITY, growing_cache, roll_back
from lm.features.base import FeatureDraft, Outputs
from lm.features.dspark import DSpark, Memory
from lm.features.eagle import Eagle
from lm.features.glide import Glide
from lm.features.recorder import FeatureRecorder
from lm.forwards import refuse_training
from lm.masks import EMPTY, Tree, tree_feed
from lm.model import CachedModel


class FeatureModel:
    """One sequence in one feature draft, with the interface of a `CachedModel` that drafts.

    Attributes:
        hidden: [rows, hidden] input of the LM head in the last forward, which has one row; a tree's has more.
    """

    with_hidden = True
    holds_trees = True
    num_prompt = 0

    def __init__(self, draft: FeatureDraft, target: CachedModel, *, vocab_size: int | None = None) -> None:
        """`draft` is bound to the model of `target`, which records what it reads; logits are cut to `vocab_size`."""
        assert target.recorder is not None, "make the target with a recorder of this draft"
        self.draft = draft.eval()
        self.target = target
        self.vocab_size = vocab_size
        self._recorder: FeatureRecorder = target.recorder
        self.hidden_size = draft.hidden_size
        self.num_logits = min(draft.config.vocab_size, vocab_size or draft.config.vocab_size)
        self.reset()

    def __len__(self) -> int:
        return self._length

    @property
    def max_length(self) -> float:
        return float(self.draft.config.max_position_embeddings) if self._recorder.num_features else 0.0

    def check_mode(self) -> None:
        refuse_training(self.draft)

    @property
    def num_embeddings(self) -> int:
        return next(self.draft.embedding.parameters()).shape[0]

    def embedding(self, tokens: Int[Tensor, " tokens"]) -> Float[Tensor, "tokens hidden"]:
        return self.draft.embed(tokens).to(tokens.device)

    def reset(self, num_tokens: int = 0) -> None:
        self.device = self.output_device = self.draft.device
        self._cache = growing_cache(CAPACITY + num_tokens)  # a tree's nodes need room beyond the text
        self._length = self.num_kept = 0
        self._tree = EMPTY
        self.hidden: Float[Tensor, "rows hidden"] | None = None

    def roll_back(self, length: int) -> None:
        """Keep at most the first `length` tokens, without those that were fed with the draft's own outputs. The entry
        of the last kept token is dropped as well: the token after it would read its output, which is not kept.
        """
        self._length = self.num_kept = min(self.num_kept, length, self._recorder.num_features)
        self._tree = EMPTY
        roll_back(self._cache, max(self._length - self.draft.lag, 0))

    @torch.inference_mode()
    def feed(self, new_tokens: Sequence[int]) -> Float[Tensor, "1 vocab"]:
        """Append tokens, at least one: the logits after the last."""
        known = self._recorder.num_features + 1
        start = self._length
        while (num_fed := self._length - start) < len(new_tokens):
            # the target's features serve many tokens at once; the draft's own outputs come one at a time
            end = min(known, start + len(new_tokens)) if self._length < known else self._length + 1
            fed = new_tokens[max(num_fed, self.draft.lag - start) : end - start]
            logits = self._feed(torch.tensor([fed], device=self.device), end)
            self.num_kept = min(end, known)
        return logits

    @torch.inference_mode()
    def feed_drawn(self, token: Int[Tensor, " 1"]) -> Float[Tensor, "1 vocab"]:
        return self._feed(token.view(1, 1).to(self.device), self._length + 1)

    def _feed(self, tokens: Int[Tensor, "1 fed"], end: int) -> Float[Tensor, "1 vocab"]:
        """Feed the tokens before index `end` of the text: the logits after the last."""
        last = end - self.draft.lag
        positions = torch.arange(last - tokens.shape[1], last, device=self.device)[None]
        self.hidden = self._run(tokens, positions, last).hidden[0, -1:]
        self._length = end
        return self.draft.logits(self.hidden)[:, : self.vocab_size]

    def _run(self, tokens: Int[Tensor, "1 fed"], positions: Int[Tensor, "1 fed"], last: int) -> Outputs:
        """Outputs of the entries of these tokens, which end before position `last`."""
        raise NotImplementedError


class EagleModel(FeatureModel):
    """One sequence in an EAGLE draft."""

    draft: Eagle
    # states that the next entries read: that of the newest token, and those of the tree's nodes
    _states: Float[Tensor, "row hidden"]

    def _run(self, tokens: Int[Tensor, "1 fed"], positions: Int[Tensor, "1 fed"], last: int) -> Outputs:
        is_known = last <= self._recorder.num_features
        features = self._recorder.features(last - tokens.shape[1], last) if is_known else None
        states = self._states[None] if features is None else self.draft.entering(features)
        outputs = self.draft(tokens, states, positions, cache=self._cache)
        self._states = outputs.states[0, -1:]
        return outputs

    @torch.inference_mode()
    def feed_tree(self, new_tokens: Sequence[int], tree: Tree) -> Float[Tensor, "rows vocab"]:
        """A node reads its parent's output, so children of new nodes wait for the next call."""
        new = slice(len(self._tree), len(tree))
        parts = []
        if new_tokens:
            assert not len(self._tree), "roll back before the text grows: it would leave its tree"
            parts.append((self.feed(new_tokens), self.hidden))
        if new.stop > new.start:
            tokens, positions, mask = tree_feed(tree, new.start, self._length - self.draft.lag, device=self.device)
            states = torch.stack([self._states[parent + 1] for parent in tree.parents[new]])[None]
            outputs = self.draft(tokens[None], states, positions[None], cache=self._cache, mask=mask[None, None])
            self._states = torch.cat([self._states, outputs.states[0]])
            parts.append((self.draft.logits(outputs.hidden[0])[:, : self.vocab_size], outputs.hidden[0]))
        self._tree = tree
        logits, hidden = zip(*parts, strict=True)
        self.hidden = torch.cat(hidden)
        return torch.cat(logits)


class GlideModel(FeatureModel):
    """One sequence in a GliDe draft."""

    draft: Glide

    def _run(self, tokens: Int[Tensor, "1 fed"], positions: Int[Tensor, "1 fed"], last: int) -> Outputs:
        keys_values = self.draft.keys_values(self.target.cache, len(self.target))
        return self.draft(tokens, keys_values, positions, cache=self._cache)

    @torch.inference_mode()
    def feed_tree(self, new_tokens: Sequence[int], tree: Tree) -> Float[Tensor, "1 vocab"]:
        """Append CaPE's tree: one chain is fed, its other siblings are leaves (`CachedModel.feed_tree`)."""
        assert list(tree.parents) == list(range(-1, len(tree) - 1)), "a GliDe draft feeds one chain; use CaPE's shape"
        new_nodes = tree.tokens[len(self._tree) :]
        self._tree = tree
        return self.feed([*new_tokens, *new_nodes])


class BlockModel(FeatureModel):
    """One sequence in a DSpark draft. A block is one forward, from the first token whose features the target has
    not given; the tokens drawn from it are read by its Markov head alone.

    Its cache holds the context (`num_kept` entries) and the block, of which `len` counts the tokens that are read.
    """

    draft: DSpark

    @property
    def max_length(self) -> float:
        known = self._recorder.num_features
        return min(float(known + self.draft.block_size), super().max_length) if known else 0.0

    @torch.inference_mode()
    def feed(self, new_tokens: Sequence[int]) -> Float[Tensor, "1 vocab"]:
        if self._length == self.num_kept:  # no block has begun
            num_context = min(self._recorder.num_features - self._length, len(new_tokens) - 1)
            new_tokens = new_tokens[num_context:]
            self._begin(new_tokens[0], self._length + num_context)
        for token in torch.tensor(new_tokens, device=self.device).split(1):
            logits = self._markov_step(token)
        return logits

    @torch.inference_mode()
    def feed_drawn(self, token: Int[Tensor, " 1"]) -> Float[Tensor, "1 vocab"]:
        return self._markov_step(token.to(self.device))

    @torch.inference_mode()
    def confidence(self) -> Float[Tensor, " 1"]:
        """The draft's own logit of the acceptance rate of the next token."""
        assert self.hidden is not None, "no block has begun"
        return self.draft.confidence(self.hidden)

    def _begin(self, token: int, anchor: int) -> None:
        """Run the block that begins with this token, of index `anchor`."""
        if anchor > self.num_kept:
            self.draft.remember(self._recorder.features(self.num_kept, anchor), self._cache)
        anchors, positions = (torch.tensor([[number]], device=self.device) for number in (token, anchor))
        self._states = self.draft.block(anchors, positions, cache=self._cache)[0]
        self._base = self.draft.base(self._states)[..., : self.vocab_size]
        self._length = self.num_kept = anchor
        self._memory: Memory = None

    def _markov_step(self, token: Int[Tensor, " 1"]) -> Float[Tensor, "1 vocab"]:
        index = self._length - self.num_kept
        self.hidden, self._memory = self.draft.follow(self._states[:, index], token, self._memory)
        self._length += 1
        return self._base[:, index] + self.draft.bias(self.hidden)[:, : self.vocab_size]


def feature_model(
    draft: FeatureDraft, target: CachedModel, *, vocab_size: int | None = None
) -> EagleModel | GlideModel | BlockModel:
    """One sequence in `draft`; args are those of `FeatureModel`."""
    kind = BlockModel if isinstance(draft, DSpark) else GlideModel if isinstance(draft, Glide) else EagleModel
    return kind(draft, target, vocab_size=vocab_size)


DraftModel = CachedModel | BatchRow | FeatureModel  # a model that drafts token by token
TreeDraft = CachedModel | EagleModel | GlideModel
"""A model that drafts trees; EAGLE drafts grow EAGLE-2's trees, GliDe drafts CaPE's chain with siblings."""
