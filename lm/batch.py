"""Several sequences in one forward: rows of a batch, each with its own length and roll-back (law 4.5).

A padded forward feeds each row the tokens that its cache lacks. Padding is on the right, and queries see
positions of their own row up to their own position, so they never see padding or what was rolled back. That is
exact for full attention with explicit positions; other models are refused (`lm.selfcheck`).
"""

from collections.abc import Sequence
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from lm.cache import RowFeed, make_cache
from lm.forwards import body_and_lm_head, device_of
from lm.masks import additive, visible
from lm.model import CachedModel, Logits, ModelledText
from lm.rope import rope_switch_of
from lm.selfcheck import check_batch

Texts = Sequence[Sequence[int]]
# tokens before the requested rows that a forward takes along; a row that lacks more is fed them in another forward
_MAX_EXTRA = 4


class BatchRow(ModelledText):
    """One row of a batch."""

    hidden: Float[Tensor, "rows hidden"]

    def __init__(self, batch: "BatchModel", row: int, like: CachedModel) -> None:
        """`like`: a model of one sequence, with the same model and settings."""
        super().__init__(like.model, vocab_size=like.vocab_size)
        self.device = batch.device
        self.row = row
        self.reset()

    def reset(self, num_tokens: int = 0) -> None:
        """Empty the row."""
        self._length = 0
        self._rope_switch = rope_switch_of(self.model)

    def roll_back(self, length: int) -> None:
        """Keep at most the first `length` tokens."""
        self._length = min(self._length, length)


class BatchModel:
    """`rows` of a batch, and forwards of any of them together."""

    def __init__(self, cached: CachedModel, num_rows: int, num_tokens: int = 1) -> None:
        """Args:
        cached: a model of one sequence, with the same model and settings, that `batch_of` has checked.
        num_rows: number of sequences.
        num_tokens: tokens of the longest sequence and its draft; what is cached of a longer one is copied as it grows.
        """
        self.model = cached.model
        self.vocab_size = cached.vocab_size
        self.device = device_of(self.model)  # `cached` knows where the model was at its last reset
        self._cache = make_cache(self.model, num_tokens + _MAX_EXTRA + 1)
        self.rows = [BatchRow(self, row, cached) for row in range(num_rows)]

    @torch.inference_mode()
    def feed(self, rows: Sequence[BatchRow], new_tokens: Texts, num_logits: Sequence[int]) -> Logits:
        """`CachedModel.feed` of several rows, in one forward, or in two if a row gets many: `num_logits` of each,
        one row's after another's.
        """
        for row, tokens, num in zip(rows, new_tokens, num_logits, strict=True):
            assert 1 <= num <= len(tokens), f"{num} rows requested of {len(tokens)} fed tokens"
            row._check_side(len(row) + len(tokens) - num, len(row) + len(tokens))
        assert len({row._is_long for row in rows}) == 1, "a batch has short and long texts (`lm.rope`)"
        fed = list(new_tokens)
        late = [index for index, num in enumerate(num_logits) if len(fed[index]) - num > _MAX_EXTRA]
        if late:
            first = [fed[index][: -num_logits[index]] for index in late]
            self._feed([rows[index] for index in late], first, [0] * len(late))
            for index in late:
                fed[index] = fed[index][-num_logits[index] :]
        return self._feed(rows, fed, num_logits)

    def _feed(self, rows: Sequence[BatchRow], fed: Texts, num_logits: Sequence[int]) -> Logits:
        """One forward: the logits after the last tokens of each row, whose hidden states the row keeps."""
        width = max(map(len, fed))
        num_padded = max(map(len, rows)) + width
        last = _last(list(map(len, fed)), num_logits, width)
        sent: list[int] = []  # in one upload
        for row, tokens in zip(rows, fed, strict=True):
            sent += [row.row, len(row), len(tokens), *tokens, *[0] * (width - len(tokens))]
            row._length += len(tokens)
        table, indices = torch.tensor(sent + last, device=self.device).split([len(sent), len(last)])
        numbers, starts, lengths, ids = table.view(len(rows), -1).split([1, 1, 1, width], dim=1)
        end = max(map(len, rows))
        positions = starts + torch.arange(width, device=self.device)
        are_first = [row.row for row in rows] == list(range(len(rows)))
        feed = RowFeed(numbers.flatten(), are_first, positions, end, num_padded, len(self.rows))
        for layer in self._cache.layers:
            layer.feed = feed  # type: ignore[union-attr]  # a `BufferLayer`
        parts = body_and_lm_head(self.model)
        forward = partial(self.model, output_hidden_states=True) if parts is None else parts[0]
        output = forward(
            input_ids=ids,
            past_key_values=self._cache,
            use_cache=True,
            position_ids=positions.minimum(starts + lengths - 1),  # padding may lie beyond the last position
            attention_mask=additive(visible(positions, end), self.model.dtype)[:, None],
        )
        states = output.hidden_states[-1] if parts is None else output.last_hidden_state
        hidden = states.flatten(0, 1)[indices.to(states.device)]
        logits = output.logits.flatten(0, 1)[indices.to(output.logits.device)] if parts is None else parts[1](hidden)
        for row, row_states in zip(rows, hidden.split(list(num_logits)), strict=True):
            row.hidden = row_states
        return logits[:, : self.vocab_size]


def batch_of(cached: CachedModel, num_rows: int, num_tokens: int) -> BatchModel:
    """A `BatchModel` of these arguments; ValueError if rows of the model cannot be rolled back alone."""
    check_batch(cached, BatchModel)
    return BatchModel(cached, num_rows, num_tokens)


def _last(num_fed: Sequence[int], num_logits: Sequence[int], width: int) -> list[int]:
    """Flat indices, in [row x width], of the last `num_logits` of each row's fed tokens."""
    nums = enumerate(zip(num_fed, num_logits, strict=True))
    return [width * row + index for row, (length, num) in nums for index in range(length - num, length)]
