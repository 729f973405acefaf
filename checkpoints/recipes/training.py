"""Batches of stories, and how the embedded trio learns on them: cross-entropy for the target, distillation for the
other two.

Losses are means over answer positions (the end token included); prompts are read but not learned. Rows of a batch have
nearly the same length and are padded on the right, where a causal model cannot see the padding.
"""

from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

from checkpoints.recipes.fit import Pupil
from data_gen.stories.stories import Story

Encoded = tuple[list[int], int]
"""(token ids of prompt, answer and end token; index of the answer's first token)"""
_BATCHES_SORTED_TOGETHER = 16  # by length: enough for little padding, and the order of an epoch stays random


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
    starts, ends = torch.tensor([[start, len(row)] for row, start in rows]).unsqueeze(-1).unbind(1)
    return StoryBatch(ids, (following >= starts) & (following < ends))


def log_probs(model: LlamaForCausalLM, batch: StoryBatch) -> Float[Tensor, "learned vocab"]:
    """Log-probabilities of the next token at the learned positions."""
    hidden = model.model(input_ids=batch.ids[:, :-1], use_cache=False).last_hidden_state
    return model.lm_head(hidden[batch.is_learned]).log_softmax(-1)


def writer(model: LlamaForCausalLM) -> Pupil:
    """A model that learns the stories themselves: -log p(X_i), in nats per token."""

    def lesson(batch: StoryBatch, step: int) -> tuple[Float[Tensor, ""], float]:
        loss = functional.nll_loss(log_probs(model, batch), batch.ids[:, 1:][batch.is_learned])
        return loss, loss.item()

    return Pupil(model, lesson)


def imitator(model: LlamaForCausalLM) -> Pupil:
    """A model that learns a target's distributions (`read_by`): KL(p || q), in nats per token.

    The loss is the forward divergence and not total variation, because it makes q spread out where it does not know:
    policies read that.
    """

    def lesson(reading: tuple[StoryBatch, Tensor], step: int) -> tuple[Float[Tensor, ""], float]:
        batch, log_p = reading
        loss = functional.kl_div(log_probs(model, batch), log_p, log_target=True, reduction="batchmean")
        return loss, loss.item()

    return Pupil(model, lesson)


def read_by(target: LlamaForCausalLM) -> Callable[[StoryBatch], tuple[StoryBatch, Tensor]]:
    """A batch with log p of the target."""
    return torch.no_grad()(lambda batch: (batch, log_probs(target, batch)))
