"""Drafts of a feature draft from many positions of one text, side by side.

A round that begins when text[:n] is committed knows the target's states of text[:n-1] and the newest token. Its
first distribution reads these, every further one the draft's own outputs. So each position of a text has its own
rollout:

    rollouts = rollouts_of(target, draft, ids)
    hidden = rollouts.begin(lengths)            one rollout per length n; input of its first distribution
    hidden = rollouts.feed(tokens, owners)      one more token of some rollouts; input of their next distributions

Rollouts of a DSpark draft are blocks: all states of one exist once it begins, and tokens are read by the Markov
head alone. `lm.features.model` drafts one sequence in the same way, with a cache that rolls back.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from data_gen.labels.branches import BranchMask, ReadText, check_branches
from lm.cache import growing_cache, roll_back
from lm.features.base import FeatureDraft, Mask, Outputs
from lm.features.dspark import DSpark, block_mask
from lm.features.eagle import Eagle
from lm.features.glide import Glide
from lm.features.recorder import features_of, modules_read_by
from lm.forwards import recorded
from lm.masks import Fed, visible

_MAX_BLOCKS = 64  # blocks per forward; bounds the attention mask


class Rollouts:
    """Rollouts of an EAGLE or GliDe draft from positions of one text, which is in its cache.

    Attributes:
        max_length: maximum number of tokens of a rollout.
        target_text: the text in the target, and perhaps continuations of it.
    """

    max_length = float("inf")

    @torch.inference_mode()
    def __init__(self, target: PreTrainedModel, draft: FeatureDraft, ids: list[int]) -> None:
        """Run both models over a text of at least two tokens. ValueError for a GliDe draft of several layers,
        whose upper layers depend on where earlier rounds ended.
        """
        if isinstance(draft, Glide) and (num_layers := draft.config.num_hidden_layers) > 1:
            raise ValueError(
                f"this draft has {num_layers} layers, and their cache depends on where earlier rounds ended: no trace "
                "or data can be made with it; `acceptance-heads bench` compares policies without"
            )
        with recorded(modules_read_by(draft, target)) as outputs:
            self.target_text = ReadText(target, ids)
        self.draft = draft
        self._length = len(ids)
        self._cache = growing_cache(2 * len(ids))
        self._read(torch.tensor(ids, device=draft.device), features_of(outputs, self.target_text.hidden)[None])

    def _read(self, tokens: Int[Tensor, " token"], features: Float[Tensor, "1 token feature"]) -> None:
        tokens = tokens[self.draft.lag :]
        positions = torch.arange(len(tokens), device=self.draft.device)
        states = self.draft.entering(features[:, : len(tokens)]) if isinstance(self.draft, Eagle) else None
        # the target has no key before the first token, so it sees its own; no rollout begins there
        self._text = self._run(tokens, positions, states, positions.clamp(min=1))

    @torch.inference_mode()
    def begin(self, lengths: Int[Tensor, " rollout"]) -> Float[Tensor, "rollout hidden"]:
        """Begin rollouts at these numbers of committed tokens, and drop those before: each one's first hidden state."""
        num_kept = self._length - self.draft.lag
        roll_back(self._cache, num_kept)
        self._lengths = lengths.to(self.draft.device)
        self._mask = BranchMask(num_kept, self._lengths - self.draft.lag)
        roots = self._lengths - 1 - self.draft.lag
        self._states = self._text.states[0, roots]
        return self._text.hidden[0, roots]

    @torch.inference_mode()
    def feed(self, tokens: Fed, owners: Fed) -> Float[Tensor, "fed hidden"]:
        """Feed one more token, drawn from its last distribution, to each of some rollouts: the hidden states after."""
        tokens = tokens.to(self.draft.device)
        owners = owners.to(self.draft.device)
        positions, mask = self._mask.feed(owners)
        states = self._states[owners][None]
        num_known = self._lengths[owners] - 1
        outputs = self._run(tokens, positions, states, num_known, mask[None, None])
        self._states[owners] = outputs.states[0]
        return outputs.hidden[0]

    def _run(
        self, tokens: Tensor, positions: Tensor, states: Tensor | None, num_known: Tensor, mask: Mask | None = None
    ) -> Outputs:
        """One forward: an EAGLE draft reads `states`; in a GliDe draft a token sees `num_known` keys of the target."""
        if not isinstance(self.draft, Glide):
            return self.draft(tokens[None], states, positions[None], cache=self._cache, mask=mask)
        keys_values = self.draft.keys_values(self.target_text.cache, self._length)
        cross_mask = visible(num_known - 1, self._length)[None, None]
        return self.draft(
            tokens[None], keys_values, positions[None], cache=self._cache, mask=mask, cross_mask=cross_mask
        )


class BlockRollouts(Rollouts):
    """Blocks of a DSpark draft from positions of one text, whose context is in its cache."""

    draft: DSpark

    def _read(self, tokens: Int[Tensor, " token"], features: Float[Tensor, "1 token feature"]) -> None:
        self._tokens, self.max_length = tokens, float(self.draft.block_size)
        self.draft.remember(features, self._cache)

    @torch.inference_mode()
    def begin(self, lengths: Int[Tensor, " rollout"]) -> Float[Tensor, "rollout wide"]:
        """`hidden` of each block's first token; the anchor is the last token of each length (`Rollouts.begin`)."""
        anchors = lengths.to(self.draft.device) - 1
        self._states = torch.cat([self._blocks(part) for part in anchors.split(_MAX_BLOCKS)])
        self._indices = torch.zeros_like(anchors)
        hidden, self._memory = self.draft.follow(self._states[:, 0], self._tokens[anchors], None)
        return hidden

    @torch.inference_mode()
    def feed(self, tokens: Fed, owners: Fed) -> Float[Tensor, "fed wide"]:
        """`hidden` of the next token of some blocks, after their newest token (`Rollouts.feed`)."""
        tokens = tokens.to(self.draft.device)
        owners = owners.to(self.draft.device)
        self._indices[owners] += 1
        states = self._states[owners, self._indices[owners]]
        memory = None if self._memory is None else self._memory[owners]
        hidden, memory = self.draft.follow(states, tokens, memory)
        if self._memory is not None and memory is not None:
            self._memory[owners] = memory
        return hidden

    def _blocks(self, anchors: Int[Tensor, " block"]) -> Float[Tensor, "block index hidden"]:
        """The states of blocks that begin with these tokens of the text."""
        if not len(anchors):  # attention takes no empty batch
            shape = (0, self.draft.block_size, self.draft.config.hidden_size)
            return torch.empty(shape, dtype=self.draft.dtype, device=anchors.device)
        roll_back(self._cache, self._length)
        mask = block_mask(anchors[None], self._length, self.draft.num_inputs)
        return self.draft.block(self._tokens[anchors][None], anchors[None], cache=self._cache, mask=mask)[0]


def rollouts_along(
    target: PreTrainedModel, draft: FeatureDraft, prompt_ids: list[int], response_ids: list[int], *, length: int
) -> Rollouts:
    """Rollouts of at most `length` tokens from positions of a response. Both models read the text before drafts branch
    off: no draft begins after its last token. ValueError as `check_branches` and `rollouts_of`.
    """
    ids = prompt_ids + response_ids
    ids = ids[: max(len(ids) - 1, 1 + draft.lag)]
    check_branches(target, len(ids) + length, num_prompt=len(prompt_ids))
    return rollouts_of(target, draft, ids)


def rollouts_of(target: PreTrainedModel, draft: FeatureDraft, ids: list[int]) -> Rollouts:
    """Rollouts of a draft of any kind; args and errors are those of `Rollouts`."""
    return (BlockRollouts if isinstance(draft, DSpark) else Rollouts)(target, draft, ids)
