"""Law 4.5: a causal model whose KV cache can append and roll back.

The cache always holds a prefix of committed[:-1]; the next forward feeds committed[len(cache):]: one token after a
rejection, two after full acceptance, more after rounds without a draft. Rolling back is exact. Attention forgets
positions by counting (`lm.caches.buffers`); a model with recurrent or convolutional layers goes back to an earlier copy
of their state (`lm.caches.snapshots`), perhaps earlier than asked, and the tokens in between are fed again. A model
whose cache does neither is refused (`lm.models.probe`).
"""

from collections.abc import Mapping, Sequence
from functools import partial
from inspect import signature
from threading import get_ident
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from lm.caches.buffers import BufferLayer
from lm.caches.snapshots import Snapshots
from lm.compiled import Compile, CompiledEpilogues
from lm.eos import eos_ids_of
from lm.forwards import device_of, num_logits_of
from lm.frequencies import Frequencies, frequencies_of
from lm.kv_buffer import make_cache
from lm.models.halves import halves_of, head_of
from lm.models.mode import refuse_training
from lm.models.probe import check_cache

_CAPACITY = 256
"""Positions that a cache starts with room for."""


class CachedModel:
    """One sequence through one causal model.

    Attributes:
        hidden: [rows, hidden] the final hidden states (after the final norm, as `lm_head` receives them) of the rows
            that the last `forward` returned; may be None unless `with_hidden`.
        states: [fed, hidden] the final hidden states of every row that it fed, where the model is its halves
            (`lm.models.halves`).
    """

    _max_length = float("inf")
    _frequencies: Frequencies | None = None
    _is_far = False
    """Whether the text is beyond the model's change of frequencies (`lm.frequencies`) from its first forward on."""
    epilogues: CompiledEpilogues | None = None
    session: Any = None
    """The generation that uses this model, or did last (`decode.loop.session`)."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        vocab_size: int | None = None,
        with_hidden: bool = False,
        compile: Compile = False,
    ) -> None:
        """Args:
        model: any transformers causal language model whose cache can be rolled back.
        vocab_size: width that logits are cut to (a padded vocabulary's extra ids get probability zero); None keeps all.
        with_hidden: also keep the final hidden states; a model that is more than its halves (`lm.models.halves`) pays
            with a hook.
        compile: "stop" compiles the epilogues of its forwards (`lm.compiled`).

        Raises:
            ValueError: the model is in train mode, its cache cannot be rolled back, or its final hidden states cannot
                be had.
        """
        refuse_training(model)
        self.model = model
        self.vocab_size = vocab_size
        self.with_hidden = with_hidden
        self.epilogues = CompiledEpilogues() if compile else None
        self.hidden: Float[Tensor, "rows hidden"] | None = None
        self.states: Float[Tensor, "fed hidden"] | None = None
        if with_hidden:
            head_of(model)
        self._max_length = float(getattr(model.config.get_text_config(), "max_position_embeddings", None) or "inf")
        self._parameters = signature(type(model).forward).parameters
        self._length = 0
        self._is_plain = False
        self.is_stepwise = False
        """Feed one token at a time after the prompt, as `generate` does: what some recurrent layers ask for."""
        self.reset()
        check_cache(self)

    def __len__(self) -> int:
        """Tokens in the cache."""
        return self._length

    @property
    def device(self) -> torch.device:
        """Device that token ids are fed on."""
        return self._device

    @property
    def output_device(self) -> torch.device:
        """Device that logits and hidden states come out on, which differs if the model is spread over several."""
        return next(head_of(self.model).parameters()).device

    @property
    def hidden_size(self) -> int:
        """Width of the final hidden state."""
        return self.model.config.get_text_config().hidden_size

    @property
    def max_length(self) -> float:
        """The most tokens that may be fed of the session's text; infinite where the config names no limit."""
        return self.limit_of(self.session.num_prompt) if self.session is not None else self._max_length

    def limit_of(self, num_prompt: int) -> float:
        """The most tokens that may be fed of a text with so long a prompt (`lm.frequencies`)."""
        if self._frequencies is None or self._frequencies.is_far(num_prompt - 1):
            return self._max_length
        return min(self._max_length, float(self._frequencies.bound))

    @property
    def eos_ids(self) -> frozenset[int]:
        """The ids that end a sequence: those of the generation config, or else of the config."""
        return eos_ids_of(self.model.generation_config) or eos_ids_of(self.model.config.get_text_config())

    def check_mode(self) -> None:
        """Raise ValueError if the model is in train mode."""
        refuse_training(self.model)

    @property
    def num_logits(self) -> int:
        """Width of its distributions."""
        width = num_logits_of(self.model)
        return width if self.vocab_size is None else min(width, self.vocab_size)

    @property
    def num_embeddings(self) -> int:
        """Rows of the input embeddings."""
        return next(self.model.get_input_embeddings().parameters()).shape[0]

    def embedding(self, tokens: Int[Tensor, " tokens"]) -> Float[Tensor, "tokens hidden"]:
        """Rows of the input embeddings, on the device of `tokens`."""
        return self.model.get_input_embeddings()(tokens.to(self._device)).to(tokens.device)

    def reset(self) -> None:
        """Empty the cache, for a new sequence, and look at the model again, which may have moved or changed."""
        self._device = device_of(self.model)
        self._single = torch.zeros(1, 1, dtype=torch.long, device=self._device)
        self._positions = torch.arange(_CAPACITY, device=self._device)[None]
        self._frequencies = frequencies_of(self.model)
        self._empty()

    def _empty(self) -> None:
        """Empty the cache, or make another where it cannot be emptied."""
        self._halves = halves_of(self.model)
        if self._is_plain:
            self.roll_back(0)
            return
        self._cache = make_cache(self.model, _CAPACITY)
        self._buffers = [layer for layer in self._cache.layers if isinstance(layer, BufferLayer)]
        self._counted = [
            (place, layer) for place, layer in enumerate(self._cache.layers) if isinstance(layer, CacheLayerMixin)
        ]
        self._is_plain = len(self._buffers) == len(self._cache.layers)
        self._snapshots = None if self._is_plain else Snapshots(self._cache)
        self._length = 0

    def roll_back(self, length: int) -> None:
        """Keep at most the first `length` tokens; no effect if the cache is shorter."""
        if length >= self._length:
            return
        if self._snapshots is not None:
            restored = self._snapshots.restore(length)
            if restored is None:
                self._empty()
                return
            length = restored
        for layer in self._buffers:
            layer.roll_back(length)
        self._length = length
        self._check_lengths()

    def forward(self, token_ids: Sequence[int], num_rows: int = 1) -> Float[Tensor, "rows vocab"]:
        """Logits that follow each of the last `num_rows` tokens of `token_ids`, as the model gives them (no upcast).

        Args:
            token_ids: the whole sequence; its first len(self) tokens are in the cache, the rest is fed.
            num_rows: how many rows are asked for, at most the number of tokens fed.
        """
        self._check_side(len(token_ids) - num_rows + 1, len(token_ids))
        if torch.is_inference_mode_enabled():  # the loop enters it once a round: entering costs as much as a softmax
            return self._forward(token_ids, num_rows)
        with torch.inference_mode():
            return self._forward(token_ids, num_rows)

    def _check_side(self, num_first: int, end: int) -> None:
        """Raise ValueError if the text, with `end` tokens, is on both sides of a change of frequencies.

        Args:
            num_first: tokens that are read at once where none is cached.
            end: tokens that are cached after the forward.
        """
        if self._frequencies is None:
            return
        if self._length == 0:
            self._is_far = num_first > self._frequencies.bound
        if end > self._frequencies.bound and not (self._is_far and self._frequencies.is_far(end)):
            raise self._frequencies.refusal(f"the text has {end} tokens", "shorten the prompt, or lower max_new_tokens")

    @torch.inference_mode()
    def forward_drawn(self, token: Int[Tensor, " 1"]) -> Float[Tensor, "1 vocab"]:
        """Logits that follow a token which was drawn from the last row of the forward before: it never visits the
        host.
        """
        self._check_side(0, self._length + 1)
        return self._logits(token.view(1, 1).to(self._device), 1)

    def _forward(self, token_ids: Sequence[int], num_rows: int) -> Float[Tensor, "rows vocab"]:
        fed = token_ids[self._length :]
        assert 1 <= num_rows <= len(fed), f"{num_rows} rows asked of {len(fed)} fed tokens"
        if self.is_stepwise and len(fed) > 1:
            return self._forward_stepwise(fed, num_rows)
        ids = self._single.fill_(fed[0]) if len(fed) == 1 else torch.tensor([fed], device=self._device)
        return self._logits(ids, num_rows)

    def _forward_stepwise(self, fed: Sequence[int], num_rows: int) -> Float[Tensor, "rows vocab"]:
        """Feed a prompt at once, as `generate` does, and what is drafted after it one by one."""
        num_first = 1 if self._length > 0 else len(fed) - num_rows + 1
        first = torch.tensor([fed[:num_first]], device=self._device)
        steps = [(self._logits(first, 1), self.hidden)]
        steps += [(self._logits(self._single.fill_(token), 1), self.hidden) for token in fed[num_first:]]
        steps = steps[-num_rows:]
        self.hidden = None if self.hidden is None else torch.cat([hidden for _, hidden in steps if hidden is not None])
        return torch.cat([logits for logits, _ in steps])

    def _logits(self, ids: Int[Tensor, "1 fed"], num_rows: int) -> Float[Tensor, "rows vocab"]:
        return self._logits_at({"position_ids": self._positions_of(ids.shape[1])}, ids, num_rows)

    def _logits_at(
        self, placed: Mapping[str, Tensor], ids: Int[Tensor, "1 fed"], num_rows: int
    ) -> Float[Tensor, "rows vocab"]:
        """Feed tokens with the positions, and perhaps the mask, of `placed`: keywords of the model's forward."""
        if self._snapshots is not None:
            self._snapshots.take(self._length)
        if self._halves is None:
            logits = self._logits_of_whole(ids, num_rows, placed)
        else:
            output = self._halves.body(input_ids=ids, past_key_values=self._cache, use_cache=True, **placed)
            self.states = output.last_hidden_state[0]
            self.hidden = self.states[-num_rows:]
            logits = self._halves.head(self.hidden)
        self._length += ids.shape[1]
        self._check_lengths()
        return logits if self.vocab_size in (None, logits.shape[-1]) else logits[:, : self.vocab_size]

    def _logits_of_whole(
        self, ids: Int[Tensor, "1 fed"], num_rows: int, placed: Mapping[str, Tensor]
    ) -> Float[Tensor, "rows vocab"]:
        known: dict[str, Any] = {
            "past_key_values": self._cache,
            "cache_params": self._cache,
            "logits_to_keep": num_rows,
            # some families count from 0 in every forward unless positions are given, as `generate` gives them
            **placed,
        }
        taken = {name: value for name, value in known.items() if name in self._parameters}
        if not self.with_hidden:
            return self.model(input_ids=ids, use_cache=True, **taken).logits[0, -num_rows:]
        # only while it is needed: a hook that stayed would keep this object, and its cache, as long as the model lives
        hook = head_of(self.model).register_forward_pre_hook(partial(self._keep_hidden, get_ident()))
        try:
            return self.model(input_ids=ids, use_cache=True, **taken).logits[0, -num_rows:]
        finally:
            hook.remove()

    def _check_lengths(self) -> None:
        """Law 4.5 on every layer that counts its tokens; one that was never written to shares another layer's keys."""
        for place, layer in self._counted:
            if layer.get_seq_length() != self._length and layer.is_initialized:
                held = f"layer {place} ({type(layer).__name__}) of the cache holds {layer.get_seq_length()} tokens"
                raise AssertionError(f"{held} and the model has {self._length}")

    def _positions_of(self, num_fed: int) -> Int[Tensor, "1 fed"]:
        """Positions of the tokens that are fed next."""
        end = self._length + num_fed
        if end > self._positions.shape[1]:
            self._positions = torch.arange(2 * end, device=self._device)[None]
        return self._positions[:, self._length : end]

    def _keep_hidden(self, thread: int, _module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if get_ident() == thread:  # another thread may run the same model
            self.hidden = inputs[0][0]
