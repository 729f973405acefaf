"""Law 4.5 for a feature draft: fed token by token like a `CachedModel`, beside the target whose states it reads.

Its cache holds, of the committed tokens, a prefix that was fed with what the target said (`kept`), and during a draft
an extension that was fed with the draft's own outputs. Rolling back always drops the extension: what of it was accepted
is fed again with the target's features, as it was in training. So the next forward feeds committed[kept:], whatever
happened since.

In the first round of a generation the target has said nothing, and there is nothing to read: `max_length` is then 0, so
that a drafter proposes nothing, and the verification of the empty draft is the target's reading of the prompt (law 4.4
counts it as any other).
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lm.features.draft import FeatureDraft, Outputs, roll_back
from lm.features.eagle import Eagle
from lm.features.glide import Glide
from lm.features.taps import TappedModel
from lm.models.cached import CachedModel
from lm.models.mode import refuse_training

_CAPACITY = 256


class FeatureModel:
    """One sequence through one feature draft, with the face of a `CachedModel` that drafts.

    Attributes:
        hidden: [1, hidden] what the output head read in the last forward.
        outputs: of the last forward, whose states deeper nodes are fed; None once they are rolled back.
    """

    with_hidden = True
    session: Any = None
    """The generation that has it, as `CachedModel.session`."""

    def __init__(self, draft: FeatureDraft, target: TappedModel, *, vocab_size: int | None = None) -> None:
        """Args:
        draft: bound to the target's model.
        target: the very object that verifies, since its states are read.
        vocab_size: width that logits are cut to, as for `CachedModel`.
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
        return self.draft.config.hidden_size

    @property
    def max_length(self) -> float:
        """The most tokens that may be fed: none before the target has said anything."""
        return float(self.draft.config.max_position_embeddings) if self.target.num_features else 0.0

    def check_mode(self) -> None:
        """Raise ValueError if the draft is in train mode."""
        refuse_training(self.draft)

    @property
    def num_logits(self) -> int:
        """Ids that its distributions have."""
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
        self.hidden: Float[Tensor, "1 hidden"] | None = None
        self.outputs: Outputs | None = None

    def reserve(self, length: int) -> None:
        """Make room for `length` tokens: the cache grows by itself."""

    def roll_back(self, length: int) -> None:
        """Keep at most the first `length` tokens, and none that was fed with the draft's own outputs."""
        self._length = self.kept = min(self.kept, length)
        self.outputs = None
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
        """Feed tokens, after which `end` are fed."""
        last = end - self.draft.lag
        positions = torch.arange(last - tokens.shape[1], last, device=self.device)[None]
        self.outputs = self._outputs(tokens, positions, last)
        self._length = end
        self.hidden = self.outputs.hidden[0, -1:]
        return self._cut(self.draft.logits(self.hidden))

    def _outputs(self, tokens: Int[Tensor, "1 fed"], positions: Int[Tensor, "1 fed"], last: int) -> Outputs:
        """Outputs of entries up to before position `last`."""
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

    @torch.inference_mode()
    def grow(
        self,
        tokens: Int[Tensor, " node"],
        states: Float[Tensor, "node hidden"],
        *,
        depths: Int[Tensor, " node"],
        mask: Bool[Tensor, "node seen"],
    ) -> tuple[Outputs, Float[Tensor, "node vocab"]]:
        """Nodes of a tree, appended to the extension of the cache: (what its nodes give, the logits that follow each).

        The extension is empty after `forward(committed)`, whose `outputs` and logits are those of the root, the last
        committed token; it is dropped by the next `roll_back`.

        Args:
            tokens: of the nodes.
            states: `outputs.states` of each node's parent.
            depths: of each: 1 is below the root.
            mask: which nodes of the extension each sees: those grown before, in their order, then these; itself
                included.
        """
        num_nodes, num_grown = mask.shape[0], mask.shape[1] - mask.shape[0]
        num_kept = self._cache.get_seq_length() - num_grown
        assert num_kept == self._length - 1, (
            f"the extension has {self._cache.get_seq_length() - self._length + 1} nodes, not {num_grown}"
        )
        seen = torch.cat([mask.new_ones(num_nodes, num_kept), mask], -1)[None, None]
        positions = (num_kept - 1 + depths)[None]
        outputs = self.draft(tokens[None], states[None], positions, cache=self._cache, mask=seen)
        return outputs, self._cut(self.draft.logits(outputs.hidden[0]))


class GlideModel(FeatureModel):
    """One sequence through a GliDe draft."""

    draft: Glide

    def _outputs(self, tokens: Int[Tensor, "1 fed"], positions: Int[Tensor, "1 fed"], last: int) -> Outputs:
        return self.draft(tokens, self.target.keys_values(), positions, cache=self._cache)


def feature_model(draft: FeatureDraft, target: TappedModel, *, vocab_size: int | None = None) -> FeatureModel:
    """The model for this draft's kind."""
    return (GlideModel if isinstance(draft, Glide) else EagleModel)(draft, target, vocab_size=vocab_size)


DraftModel = CachedModel | FeatureModel
"""A model that drafts token by token."""
