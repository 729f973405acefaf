"""The target in this process as a source of responses, in continuous batches.

Every step of `TargetInProcess` feeds one token per sequence through a KV cache. A sequence that has ended makes room
for the next request, so a batch does not wait for its longest. All sequences end at the newest position of the cache;
positions left of a sequence are masked, and removed once no sequence uses them. Requests join longest prompt first,
which keeps padding small, and prompts of similar length are read together. Token i of request j is drawn by inversion
from uniform [j, i] of the shard, so other sequences in the batch change a response only through the rounding of
forwards.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from data_gen.responses.exchange import Exchange, FinishReason, Problem, Progress, Request
from lm import Sampling
from lm.cache import insert_rows, is_attention, make_cache
from lm.draws import draw, uniforms
from lm.forwards import alike, body_of, device_of, logits_of, refuse_training
from lm.sampling import REMEDY, non_finite

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

    @torch.inference_mode()
    def respond(self, requests: Sequence[Request], seed: int, progress: Progress) -> list[Exchange | Problem]:
        """Batched sampling of every request; the same requests and seed give the same responses. ValueError if the
        target is in train mode; callers check that no text crosses a change of RoPE frequencies (`lm.rope`).
        """
        refuse_training(self.model)
        batch = _Batch(self, requests, uniforms(seed, len(requests), self.max_new_tokens))
        # Longest prompts first: little padding, and running out of memory happens at once.
        waiting = deque(sorted(range(len(requests)), key=lambda index: (-len(requests[index].prompt_ids), index)))
        while len(batch.answers) < len(requests):
            num_answered = len(batch.answers)
            if waiting and batch.num_free >= max(1, _MIN_SHARE_FREE * self.batch_size):
                batch.join([waiting.popleft() for _ in range(min(batch.num_free, len(waiting)))])
            else:
                batch.step(is_last=not waiting)
            progress(len(batch.answers) - num_answered)
        return [batch.answers[index] for index in range(len(requests))]


class _Batch:
    """Active sequences, one per row; the row of an ended sequence is ignored until it is reused or removed."""

    def __init__(self, source: TargetInProcess, requests: Sequence[Request], uniform: Tensor) -> None:
        self._source = source
        self._requests = requests
        self._uniform = uniform
        self._device = device_of(source.model)
        self._tokens: list[list[int]] = [[] for _ in requests]
        self._states: list[list[Tensor]] = [[] for _ in requests]
        self.answers: dict[int, Exchange | Problem] = {}
        self._owners: list[int | None] = []
        """The request that each row answers."""

    @property
    def _active(self) -> list[int]:
        return [row for row, owner in enumerate(self._owners) if owner is not None]

    @property
    def num_free(self) -> int:
        """How many requests may join now."""
        num_active = len(self._active)
        return self._source.batch_size - num_active if num_active == 0 or is_attention(self._cache) else 0

    def join(self, indices: Sequence[int]) -> None:
        """Read the prompts of further requests, longest first, and draw the first token of each."""
        lengths = [len(self._requests[index].prompt_ids) for index in indices]
        if not self._active:
            self._cache = make_cache(self._source.model, lengths[0] + self._source.max_new_tokens + SPARE_POSITIONS)
            self._owners = [None] * len(indices)
            self._width = lengths[0]
            self._spans, self._newest = torch.zeros(2, len(indices), dtype=torch.int64)
            """[row] number of its tokens in the cache, and its newest token, which is not in the cache yet."""
        free = [row for row, owner in enumerate(self._owners) if owner is None]
        if not is_attention(self._cache):
            self._read(indices, free, self._cache)
            return
        for group in alike(lengths, len(lengths)):
            rows = [free[index] for index in group]
            prompts = make_cache(self._source.model, lengths[group[0]])
            self._read([indices[index] for index in group], rows, prompts)
            insert_rows(self._cache, prompts, torch.tensor(rows), len(self._owners))

    def _read(self, indices: Sequence[int], rows: Sequence[int], cache: DynamicCache) -> None:
        ids, mask = left_padded([self._requests[index].prompt_ids for index in indices], self._device)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)  # count from each prompt's first token, not from its padding
        hidden = self._forward(ids, mask, positions, cache)
        for row, index in zip(rows, indices, strict=True):
            self._owners[row] = index
        self._spans[rows] = mask.sum(-1).cpu()
        self._draw(hidden, rows)

    def step(self, *, is_last: bool) -> None:
        """One more token of every sequence; `is_last`: no further request joins."""
        active = self._active
        if len(active) <= _MAX_SHARE_ACTIVE * len(self._owners) and (is_last or not is_attention(self._cache)):
            self._cache.reorder_cache(torch.tensor(active))  # type: ignore[arg-type]  # any number of rows
            self._owners = [self._owners[row] for row in active]
            self._spans, self._newest = self._spans[active], self._newest[active]
            active = self._active
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
        self._draw(hidden[active], active)

    def _forward(self, ids: Tensor, mask: Tensor, positions: Tensor, cache: DynamicCache) -> Tensor:
        output = body_of(self._source.model)(
            input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache
        )
        return output.last_hidden_state[:, -1]

    def _draw(self, hidden: Tensor, rows: Sequence[int]) -> None:
        """Draw the next token of some rows from the states after their last; ended sequences become answers."""
        source = self._source
        owners = [index for row in rows if (index := self._owners[row]) is not None]
        logits = logits_of(source.model, hidden, source.vocab_size)
        if (broken := non_finite(logits)).any():  # these rows end here, but need an id to feed until they are removed
            logits = logits.masked_fill(broken.unsqueeze(-1), 0)
        counts = [len(self._tokens[index]) for index in owners]
        drawn = draw(source.sampling.probs(logits), self._uniform[owners, counts]).cpu()
        self._newest[rows] = drawn
        for row, index, token, state, is_broken in zip(
            rows, owners, drawn.tolist(), hidden.unbind(), broken.tolist(), strict=True
        ):
            ids = self._tokens[index]
            states = self._states[index]
            if is_broken:
                reason = f"the target has NaN or infinite logits after {len(ids)} tokens of its response; {REMEDY}"
                self.answers[index] = Problem(self._requests[index].id, "error", reason)
            else:
                ids.append(token)
                if source.keeps_states:
                    states.append(state)
                if (has_stopped := token in source.eos_ids) or len(ids) == source.max_new_tokens:
                    kept_states = torch.stack(states).cpu() if states else None
                    ended: FinishReason = "stop" if has_stopped else "length"
                    self.answers[index] = Exchange(*self._requests[index], ids, ended, kept_states)
            if index in self.answers:
                self._owners[row] = None
                self._states[index] = []


def left_padded(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """(ids, attention mask), [batch, longest]; padded with the row's first id, as no mask hides a NaN embedding."""
    width = max(map(len, rows))
    ids = torch.tensor([[row[0]] * (width - len(row)) + list(row) for row in rows], device=device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
    return ids, mask
