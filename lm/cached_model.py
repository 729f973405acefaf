"""Law 4.5: a causal model whose KV cache can append and roll back.

The cache always holds a prefix of committed[:-1]; the next forward feeds committed[len(cache):]: one token after a rejection, two after
full acceptance, more after rounds without a draft. Rolling back is exact: positions are dropped (`lm.kv_buffer`), none is recomputed.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from lm.halves import halves_of, head_of
from lm.kv_buffer import BufferLayer, make_cache

_CAPACITY = 256
"""Positions that a cache starts with room for."""


class CachedModel:
    """One sequence through one causal model.

    Attributes:
        hidden: [rows, hidden] the final hidden states (after the final norm, as `lm_head` receives them) of the rows that the last
            `forward` returned; may be None unless `with_hidden`.
    """

    def __init__(self, model: PreTrainedModel, *, vocab_size: int | None = None, with_hidden: bool = False) -> None:
        """Args:
        model: any transformers causal language model with a `DynamicCache`.
        vocab_size: width that logits are cut to (a padded vocabulary's extra ids get probability zero); None keeps all.
        with_hidden: also keep the final hidden states; a model that is more than its halves (`lm.halves`) pays with a hook.
        """
        self.model = model
        self.vocab_size = vocab_size
        self.hidden: Float[Tensor, "rows hidden"] | None = None
        self._halves = halves_of(model)
        is_watched = with_hidden and self._halves is None
        self._hook = head_of(model).register_forward_pre_hook(self._keep_hidden) if is_watched else None
        self._device: torch.device = next(model.get_input_embeddings().parameters()).device
        self._one = torch.zeros(1, 1, dtype=torch.long, device=self._device)
        self._positions = torch.arange(_CAPACITY, device=self._device)[None]
        self._max_length = float(getattr(model.config.get_text_config(), "max_position_embeddings", None) or "inf")
        self._is_plain = False
        self.reset()

    def __len__(self) -> int:
        """Tokens in the cache."""
        return self._length

    @property
    def device(self) -> torch.device:
        """Where token ids are fed."""
        return self._device

    @property
    def hidden_size(self) -> int:
        """Width of the final hidden state."""
        return self.model.config.get_text_config().hidden_size

    @property
    def max_length(self) -> float:
        """The most tokens that may be fed; infinite where the config names no limit."""
        return self._max_length

    def embedding(self, tokens: Int[Tensor, " tokens"]) -> Float[Tensor, "tokens hidden"]:
        """Rows of the input embeddings."""
        return self.model.get_input_embeddings()(tokens)

    def reset(self) -> None:
        """Empty the cache, for a new sequence."""
        if self._is_plain:
            self.roll_back(0)
            return
        self._cache = make_cache(self.model, _CAPACITY)
        self._is_plain = all(isinstance(layer, BufferLayer) for layer in self._cache.layers)
        self._length = 0

    def reserve(self, length: int) -> None:
        """Make room for `length` tokens now; a cache that grows by itself needs no telling."""

    def close(self) -> None:
        """Take the hook off the model."""
        if self._hook is not None:
            self._hook.remove()

    def roll_back(self, length: int) -> None:
        """Keep the first `length` tokens; no effect if the cache is shorter."""
        if length >= self._length:
            return
        if self._is_plain:
            for layer in self._cache.layers:
                layer.roll_back(length)  # type: ignore[union-attr]
        else:
            self._cache.crop(length - self._length)
        self._length = length

    def forward(self, token_ids: Sequence[int], num_rows: int = 1) -> Float[Tensor, "rows vocab"]:
        """Logits that follow each of the last `num_rows` tokens of `token_ids`, as the model gives them (no upcast).

        Args:
            token_ids: the whole sequence; its first len(self) tokens are in the cache, the rest is fed.
            num_rows: at most the number of tokens fed.
        """
        if torch.is_inference_mode_enabled():  # the loop enters it once a round: entering costs as much as a softmax
            return self._forward(token_ids, num_rows)
        with torch.inference_mode():
            return self._forward(token_ids, num_rows)

    @torch.inference_mode()
    def forward_drawn(self, token: Int[Tensor, " 1"]) -> Float[Tensor, "1 vocab"]:
        """Logits that follow a token which was drawn from the last row of the forward before: it never visits the host."""
        logits = self._logits(token.view(1, 1), 1)
        self._length += 1
        return logits

    def _forward(self, token_ids: Sequence[int], num_rows: int) -> Float[Tensor, "rows vocab"]:
        fed = token_ids[self._length :]
        assert 1 <= num_rows <= len(fed), f"{num_rows} rows asked of {len(fed)} fed tokens"
        ids = self._one.fill_(fed[0]) if len(fed) == 1 else torch.tensor([fed], device=self._device)
        logits = self._logits(ids, num_rows)
        self._length = len(token_ids)
        return logits

    def _logits(self, ids: Int[Tensor, "1 fed"], num_rows: int) -> Float[Tensor, "rows vocab"]:
        if self._halves is None:
            logits = self.model(input_ids=ids, past_key_values=self._cache, use_cache=True, logits_to_keep=num_rows).logits[0]
        else:
            positions = self._positions_of(ids.shape[1])
            output = self._halves.body(input_ids=ids, past_key_values=self._cache, use_cache=True, position_ids=positions)
            self.hidden = output.last_hidden_state[0][-num_rows:]
            logits = self._halves.head(self.hidden)
        return logits if self.vocab_size in (None, logits.shape[-1]) else logits[:, : self.vocab_size]

    def _positions_of(self, num_fed: int) -> Int[Tensor, "1 fed"]:
        """Positions of the tokens that are fed next."""
        end = self._length + num_fed
        if end > self._positions.shape[1]:
            self._positions = torch.arange(2 * end, device=self._device)[None]
        return self._positions[:, self._length : end]

    def _keep_hidden(self, _module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self.hidden = inputs[0][0]
