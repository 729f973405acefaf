"""The target in this process as a source of responses, in continuous batches.

Every step of `TargetInProcess` feeds one token per sequence through a KV cache. A sequence that has ended makes
room for the next request, of its shard or of the next one, so a batch does not wait for its longest. All
sequences end at the newest position of the cache; positions left of a sequence are masked, and removed once no
sequence uses them. Requests of a shard join longest prompt first, which keeps padding small, and prompts of
similar length are read together. Token i of request j is drawn by inversion from uniform [j, i] of the shard, so
other sequences in the batch change a response only through the rounding of forwards.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from data_gen.responses.exchange import Exchange, FinishReason, Problem, Progress, Request, Result, Turns
from lm import Sampling
from lm.cache import insert_rows, is_attention, make_cache, widen
from lm.draws import draw, uniforms
from lm.forwards import alike, body_of, device_of, logits_of, refuse_training
from lm.sampling import REMEDY, non_finite

Shard = TypeVar("Shard")
_MAX_SHARE_ACTIVE = 0.85
"""If no request can join, ended sequences are removed once at most this share is active: removal copies the cache."""
_MIN_SHARE_FREE = 1 / 16
"""Requests join once this share of the batch is free, so that they share a forward over their prompts."""
SPARE_POSITIONS = 64
"""Positions of a cache beyond its longest sequence; its content moves to the front once per this many steps."""


@dataclass(frozen=True)
class TargetInProcess:
    """The target in this process, through transformers."""

    model: PreTrainedModel
    sampling: Sampling
    _: KW_ONLY
    vocab_size: int
    eos_ids: frozenset[int]
    max_new_tokens: int
    batch_size: int
    keeps_states: bool = False
    """Also return the hidden states: labels then need no further forward of the target."""

    def respond(self, requests: Sequence[Request], seed: int, progress: Progress) -> list[Exchange | Problem]:
        """Batched sampling of every request; the same requests and seed give the same responses. ValueError if
        the target is in train mode; callers check that no text crosses a change of RoPE frequencies (`lm.rope`).
        """

        def one_turn() -> Turns[list[Exchange | Problem]]:
            if not requests:
                return []
            return (yield list(requests), seed)

        [(_, answers)] = self.respond_joined([(None, one_turn())], progress)
        return answers

    @torch.inference_mode()
    def respond_joined(
        self, shards: Iterable[tuple[Shard, Turns[Result]]], progress: Progress
    ) -> Iterator[tuple[Shard, Result]]:
        """Each shard with what its turns return, as soon as its last response is done.

        One running batch serves all shards. The next shard begins only when rows are free that no earlier request
        needs, so each open shard has a sequence in the batch, and at most one has requests that wait for a row.
        """
        refuse_training(self.model)
        batch = _Batch(self)
        waiting = deque[_Sequence]()
        upcoming = iter(shards)
        while True:
            while len(waiting) < batch.num_free and (following := next(upcoming, None)) is not None:
                opened = _OpenShard(*following, self.max_new_tokens)
                waiting.extend(opened.next_turn())
                if not opened.sequences:
                    yield opened.shard, opened.result
            if waiting and batch.num_free >= max(1, _MIN_SHARE_FREE * self.batch_size):
                ended = batch.join([waiting.popleft() for _ in range(min(batch.num_free, len(waiting)))])
            elif not batch.active:
                return
            else:
                ended = batch.step(is_last=not waiting)
            progress(len(ended))
            for opened in dict.fromkeys(sequence.shard for sequence in ended):
                if all(sequence.answer is not None for sequence in opened.sequences):
                    waiting.extendleft(reversed(opened.next_turn()))  # earlier shards first
                    if not opened.sequences:
                        yield opened.shard, opened.result


class _OpenShard(Generic[Shard, Result]):
    """A shard with requests in the batch or waiting for it, and the sequences of its present turn."""

    result: Result
    """What the turns returned; set when there are no sequences left."""

    def __init__(self, shard: Shard, turns: Turns[Result], max_new_tokens: int) -> None:
        self.shard = shard
        self.turns = turns
        self.max_new_tokens = max_new_tokens
        self.sequences: list[_Sequence] = []

    def next_turn(self) -> list["_Sequence"]:
        """The sequences of the next turn, longest prompt first: little padding, and running out of memory
        happens at once. No sequence: the shard is done.
        """
        answers = [sequence.answer for sequence in self.sequences if sequence.answer is not None]
        self.sequences = []
        try:
            requests, seed = self.turns.send(answers) if answers else next(self.turns)
        except StopIteration as end:
            self.result = end.value
            return []
        uniform = uniforms(seed, len(requests), self.max_new_tokens)
        self.sequences = [_Sequence(*both, self) for both in zip(requests, uniform.unbind(), strict=True)]
        return sorted(self.sequences, key=_Sequence.by_length)


class _Sequence:
    """A request and its response, token by token."""

    def __init__(self, request: Request, uniform: Tensor, shard: _OpenShard[Any, Any]) -> None:
        """`uniform`: [max_new_tokens], to draw the tokens with."""
        self.request = request
        self.uniform = uniform
        self.shard = shard
        self.tokens: list[int] = []
        self.states: list[Tensor] = []
        self.answer: Exchange | Problem | None = None

    def by_length(self) -> int:
        """The key that sorts longer prompts first."""
        return -len(self.request.prompt_ids)


class _Batch:
    """Active sequences, one per row; the row of an ended sequence is ignored until it is reused or removed."""

    def __init__(self, source: TargetInProcess) -> None:
        self._source = source
        self._device = device_of(source.model)
        self._owners: list[_Sequence | None] = []
        """The sequence of each row."""

    @property
    def active(self) -> list[int]:
        """The rows of active sequences."""
        return [row for row, owner in enumerate(self._owners) if owner is not None]

    @property
    def num_free(self) -> int:
        """How many requests may join now."""
        num_active = len(self.active)
        if num_active == 0:
            return self._source.batch_size
        return len(self._owners) - num_active if is_attention(self._cache) else 0

    def join(self, sequences: Sequence[_Sequence]) -> list[_Sequence]:
        """Read the prompts of further requests and draw the first token of each; returns those that end with it."""
        sequences = sorted(sequences, key=_Sequence.by_length)
        lengths = [len(sequence.request.prompt_ids) for sequence in sequences]
        longest = lengths[0]
        capacity = longest + self._source.max_new_tokens + SPARE_POSITIONS
        if not self.active:
            self._cache = make_cache(self._source.model, capacity)
            self._owners = [None] * len(sequences)
            self._width = longest
            self._spans, self._newest = torch.zeros(2, len(sequences), dtype=torch.int64)
            """[row] number of its tokens in the cache, and its newest token, which is not in the cache yet."""
            self._uniform = torch.zeros(len(sequences), self._source.max_new_tokens, dtype=torch.float64)
        free = [row for row, owner in enumerate(self._owners) if owner is None]
        if not is_attention(self._cache):
            return self._read(sequences, free, self._cache)
        if longest > self._width:
            widen(self._cache, longest, capacity)
            self._width = longest
        ended: list[_Sequence] = []
        for group in alike(lengths, len(lengths)):
            rows = [free[index] for index in group]
            prompts = make_cache(self._source.model, lengths[group[0]])
            ended += self._read([sequences[index] for index in group], rows, prompts)
            insert_rows(self._cache, prompts, torch.tensor(rows), len(self._owners))
        return ended

    def _read(self, sequences: Sequence[_Sequence], rows: Sequence[int], cache: DynamicCache) -> list[_Sequence]:
        ids, mask = left_padded([sequence.request.prompt_ids for sequence in sequences], self._device)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)  # count from each prompt's first token, not from its padding
        hidden = self._forward(ids, mask, positions, cache)
        for row, sequence in zip(rows, sequences, strict=True):
            self._owners[row] = sequence
        self._spans[rows] = mask.sum(-1).cpu()
        self._uniform[rows] = torch.stack([sequence.uniform for sequence in sequences])
        return self._draw(hidden, rows)

    def step(self, *, is_last: bool) -> list[_Sequence]:
        """One more token of every sequence; returns those that end. `is_last`: no further request joins."""
        active = self.active
        if len(active) <= _MAX_SHARE_ACTIVE * len(self._owners) and (is_last or not is_attention(self._cache)):
            self._cache.reorder_cache(torch.tensor(active))  # type: ignore[arg-type]  # any number of rows
            self._owners = [self._owners[row] for row in active]
            self._spans = self._spans[active]
            self._newest = self._newest[active]
            self._uniform = self._uniform[active]
            active = self.active
        if is_attention(self._cache):
            span = int(self._spans[active].max())
            for layer in self._cache.layers:
                layer.drop_first(self._width - span)  # type: ignore[union-attr]  # a `BufferLayer`
            self._width = span
        ids = self._newest.unsqueeze(-1).to(self._device)
        spans = self._spans.unsqueeze(-1).to(self._device)
        mask = torch.arange(self._width + 1, device=self._device) >= self._width - spans
        # the position of an ended sequence must not be the largest, on which the RoPE frequencies of all may depend
        positions = spans.clamp(max=int(self._spans[active].max()))
        hidden = self._forward(ids, mask.long(), positions, self._cache)
        self._width += 1
        self._spans += 1
        return self._draw(hidden[active], active)

    def _forward(self, ids: Tensor, mask: Tensor, positions: Tensor, cache: DynamicCache) -> Tensor:
        output = body_of(self._source.model)(
            input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache
        )
        return output.last_hidden_state[:, -1]

    def _draw(self, hidden: Tensor, rows: Sequence[int]) -> list[_Sequence]:
        """Draw the next token of some rows from the states after their last; returns those that end."""
        source = self._source
        owners = [owner for row in rows if (owner := self._owners[row]) is not None]
        logits = logits_of(source.model, hidden, source.vocab_size)
        if (broken := non_finite(logits)).any():  # these rows end here, but need an id to feed until they are removed
            logits = logits.masked_fill(broken.unsqueeze(-1), 0)
        counts = [len(owner.tokens) for owner in owners]
        drawn = draw(source.sampling.probs(logits), self._uniform[rows, counts]).cpu()
        self._newest[rows] = drawn
        for row, sequence, token, state, is_broken in zip(
            rows, owners, drawn.tolist(), hidden.unbind(), broken.tolist(), strict=True
        ):
            ids = sequence.tokens
            if is_broken:
                reason = f"the target has NaN or infinite logits after {len(ids)} tokens of its response; {REMEDY}"
                sequence.answer = Problem(sequence.request.id, "error", reason)
            else:
                ids.append(token)
                if source.keeps_states:
                    sequence.states.append(state)
                if (has_stopped := token in source.eos_ids) or len(ids) == source.max_new_tokens:
                    kept_states = torch.stack(sequence.states).cpu() if sequence.states else None
                    finish_reason: FinishReason = "stop" if has_stopped else "length"
                    sequence.answer = Exchange(*sequence.request, ids, finish_reason, kept_states)
            if sequence.answer is not None:
                self._owners[row] = None
                sequence.states = []
        return [sequence for sequence in owners if sequence.answer is not None]


def left_padded(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """(ids, attention mask), [batch, longest]; padded with the row's first id, as no mask hides a NaN embedding."""
    width = max(map(len, rows))
    ids = torch.tensor([[row[0]] * (width - len(row)) + list(row) for row in rows], device=device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
    return ids, mask
