"""Law 4.5 for every sequence of a batch: one causal model, many sequences, each with a length and a roll-back of its
own.

One padded forward feeds each sequence the tokens that its row of the cache lacks. Padding stands on the right; queries
see the places of their own row up to their own position, so neither padding nor what was rolled back is ever seen. That
is exact for full attention with positions that are given. Other models (windows, recurrent states, positions read off
the mask) are refused, by kind of cache or because their logits in a batch are not those of each sequence alone, which
is tried once per model.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from lm.caches.ragged import RaggedFeed, RaggedLayer
from lm.forwards import device_of
from lm.frequencies import frequencies_of
from lm.models.cached import CachedModel
from lm.models.halves import halves_of
from lm.models.masked import additive, visible
from lm.probe import probe, refusal_of

_CATCH_UP = 4
"""Tokens beyond those whose logits are asked that a forward takes along; sequences that lack more are fed them first,
by themselves.
"""
_FEEDS = (
    ((0, (1, 2, 3)), (0, (2, 1))),
    ((3, (1, 2, 3, 1)), (1, (2, 3, 1, 3))),
    ((2, (1, 2, 1)), (4, (2, 3, 1, 3, 1, 2))),
)
"""Feeds of two sequences: (length to roll back to, tokens to hold), one after the other."""


class Seat(CachedModel):
    """One sequence of a batch, as a `CachedModel` that is fed together with others."""

    def __init__(self, seats: "Seats", row: int, like: CachedModel) -> None:
        """Args:
        seats: the batch.
        row: row of the batch's cache.
        like: a model of one sequence, with the same model and vocabulary, that keeps hidden states or not.
        """
        self.model, self.vocab_size, self.with_hidden = like.model, like.vocab_size, like.with_hidden
        self.hidden, self._max_length, self._device = None, like._max_length, seats.device
        self.row, self._seats = row, seats
        self.reset()

    def reset(self) -> None:
        self._length, self._frequencies = 0, frequencies_of(self.model)

    def roll_back(self, length: int) -> None:
        self._length = min(self._length, length)

    def forward(self, token_ids: Sequence[int], num_rows: int = 1) -> Float[Tensor, "rows vocab"]:
        return self._seats.forward([Ask(self, token_ids, num_rows)])[0]


class Ask(NamedTuple):
    """What one sequence asks of a forward: the arguments of `CachedModel.forward`."""

    seat: CachedModel
    token_ids: Sequence[int]
    num_rows: int


class Seats:
    """A batch: `seats`, and forwards of any of them together."""

    def __init__(self, cached: CachedModel, num: int) -> None:
        """Args:
        cached: the model, for one sequence; the cache in it is not touched.
        num: the most sequences at once.

        Raises:
            ValueError: a model whose sequences cannot be rolled back one by one.
        """
        self.model, self.vocab_size = cached.model, cached.vocab_size
        self.device = device_of(cached.model)  # now: `cached` knows where the model was at its last reset
        self._cache = DynamicCache(config=self.model.config)
        others = {type(layer).__name__ for layer in self._cache.layers if type(layer) is not DynamicLayer}
        remedy = "only full attention rolls back sequence by sequence: decode one prompt at a time"
        refusal = refusal_of(self.model, "be decoded in batches", remedy)
        if others or not self._cache.layers:
            raise refusal(f"its cache has {', '.join(sorted(others)) or 'no layers that are known beforehand'}")
        self._cache.layers = [RaggedLayer(max(num, 2)) for _ in self._cache.layers]
        self.seats = [Seat(self, row, cached) for row in range(num)]
        difference = "its logits in a batch differ from those alone"
        probe(self.model, _fed_pairs(self, cached), refusal, how="ragged rows", difference=difference)

    @torch.inference_mode()
    def forward(self, asks: Sequence[Ask]) -> list[Float[Tensor, "rows vocab"]]:
        """Logits that follow each of the last `num_rows` tokens of every sequence that asks."""
        for ask in asks:
            ask.seat._check_side(len(ask.token_ids) - ask.num_rows, len(ask.token_ids))
        sides = {ask.seat._is_far for ask in asks}
        if len(sides) > 1:
            frequencies = frequencies_of(self.model)
            assert frequencies is not None, "only with these are there sides"
            raise frequencies.refusal("a batch has short and long texts", "decode the long prompts apart")
        return self._forward(asks)

    def _forward(self, asks: Sequence[Ask]) -> list[Float[Tensor, "rows vocab"]]:
        """Logits that follow each of the last `num_rows` tokens, in one forward; sequences that lack many tokens have
        another before it.
        """
        for ask in asks:
            num_fed = len(ask.token_ids) - len(ask.seat)
            assert 1 <= ask.num_rows <= num_fed, f"{ask.num_rows} rows asked of {num_fed} fed tokens"
        behind = [ask for ask in asks if len(ask.token_ids) - len(ask.seat) - ask.num_rows > _CATCH_UP]
        if behind:
            self._hidden_states([ask._replace(token_ids=ask.token_ids[: -ask.num_rows]) for ask in behind])
            for ask in behind:
                ask.seat._length = len(ask.token_ids) - ask.num_rows
        hidden, logits = self._hidden_states(asks)
        sizes = [ask.num_rows for ask in asks]
        wanted = torch.tensor(_wanted(asks, hidden.shape[1]), device=hidden.device)
        hidden = hidden.flatten(0, 1)[wanted]
        if logits is None:
            assert self._halves is not None
            logits = self._halves.head(hidden)
        else:
            logits = logits.flatten(0, 1)[wanted]
        logits = logits if self.vocab_size is None else logits[:, : self.vocab_size]
        for ask, states in zip(asks, hidden.split(sizes), strict=True):
            ask.seat.hidden = states
            ask.seat._length = len(ask.token_ids)
        return list(logits.split(sizes))

    def _hidden_states(
        self, asks: Sequence[Ask]
    ) -> tuple[Float[Tensor, "asks width hidden"], Float[Tensor, "asks width vocab"] | None]:
        """Feed what is lacking: final hidden states, and logits where the model is more than its halves."""
        fed = [list(ask.token_ids[len(ask.seat) :]) for ask in asks]
        width = max(map(len, fed))
        ids = torch.tensor([tokens + [0] * (width - len(tokens)) for tokens in fed], device=self.device)
        starts = torch.tensor([[len(ask.seat)] for ask in asks], device=self.device)
        ends = torch.tensor([[len(ask.token_ids)] for ask in asks], device=self.device)
        places = starts + torch.arange(width, device=self.device)
        end = max(len(ask.token_ids) for ask in asks)
        rows = [ask.seat.row for ask in asks]  # type: ignore[attr-defined]
        feed = RaggedFeed(torch.tensor(rows, device=self.device), rows == list(range(len(rows))), places, end)
        for layer in self._cache.layers:
            layer.feed = feed  # type: ignore[union-attr]
        known = {
            "past_key_values": self._cache,
            "use_cache": True,
            "position_ids": places.minimum(ends - 1),  # padding has no position of its own: there may be none left
            "attention_mask": additive(visible(places, end), self.model.dtype)[:, None],
        }
        self._halves = halves_of(self.model)
        if self._halves is not None:
            return self._halves.body(input_ids=ids, **known).last_hidden_state, None
        output = self.model(input_ids=ids, output_hidden_states=True, **known)
        return output.hidden_states[-1], output.logits


def _wanted(asks: Sequence[Ask], width: int) -> list[int]:
    """Flat places, in [asks x width], of the rows that are asked for."""
    lasts = [width * index + len(ask.token_ids) - len(ask.seat) for index, ask in enumerate(asks)]
    return [place for last, ask in zip(lasts, asks, strict=True) for place in range(last - ask.num_rows, last)]


def _fed_pairs(
    seats: Seats, cached: CachedModel
) -> Iterator[tuple[Float[Tensor, "1 vocab"], Float[Tensor, "1 vocab"]]]:
    """(logits of a sequence in a batch of two, its logits alone), for both sequences of every feed."""
    pair = [Seat(seats, row, cached) for row in range(2)]
    num_ids = seats.model.config.get_text_config().vocab_size
    for feed in _FEEDS:
        for seat, (num_kept, _) in zip(pair, feed, strict=True):
            seat.roll_back(num_kept)
        texts = [[token % num_ids for token in tokens] for _, tokens in feed]
        rows = seats.forward([Ask(seat, tokens, 1) for seat, tokens in zip(pair, texts, strict=True)])
        for tokens, logits in zip(texts, rows, strict=True):
            cached.reset()
            yield logits, cached.forward(tokens)
    cached.reset()
