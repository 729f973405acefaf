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
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from lm.cache import BufferLayer, RowFeed, growing_cache, roll_back
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

    def reset(self) -> None:
        self._length, self._rope_switch = 0, rope_switch_of(self.model)

    def roll_back(self, length: int) -> None:
        self._length = min(self._length, length)

    def feed(self, new_tokens: Sequence[int], num_rows: int = 1) -> Logits:
        return self._batch.feed([self], [new_tokens], [num_rows])[0]


class BatchModel:
    """`rows` of a batch, and forwards of any of them together."""

    def __init__(self, cached: CachedModel, num_rows: int) -> None:
        """At most `num_rows` sequences in the model of `cached`; ValueError if rows cannot be rolled back alone."""
        self.model, self.vocab_size = cached.model, cached.vocab_size
        self.device = device_of(self.model)  # `cached` knows where the model was at its last reset
        self._cache = DynamicCache(config=self.model.config)
        remedy = "only full attention rolls back sequence by sequence: decode one prompt at a time"
        refusal = refusal_of(self.model, "be decoded in batches", remedy)
        kinds = {type(layer) for layer in self._cache.layers}
        if kinds != {DynamicLayer}:
            others = ", ".join(sorted(kind.__name__ for kind in kinds - {DynamicLayer}))
            raise refusal(f"its cache has {others or 'no layers that are known beforehand'}")
        self._num_rows = max(num_rows, 2)
        self._cache.layers = [BufferLayer(1) for _ in self._cache.layers]
        self.rows = [BatchRow(self, row, cached) for row in range(self._num_rows)]
        check_batch(cached, self, refusal)
        for row in self.rows:
            row.reset()
        del self.rows[num_rows:]

    @torch.inference_mode()
    def feed(self, rows: Sequence[BatchRow], new_tokens: Texts, num_logits: Sequence[int]) -> list[Logits]:
        """`CachedModel.feed` of several rows, in one forward, or in two if a row gets many; `num_logits` of each."""
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

    def _feed(self, rows: Sequence[BatchRow], fed: Texts, num_logits: Sequence[int]) -> list[Logits]:
        """One forward: the logits after the last tokens of each row, whose hidden states the row keeps."""
        width = max(map(len, fed))
        ids = torch.tensor([[*tokens, *[0] * (width - len(tokens))] for tokens in fed], device=self.device)
        starts = torch.tensor([[len(row)] for row in rows], device=self.device)
        for row, tokens in zip(rows, fed, strict=True):
            row._length += len(tokens)
        end = max(map(len, rows))
        ends = torch.tensor([[len(row)] for row in rows], device=self.device)
        positions = starts + torch.arange(width, device=self.device)
        feed = RowFeed([row.row for row in rows], positions, end, self._num_rows)
        for layer in self._cache.layers:
            layer.feed = feed  # type: ignore[union-attr]  # a `BufferLayer`
        inputs = {"input_ids": ids, "past_key_values": self._cache, "use_cache": True}
        inputs["position_ids"] = positions.minimum(ends - 1)  # padding may lie beyond the last position
        inputs["attention_mask"] = additive(visible(positions, end), self.model.dtype)[:, None]
        indices = torch.tensor(_last(list(map(len, fed)), num_logits, width), dtype=torch.long)
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
        return list(logits[:, : self.vocab_size].split(list(num_logits)))


def _last(num_fed: Sequence[int], num_logits: Sequence[int], width: int) -> list[int]:
    """Flat indices, in [row x width], of the last `num_logits` of each row's fed tokens."""
    nums = enumerate(zip(num_fed, num_logits, strict=True))
    return [width * row + index for row, (length, num) in nums for index in range(length - num, length)]


class ReadText(DynamicCache):
    """The cache of a model with recurrent layers, which cannot hold branches, and the text that it has read."""

    ids: list[int]


class Continuations:
    """Continuations of one text, each from some position of it, read side by side.

    The text is in the cache once. Each continuation attends to the part before its start and to its own tokens, by a
    mask and explicit positions. Departure: a model with sliding windows sees its whole context here;
    `check_branch_length` refuses longer texts. A model with recurrent layers reads each continuation again with the
    text before it.
    """

    def __init__(
        self, model: PreTrainedModel, vocab_size: int, cache: DynamicCache, starts: Int[Tensor, " branch"]
    ) -> None:
        """`cache` holds the text (`read_prefix`), and then what is fed; each continuation sees its `starts` first
        tokens of the text. Callers compute distributions of width `vocab_size` from hidden states.
        """
        self.model, self.vocab_size, self.cache, self.starts = model, vocab_size, cache, starts
        self._num_text = len(cache.ids) if isinstance(cache, ReadText) else cache.get_seq_length()
        self.drop()

    @torch.inference_mode()
    def feed(self, tokens: Fed, owners: Fed, depths: Fed) -> States:
        """Hidden states after tokens of continuations `owners`; `depths` is the index of each in its own, from 0."""
        if isinstance(self.cache, ReadText):
            return self._read_again(self.cache.ids, tokens, owners)
        positions, mask = self._mask.feed(owners, depths)
        inputs = {"position_ids": positions[None], "attention_mask": additive(mask, self.model.dtype)[None, None]}
        output = body_of(self.model)(input_ids=tokens[None], past_key_values=self.cache, use_cache=True, **inputs)
        return output.last_hidden_state[0]

    def drop(self) -> None:
        """Drop all continuations, and keep the text."""
        self._tails: dict[int, list[int]] = {}
        if not isinstance(self.cache, ReadText):
            roll_back(self.cache, self._num_text)
        self._mask = BranchMask(self._num_text, self.starts)

    def _read_again(self, text: list[int], tokens: Fed, owners: Fed) -> States:
        fed: dict[int, list[int]] = {owner: [] for owner in sorted(set(owners.tolist()))}
        for owner, token in zip(owners.tolist(), tokens.tolist(), strict=True):
            fed[owner].append(token)
        self._tails |= {owner: [*self._tails.get(owner, ()), *new] for owner, new in fed.items()}
        rows = [[*text[: int(self.starts[owner])], *self._tails[owner]] for owner in fed]
        starts = [len(row) - len(new) for row, new in zip(rows, fed.values(), strict=True)]
        groups = chunks(len(rows), max(1, _MAX_READ // max(map(len, rows))))
        states = torch.cat([hidden_states(self.model, rows[group], starts[group]) for group in groups])
        return torch.empty_like(states).index_copy_(0, owners.argsort(stable=True).to(states.device), states)


def keeps_states(model: PreTrainedModel) -> bool:
    """True if the cache of the model has layers that are not attention."""
    kinds = {type(layer) for layer in DynamicCache(config=model.config).layers}
    return not kinds <= {DynamicLayer, DynamicSlidingWindowLayer}


def read_prefix(model: PreTrainedModel, ids: list[int]) -> tuple[DynamicCache, Float[Tensor, "position hidden"]]:
    """A cache that holds `ids`, and the final hidden states after each. Windows are ignored: the mask hides entries."""
    cache = growing_cache(2 * len(ids))
    if keeps_states(model):
        cache = ReadText(config=model.config)
        cache.ids = ids
    tokens = torch.tensor([ids], device=device_of(model))
    with torch.inference_mode():
        states = body_of(model)(input_ids=tokens, past_key_values=cache, use_cache=True).last_hidden_state
    return cache, states[0]


def check_branches(model: PreTrainedModel) -> None:
    """Raise ValueError unless continuations that are read side by side have the hidden states that each has alone."""
    refuse_training(model)
    refusal = refusal_of(model, "be recorded in a trace", "`acceptance-heads bench` compares policies without a trace")
    check(model, "branches side by side", partial(_branch_feeds, model), refusal)


def check_branch_length(model: PreTrainedModel, length: int, *, num_prompt: int) -> None:
    """Raise ValueError if prompt, response and branch are longer than a window of the model, or cross a RoPE switch."""
    subject = f"prompt, response and branch have {length} tokens, which are read at once"
    remedy = "lower decode.max_new_tokens or data.max_prompt_tokens"
    refuse_crossing(model, num_prompt, length, subject=subject, remedy=remedy)
    if keeps_states(model):
        return
    for index, layer in enumerate(DynamicCache(config=model.config).layers):
        if isinstance(layer, DynamicSlidingWindowLayer) and length > layer.sliding_window:
            raise ValueError(
                f"layer {index} of {type(model).__name__} sees {layer.sliding_window} tokens; prompt, response and "
                f"branch have {length}, which branches need to see whole: {remedy}"
            )


def _branch_feeds(model: PreTrainedModel, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """(hidden states of a branch beside the others, those of the branch alone) of every branch."""
    prefix = ids_of_plan(model, _PREFIX, seed)
    branches = [(num_visible, ids_of_plan(model, tokens, seed)) for num_visible, tokens in _BRANCHES]
    cache, _ = read_prefix(model, prefix)
    device = device_of(model)
    side_by_side = Continuations(model, 0, cache, torch.tensor([num for num, _ in branches], device=device))
    fed = [(token, owner, depth) for owner, (_, ids) in enumerate(branches) for depth, token in enumerate(ids)]
    hidden = side_by_side.feed(*torch.tensor(fed, device=device).T).split([len(ids) for _, ids in branches])
    for states, (num_visible, ids) in zip(hidden, branches, strict=True):
        whole = torch.tensor([[*prefix[:num_visible], *ids]], device=device)
        yield states, body_of(model)(input_ids=whole, use_cache=False).last_hidden_state[0, num_visible:]
