"""What a feature draft drafts from many places of one text, side by side: at each place the chain of a round that
begins there.

A round that begins when text[:n] is committed knows the target's states of text[:n-1] and the newest token. Its first
distribution is therefore that of the text, fed with the target's states; every further one reads the draft's own
outputs. So what a feature draft says after a token depends on where its round began, and each place of a text has a
chain of its own:

    chains = chains_of(draft, run_target(target, draft, ids), ids)
    hidden = chains.begin(lengths)              one chain per length n; what gives each its first distribution
    hidden = chains.feed(tokens, owners)        one more token of some chains; what gives each its next

A DSpark draft's chains are blocks: all places of each are there once it begins, and a token is told to the Markov head
alone.

`lm.features.stepwise` drafts one chain the same way, and caches what it keeps.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from lm.branches.branched import trunk
from lm.features.draft import FeatureDraft, Mask, Outputs, roll_back
from lm.features.dspark import DSpark, seen_by_blocks
from lm.features.eagle import Eagle
from lm.features.glide import Glide, cached_keys_values
from lm.features.taps import read_modules, watched
from lm.models.masked import Branching, visible

_BLOCKS_AT_ONCE = 64
"""Bounds the attention mask of one forward."""


class TargetOutputs(NamedTuple):
    """Cache, hidden states and features of the target for one text."""

    cache: DynamicCache
    """A cache that holds at least the text."""
    hidden: Float[Tensor, "token hidden"]
    """State of each token, after the final norm."""
    features: Float[Tensor, "1 token feature"]
    """Features that the draft reads, per token; width 0 if it reads only the cache."""


@torch.inference_mode()
def run_target(target: PreTrainedModel, draft: FeatureDraft, ids: Sequence[int]) -> TargetOutputs:
    """Run one forward of the target over a text."""
    with watched(read_modules(target, draft)) as seen:
        cache, hidden = trunk(target, list(ids))
    parts = [part.to(draft.device) for _, part in sorted(seen.items())]
    features = torch.cat(parts or [hidden.new_zeros(len(ids), 0, device=draft.device)], -1)[None]
    return TargetOutputs(cache, hidden, features)


class Chains:
    """One text in a feature draft's cache, and chains that grow from it."""

    most = float("inf")
    """The most tokens of a chain."""

    def __init__(self, draft: FeatureDraft, told: TargetOutputs, ids: Sequence[int]) -> None:
        """Args:
            draft: a draft that is bound to the target.
            told: cache, states and features of the target for the text.
            ids: the text, of two tokens at least.

        Raises:
            ValueError: a GliDe draft of several layers, whose upper ones keep what earlier rounds happened to see.
        """
        if draft.config.num_hidden_layers > 1:
            subject = f"this draft has {draft.config.num_hidden_layers} layers"
            raise ValueError(
                f"{subject}, and what they keep depends on where earlier rounds ended: no trace or data can be made "
                "with it; `acceptance-heads bench` compares policies without"
            )
        self.draft, self._told, self._length = draft, told, len(ids)
        self._tokens = torch.tensor(list(ids), device=draft.device)
        self._cache = draft.new_cache(2 * len(ids))
        self._trunk = self._fed_text()

    @torch.inference_mode()
    def begin(self, lengths: Int[Tensor, " chain"]) -> Float[Tensor, "chain hidden"]:
        """Begin chains, and forget those before: the hidden state that gives each its first distribution.

        Args:
            lengths: how many tokens of the text are committed when each chain begins; more than the draft's `lag`.
        """
        num_kept = self._length - self.draft.lag
        roll_back(self._cache, num_kept)
        self._lengths = lengths.to(self.draft.device)
        self._branching = Branching(num_kept, self._lengths - self.draft.lag)
        roots = self._lengths - 1 - self.draft.lag
        self._states = self._trunk.states[0, roots]
        return self._trunk.hidden[0, roots]

    @torch.inference_mode()
    def feed(self, tokens: Int[Tensor, " fed"], owners: Int[Tensor, " fed"]) -> Float[Tensor, "fed hidden"]:
        """Feed one more token to some chains, to none twice: the hidden state after each.

        Args:
            tokens: tokens drawn from what their chains said last.
            owners: the chain of each token.
        """
        tokens, owners = tokens.to(self.draft.device), owners.to(self.draft.device)
        places, seen = self._branching.feed(owners, self._branching.depths(owners))
        mask = seen[None, None]
        if isinstance(self.draft, Eagle):
            outputs = self.draft(tokens[None], self._states[owners][None], places[None], cache=self._cache, mask=mask)
        else:
            outputs = self._crossed(tokens, places, self._lengths[owners] - 1, mask=mask)
        self._states[owners] = outputs.states[0]
        return outputs.hidden[0]

    def _fed_text(self) -> Outputs:
        """The draft's reading of the text, each token with what the target had said when it was the newest."""
        lag, tokens = self.draft.lag, self._tokens
        places = torch.arange(self._length - lag, device=self.draft.device)
        with torch.inference_mode():
            if isinstance(self.draft, Eagle):
                states = self.draft.entering(self._told.features[:, : self._length - lag])
                return self.draft(tokens[None, lag:], states, places[None], cache=self._cache)
            # the first token has no key of the target's to read; it sees its own, and no chain begins there
            return self._crossed(tokens, places, places.clamp(min=1))

    def _crossed(self, tokens: Tensor, places: Tensor, known: Tensor, mask: Mask | None = None) -> Outputs:
        """A GliDe draft's forward, in which each token sees the first `known` of the target's keys."""
        assert isinstance(self.draft, Glide)
        seen = visible(known - 1, self._length)
        keys_values = cached_keys_values(self._told.cache, self.draft.cached_layer_ids, self._length)
        return self.draft(
            tokens[None], keys_values, places[None], cache=self._cache, mask=mask, cross_mask=seen[None, None]
        )


class BlockChains:
    """One text in a DSpark draft's cache, and a block from each place that is asked for; the face is that of
    `Chains`.
    """

    def __init__(self, draft: DSpark, told: TargetOutputs, ids: Sequence[int]) -> None:
        self.draft, self._length, self.most = draft, len(ids), float(draft.block_size)
        self._tokens = torch.tensor(list(ids), device=draft.device)
        self._cache = draft.new_cache(2 * len(ids))
        with torch.inference_mode():
            positions = torch.arange(len(ids), device=draft.device)[None]
            draft.remember(draft.context(told.features), positions, self._cache)

    @torch.inference_mode()
    def begin(self, lengths: Int[Tensor, " chain"]) -> Float[Tensor, "chain wide"]:
        """`hidden` of the first place of each block, whose anchor is the last token of each length (`Chains.begin`)."""
        places = lengths.to(self.draft.device) - 1
        self._states = torch.cat([self._blocks(some) for some in places.split(_BLOCKS_AT_ONCE)])
        self._places = torch.zeros_like(places)
        hidden, self._memory = self.draft.follow(self._states[:, 0], self._tokens[places], None)
        return hidden

    @torch.inference_mode()
    def feed(self, tokens: Int[Tensor, " fed"], owners: Int[Tensor, " fed"]) -> Float[Tensor, "fed wide"]:
        """`hidden` of the next place of some blocks, given the token of the place before (`Chains.feed`)."""
        tokens, owners = tokens.to(self.draft.device), owners.to(self.draft.device)
        self._places[owners] += 1
        states = self._states[owners, self._places[owners]]
        memory = None if self._memory is None else self._memory[owners]
        hidden, memory = self.draft.follow(states, tokens, memory)
        if self._memory is not None and memory is not None:
            self._memory[owners] = memory
        return hidden

    def _blocks(self, places: Int[Tensor, " block"]) -> Float[Tensor, "block place hidden"]:
        """The states of blocks whose anchors have these places of the text."""
        if not len(places):  # which attention takes no batch of
            shape = (0, self.draft.block_size, self.draft.config.hidden_size)
            return torch.empty(shape, dtype=self.draft.dtype, device=places.device)
        roll_back(self._cache, self._length)
        mask = seen_by_blocks(places[None], self._length, self.draft.block_size)
        return self.draft.block(self._tokens[places][None], places[None], cache=self._cache, mask=mask)[0]


def chains_of(draft: FeatureDraft, told: TargetOutputs, ids: Sequence[int]) -> Chains | BlockChains:
    """The chains of a draft of any kind; the arguments and errors are those of `Chains`."""
    return BlockChains(draft, told, ids) if isinstance(draft, DSpark) else Chains(draft, told, ids)
