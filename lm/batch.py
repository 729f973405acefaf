"""Several sequences in one forward: rows of a batch, each with its own length and roll-back (law 4.5), and
continuations of one text.

A padded forward feeds each row the tokens that its cache lacks. Padding is on the right, and queries see positions of
their own row up to their own position, so they never see padding or what was rolled back. That is exact for full
attention with explicit positions; other models are refused (`lm.selfcheck`).
"""

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from lm.cache import CAPACITY, RowFeed, WindowLayer, growing_cache, is_attention, make_cache, roll_back
from lm.forwards import body_and_lm_head, body_of, chunks, device_of, hidden_states, refuse_training
from lm.masks import BranchMask, Fed, additive, visible
from lm.model import CachedModel, Logits
from lm.rope import refuse_crossing, rope_switch_of
from lm.selfcheck import check, check_batch, ids_of_plan, refusal_of

Texts = Sequence[Sequence[int]]
States = Float[Tensor, "fed hidden"]
_MAX_EXTRA = 4
"""Tokens before the requested rows that a forward takes along; a row that lacks more is fed them in another forward."""
_MAX_READ = 2**14  # tokens, padding included, of continuations that are read again in one forward
_PREFIX, _BRANCHES = (1, 2, 3, 1, 2), ((2, (3, 1)), (4, (2, 2, 3)))
"""A text of the check, and its continuations: (tokens of the text that one sees, its own tokens)."""


class BatchRow(CachedModel):
    """One row of a batch, with the interface of a `CachedModel`."""

    def __init__(self, batch: "BatchModel", row: int, like: CachedModel) -> None:
        """`like`: a model of one sequence, with the same model and settings."""
        self.model, self.vocab_size, self.with_hidden = like.model, like.vocab_size, like.with_hidden
        self.hidden, self._max_length, self.device = None, like._max_length, batch.device
        self.row, self._batch = row, batch
        self.reset()

    def reset(self, num_tokens: int = 0) -> None:
        self._length, self._rope_switch = 0, rope_switch_of(self.model)

    def roll_back(self, length: int) -> None:
        self._length = min(self._length, length)

    def feed(self, new_tokens: Sequence[int], num_rows: int = 1) -> Logits:
        return self._batch.feed([self], [new_tokens], [num_rows])


class BatchModel:
    """`rows` of a batch, and forwards of any of them together."""

    def __init__(self, cached: CachedModel, num_rows: int, num_tokens: int = 1) -> None:
        """Args:
        cached: a model of one sequence, with the same model and settings, that `batch_of` has checked.
        num_rows: number of sequences.
        num_tokens: tokens of the longest sequence and its draft; what is cached of a longer one is copied as it grows.
        """
        self.model, self.vocab_size = cached.model, cached.vocab_size
        self.device = device_of(self.model)  # `cached` knows where the model was at its last reset
        self._cache = make_cache(self.model, num_tokens + _MAX_EXTRA + 1)
        self.rows = [BatchRow(self, row, cached) for row in range(num_rows)]

    @torch.inference_mode()
    def feed(self, rows: Sequence[BatchRow], new_tokens: Texts, num_logits: Sequence[int]) -> Logits:
        """`CachedModel.feed` of several rows, in one forward, or in two if a row gets many: `num_logits` of each, one
        row's after another's.
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
        inputs = {"input_ids": ids, "past_key_values": self._cache, "use_cache": True}
        # padding may lie beyond the last position
        inputs["position_ids"] = positions.minimum(starts + lengths - 1)
        inputs["attention_mask"] = additive(visible(positions, end), self.model.dtype)[:, None]
        if (parts := body_and_lm_head(self.model)) is not None:
            states = parts[0](**inputs).last_hidden_state
            hidden = states.flatten(0, 1)[indices.to(states.device)]
            logits = parts[1](hidden)
        else:
            output = self.model(output_hidden_states=True, **inputs)
            both = output.hidden_states[-1], output.logits
            hidden, logits = (values.flatten(0, 1)[indices.to(values.device)] for values in both)
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


class ReadText:
    """A text that a model has read, and continuations of it, each from some position, which are read side by side.

    The text is in the cache once. Each continuation attends to the part before its start and to its own tokens, by a
    mask and explicit positions. Departure: a model with sliding windows sees its whole context here; `check_branches`
    refuses longer texts. A model with recurrent layers, whose cache cannot hold branches, reads each continuation again
    with the text before it.

    Attributes:
        cache: holds the text, and perhaps continuations after it.
        hidden: [position, hidden] final hidden states after each token of the text.
    """

    max_length = float("inf")  # tokens of a continuation

    @torch.inference_mode()
    def __init__(self, model: PreTrainedModel, ids: list[int]) -> None:
        self._model, self._ids, self._device = model, ids, device_of(model)
        self._reads_again = not is_attention(make_cache(model, CAPACITY))
        # of layers without windows: the mask hides entries
        self.cache = DynamicCache(config=model.config) if self._reads_again else growing_cache(2 * len(ids))
        tokens = torch.tensor([ids], device=self._device)
        output = body_of(model)(input_ids=tokens, past_key_values=self.cache, use_cache=True)
        self.hidden: States = output.last_hidden_state[0]

    def begin(self, lengths: Int[Tensor, " branch"]) -> Float[Tensor, "branch hidden"]:
        """Begin continuations after these numbers of tokens of the text, and drop those before: the hidden state that
        each one's first token follows from.
        """
        self._lengths, self._tails = lengths.to(self._device), [list[int]() for _ in lengths]
        self._mask = BranchMask(len(self._ids), self._lengths)
        if not self._reads_again:
            roll_back(self.cache, len(self._ids))
        return self.hidden[lengths.to(self.hidden.device) - 1]

    @torch.inference_mode()
    def feed(self, tokens: Fed, owners: Fed) -> States:
        """Append a token to each of the continuations `owners`, in turn: the hidden states after them."""
        tokens, owners = tokens.to(self._device), owners.to(self._device)
        if self._reads_again:
            return self._read_again(tokens, owners)
        positions, mask = self._mask.feed(owners)
        inputs = {"position_ids": positions[None], "attention_mask": additive(mask, self._model.dtype)[None, None]}
        output = body_of(self._model)(input_ids=tokens[None], past_key_values=self.cache, use_cache=True, **inputs)
        return output.last_hidden_state[0]

    def _read_again(self, tokens: Fed, owners: Fed) -> States:
        for owner, token in zip(owners.tolist(), tokens.tolist(), strict=True):
            self._tails[owner].append(token)
        fed, nums = (column.tolist() for column in owners.unique(return_counts=True))
        rows = [[*self._ids[: int(self._lengths[owner])], *self._tails[owner]] for owner in fed]
        starts = [len(row) - num for row, num in zip(rows, nums, strict=True)]
        groups = chunks(len(rows), max(1, _MAX_READ // max(map(len, rows))))
        states = torch.cat([hidden_states(self._model, rows[group], starts[group]) for group in groups])
        return torch.empty_like(states).index_copy_(0, owners.argsort(stable=True).to(states.device), states)


def check_branches(model: PreTrainedModel, length: int, *, num_prompt: int) -> None:
    """Raise ValueError unless continuations that are read side by side have the hidden states that each has alone; or
    if `length` tokens, prompt, response and branch, are longer than a window of the model, or cross a RoPE switch.
    """
    refuse_training(model)
    refusal = refusal_of(model, "be recorded in a trace", "`acceptance-heads bench` compares policies without a trace")
    check(model, "branches side by side", partial(_branch_feeds, model), refusal)
    subject = f"prompt, response and branch have {length} tokens, which are read at once"
    remedy = "lower decode.max_new_tokens or data.max_prompt_tokens"
    refuse_crossing(model, num_prompt, length, subject=subject, remedy=remedy)
    cache = make_cache(model, CAPACITY)
    for index, layer in enumerate(cache.layers):
        if is_attention(cache) and isinstance(layer, WindowLayer) and length > layer.sliding_window:
            raise ValueError(
                f"layer {index} of {type(model).__name__} sees {layer.sliding_window} tokens; prompt, response and "
                f"branch have {length}, which branches need to see whole: {remedy}"
            )


def _branch_feeds(model: PreTrainedModel, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """(hidden states of a branch beside the others, those of the branch alone) of every branch."""
    prefix = ids_of_plan(model, _PREFIX, seed)
    branches = [(num_visible, ids_of_plan(model, tokens, seed)) for num_visible, tokens in _BRANCHES]
    text, device = ReadText(model, prefix), device_of(model)
    text.begin(torch.tensor([num for num, _ in branches]))
    fed = [(token, owner) for owner, (_, ids) in enumerate(branches) for token in ids]
    hidden = text.feed(*torch.tensor(fed).T).split([len(ids) for _, ids in branches])
    for states, (num_visible, ids) in zip(hidden, branches, strict=True):
        whole = torch.tensor([[*prefix[:num_visible], *ids]], device=device)
        yield states, body_of(model)(input_ids=whole, use_cache=False).last_hidden_state[0, num_visible:]
