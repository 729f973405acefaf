"""Responses X ~ target (law 4.6), by the target in this process.

Generation is batched: requests of similar length share a batch, prompts are padded on the left, every step feeds one token per sequence
through a KV cache, and sequences that have ended leave the batch. Token i of request j is drawn by inversion from uniform [j, i] of the
shard, so a response depends on how requests were batched only through the rounding of the forwards.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from data_gen.responses.exchange import Problem, Progress, Request, Response
from lm import Sampling
from lm.finite import refuse_non_finite
from lm.forwards import device_of, logits_of
from lm.kv_buffer import keep, make_cache
from lm.uniforms import draw, uniforms

_CROWDED = 0.85
"""Ended sequences leave a batch when at most this share is still going: leaving copies the cache, staying costs forwards."""


@dataclass(frozen=True)
class TargetInProcess:
    """The target through transformers, in this process."""

    model: PreTrainedModel
    sampling: Sampling
    vocab_size: int
    eos_ids: frozenset[int]
    max_new_tokens: int
    batch_size: int
    keeps_states: bool = False
    """Hand the hidden states out too: labelling then needs no further forward of the target."""

    def respond(self, requests: Sequence[Request], seed: int, progress: Progress) -> list[Response | Problem]:
        """Batched sampling of every request; deterministic in (requests, seed)."""
        chance = uniforms(seed, len(requests), self.max_new_tokens)
        order = sorted(range(len(requests)), key=lambda index: (-len(requests[index].prompt_ids), index))
        answers: dict[int, Response | Problem] = {}
        for start in range(0, len(order), self.batch_size):
            batch = order[start : start + self.batch_size]
            generated = self._generate([requests[index].prompt_ids for index in batch], chance[batch], requests[batch[0]].id)
            for index, (ids, states) in zip(batch, generated, strict=True):
                answers[index] = Response(ids, "stop" if ids[-1] in self.eos_ids else "length", states)
            progress(len(batch))
        return [answers[index] for index in range(len(requests))]

    @torch.inference_mode()
    def _generate(self, prompts: list[list[int]], chance: Tensor, first_id: str) -> list[tuple[list[int], Tensor | None]]:
        """Responses to one batch, and the states behind them; `chance` is [batch, max_new_tokens]."""
        device = device_of(self.model)
        ids, mask = left_padded(prompts, device)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        cache = make_cache(self.model, ids.shape[1] + self.max_new_tokens)
        rows = torch.arange(len(prompts))
        responses: list[list[int]] = [[] for _ in prompts]
        kept_states: list[tuple[Tensor, Tensor]] = []
        going = torch.ones(len(prompts), dtype=torch.bool)
        for step in range(self.max_new_tokens):
            output = self.model.base_model(input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache)
            hidden = output.last_hidden_state[:, -1]
            logits = logits_of(self.model, hidden, self.vocab_size)
            refuse_non_finite(logits, "the target", f"while it answered the batch of {first_id}")
            tokens = draw(self.sampling.probs(logits), chance[rows, step])
            if self.keeps_states:
                kept_states.append((rows, hidden))
            for place, (row, token) in enumerate(zip(rows.tolist(), tokens.tolist(), strict=True)):
                if going[place]:
                    responses[row].append(token)
                    going[place] = token not in self.eos_ids
            if not going.any():
                break
            ids, positions = tokens.unsqueeze(-1).to(device), positions[:, -1:] + 1
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=-1)
            if going.sum() <= _CROWDED * len(going):
                kept = going.nonzero().squeeze(-1)
                rows, going = rows[kept], going[kept]
                kept = kept.to(device)
                keep(cache, kept)
                ids, positions, mask = ids[kept], positions[kept], mask[kept]
        return list(zip(responses, _by_row(kept_states, [len(ids) for ids in responses]), strict=True))


def _by_row(steps: Sequence[tuple[Tensor, Tensor]], lengths: Sequence[int]) -> list[Tensor | None]:
    """Per-step (rows of the batch, states [row, hidden]) -> per row [length, hidden]; None for each row if nothing was kept."""
    if not steps:
        return [None] * len(lengths)
    whole = steps[0][1].new_empty(len(lengths), len(steps), steps[0][1].shape[-1])
    for step, (rows, states) in enumerate(steps):
        whole[rows.to(whole.device), step] = states
    return [row[:length].cpu() for row, length in zip(whole, lengths, strict=True)]


def left_padded(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """(ids, attention mask), both [batch, longest]; the padding id is arbitrary, the mask hides it."""
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in rows], device=device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
    return ids, mask
