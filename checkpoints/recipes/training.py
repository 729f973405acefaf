"""How the embedded trio learns: batches of stories, cross-entropy for the target, distillation for the other two.

Losses are means over answer positions (the end token included); prompts are read but not learned. Rows of a batch have
nearly the same length and are padded on the right, where a causal model cannot see the padding.

Matrices inside the layers are trained with Muon (momentum, orthogonalised by Newton-Schulz iterations; K. Jordan 2024),
embeddings and norms with AdamW. Against AdamW throughout, Muon needed a quarter to a third fewer steps for the same
loss and a sixth more time per step (10 layers of 128, batch 16).
"""

import math
from collections.abc import Iterator, Sequence
from itertools import islice
from random import Random
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

from data_gen.stories.stories import Story

Encoded = tuple[list[int], int]
"""(token ids of prompt, answer and end token; index of the answer's first token)"""
_WARMUP_STEPS = 50
_LAST_RATE = 0.02
"""The learning rate ends at this share of its peak."""
_BATCHES_SORTED_TOGETHER = 16
"""Rows are sorted by length within chunks of so many batches: enough for little padding, and the order of an epoch
stays random.
"""


class StoryBatch(NamedTuple):
    """Some stories, padded on the right."""

    ids: Int[Tensor, "batch position"]
    is_learned: Bool[Tensor, "batch position-1"]
    """True at i where the token at i + 1 belongs to an answer."""


def encode_story(story: Story, tokenizer: PreTrainedTokenizerBase) -> Encoded:
    """The chat template around the prompt, then the answer, then the end token."""
    chat = [{"role": "user", "content": story.prompt}]
    prompt_ids = tokenizer(tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False))["input_ids"]
    return [*prompt_ids, *tokenizer(story.answer)["input_ids"], tokenizer.eos_token_id], len(prompt_ids)


def story_batches(rows: Sequence[Encoded], *, batch_size: int, seed: int, pad_id: int) -> Iterator[StoryBatch]:
    """Endless batches in an order that `seed` decides; an epoch has every row once, but leaves out the rows that fill
    no whole chunk.
    """
    rng, order = Random(seed), list(range(len(rows)))
    chunk_size = min(len(rows), batch_size * _BATCHES_SORTED_TOGETHER)
    while True:
        rng.shuffle(order)
        for start in range(0, len(order) - chunk_size + 1, chunk_size):
            chunk = sorted((rows[index] for index in order[start : start + chunk_size]), key=lambda row: len(row[0]))
            together = [padded(chunk[at : at + batch_size], pad_id) for at in range(0, chunk_size, batch_size)]
            rng.shuffle(together)
            yield from together


def padded(rows: Sequence[Encoded], pad_id: int) -> StoryBatch:
    """One batch. Worked example: ([5, 6, 7], 1) and ([8, 9], 1) give ids [[5, 6, 7], [8, 9, pad]], is_learned [[T, T],
    [T, F]].
    """
    width = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([ids + [pad_id] * (width - len(ids)) for ids, _ in rows])
    following = torch.arange(1, width)
    starts, ends = (
        torch.tensor(values).unsqueeze(1) for values in ([start for _, start in rows], [len(ids) for ids, _ in rows])
    )
    return StoryBatch(ids, (following >= starts) & (following < ends))


def log_probs(model: LlamaForCausalLM, batch: StoryBatch) -> Float[Tensor, "learned vocab"]:
    """Log-probabilities of the next token at the learned positions."""
    hidden = model.model(input_ids=batch.ids[:, :-1], use_cache=False).last_hidden_state
    return model.lm_head(hidden[batch.is_learned]).log_softmax(-1)


def train_model(
    model: LlamaForCausalLM, source: Iterator[StoryBatch], *, num_steps: int, learning_rate: float
) -> Iterator[list[float]]:
    """Train on the stories themselves; yields the loss of each step, -log p(X_i), in nats per token."""
    optimiser = Optimiser(model, learning_rate, num_steps)
    for batch in islice(source, num_steps):
        loss = functional.nll_loss(log_probs(model, batch), batch.ids[:, 1:][batch.is_learned])
        optimiser.step(loss)
        yield [loss.item()]
    model.eval()


def distil(
    target: LlamaForCausalLM,
    models: Sequence[LlamaForCausalLM],
    source: Iterator[StoryBatch],
    *,
    num_steps: int,
    learning_rate: float,
) -> Iterator[list[float]]:
    """Train several models at once towards the target; yields KL(p || q) of each, in nats per token.

    The loss is the forward divergence and not total variation, because it makes q spread out where it does not know:
    policies read that.
    """
    optimisers = [Optimiser(model, learning_rate, num_steps) for model in models]
    for batch in islice(source, num_steps):
        with torch.no_grad():
            log_p = log_probs(target, batch)
        losses = []
        for model, optimiser in zip(models, optimisers, strict=True):
            loss = functional.kl_div(log_probs(model, batch), log_p, log_target=True, reduction="batchmean")
            optimiser.step(loss)
            losses.append(loss.item())
        yield losses
    for model in models:
        model.eval()


class Optimiser:
    """Muon for the layers' matrices, AdamW for the rest; linear warm-up, then a cosine."""

    def __init__(self, model: nn.Module, learning_rate: float, num_steps: int, *, has_muon: bool = True) -> None:
        """Args:
        model: put into training mode; its layers are under `layers`.
        learning_rate: the peak of AdamW's rate; Muon's is 5 times that (its updates have unit singular values).
        num_steps: length of the schedule.
        has_muon: False: AdamW for all; Muon's iterations are in bfloat16, which takes a CPU without it longer than a
            small forward.
        """
        named = [(name, parameter) for name, parameter in model.train().named_parameters() if parameter.requires_grad]
        self._parameters = [parameter for _, parameter in named]
        matrices = [parameter for name, parameter in named if "layers." in name and parameter.ndim == 2]
        rest = [parameter for parameter in self._parameters if all(parameter is not matrix for matrix in matrices)]
        rest = rest if has_muon else self._parameters
        self._optimisers: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(rest, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
        ]
        if has_muon:
            self._optimisers.insert(0, torch.optim.Muon(matrices, lr=5 * learning_rate, weight_decay=0.1))
        warmup = min(_WARMUP_STEPS, num_steps)

        def share(step: int) -> float:
            falling = _LAST_RATE + (1 - _LAST_RATE) * 0.5 * (1 + math.cos(math.pi * min(1.0, step / num_steps)))
            return min(1.0, (step + 1) / warmup) * falling

        self._schedules = [torch.optim.lr_scheduler.LambdaLR(optimiser, share) for optimiser in self._optimisers]

    def step(self, loss: Float[Tensor, ""]) -> None:
        """One update of every parameter, gradients clipped to norm 1."""
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
        for optimiser, schedule in zip(self._optimisers, self._schedules, strict=True):
            optimiser.step()
            optimiser.zero_grad()
            schedule.step()

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on, but for the parameters."""
        return {
            "optimisers": [optimiser.state_dict() for optimiser in self._optimisers],
            "schedules": [schedule.state_dict() for schedule in self._schedules],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        for name, parts in (("optimisers", self._optimisers), ("schedules", self._schedules)):
            for values, part in zip(state[name], parts, strict=True):
                part.load_state_dict(values)  # type: ignore[attr-defined]  # both kinds have it
