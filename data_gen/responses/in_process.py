"""Responses X ~ target (law 4.6), by the target in this process.

Requests of similar length share a batch, prompts are padded on the left, every step feeds one token per sequence through a KV cache, and
sequences that have ended leave the batch. Token i of request j is drawn by inversion from uniform [j, i] of the shard, so the batches that
requests happen to share change a response only through the rounding of the forwards.
"""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from data_gen.responses.exchange import Problem, Progress, Request, Response
from lm import Sampling
from lm.finite import refuse_non_finite
from lm.forwards import device_of, logits_of
from lm.kv_buffer import keep, make_cache
from lm.uniforms import draw, uniforms

_MAX_SHARE_GOING = 0.85
"""Ended sequences leave a batch once at most this share is still going: to remove them copies the cache, to keep them costs forwards."""


@dataclass(frozen=True)
class TargetInProcess:
    """The target through transformers, in this process."""

    model: PreTrainedModel
    sampling: Sampling
    _: KW_ONLY
    vocab_size: int
    eos_ids: frozenset[int]
    max_new_tokens: int
    batch_size: int
    keeps_states: bool = False
    """Also return the hidden states: labels then need no further forward of the target."""

    def respond(self, requests: Sequence[Request], seed: int, progress: Progress) -> list[Response | Problem]:
        """Batched sampling of every request; the same requests and seed give the same responses."""
        chance = uniforms(seed, len(requests), self.max_new_tokens)
        # Longest prompts first: little padding, and a lack of memory shows at once.
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
        """Response ids to one batch, and the states from which they were drawn; `chance` is [batch, max_new_tokens]."""
        device = device_of(self.model)
        ids, mask = left_padded(prompts, device)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)  # count from each prompt's first token, not from its padding
        cache = make_cache(self.model, ids.shape[1] + self.max_new_tokens)
        rows = torch.arange(len(prompts))  # which response each row of the shrinking batch belongs to
        responses: list[list[int]] = [[] for _ in prompts]
        steps: list[tuple[Tensor, Tensor]] = []
        going = torch.ones(len(prompts), dtype=torch.bool)
        for step in range(self.max_new_tokens):
            output = self.model.base_model(input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache)
            hidden = output.last_hidden_state[:, -1]
            logits = logits_of(self.model, hidden, self.vocab_size)
            refuse_non_finite(logits, "the target", f"while it answered the batch of {first_id}")
            tokens = draw(self.sampling.probs(logits), chance[rows, step])
            if self.keeps_states:
                steps.append((rows, hidden))
            for place, (row, token) in enumerate(zip(rows.tolist(), tokens.tolist(), strict=True)):
                if going[place]:  # a sequence that has ended draws on until it leaves the batch; its tokens are ignored
                    responses[row].append(token)
                    going[place] = token not in self.eos_ids
            if not going.any():
                break
            ids, positions = tokens.unsqueeze(-1).to(device), positions[:, -1:] + 1
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=-1)
            if going.sum() <= _MAX_SHARE_GOING * len(going):
                stay = going.nonzero().squeeze(-1)
                rows, going = rows[stay], going[stay]
                stay = stay.to(device)
                keep(cache, stay)
                ids, positions, mask = ids[stay], positions[stay], mask[stay]
        return list(zip(responses, _states_by_row(steps, [len(ids) for ids in responses]), strict=True))


def _states_by_row(steps: Sequence[tuple[Tensor, Tensor]], lengths: Sequence[int]) -> list[Tensor | None]:
    """Per step (rows of the batch, states [row, hidden]) -> per row [length, hidden]; None for each row without any step."""
    if not steps:
        return [None] * len(lengths)
    by_row = steps[0][1].new_empty(len(lengths), len(steps), steps[0][1].shape[-1])
    for step, (rows, states) in enumerate(steps):
        by_row[rows.to(by_row.device), step] = states
    return [row[:length].cpu() for row, length in zip(by_row, lengths, strict=True)]


def left_padded(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """(ids, attention mask), both [batch, longest]; any id will do as padding, since the mask hides it."""
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in rows], device=device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
    return ids, mask
