"""A small Llama with the target's vocabulary, taught on readings of its target: a draft that every engine can run.

Its embeddings, which are its output rows too, begin as the target's in their first principal directions: what the
target has learned of words is not learned again.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from checkpoints.recipes.learning import Batch
from store.shards import atomic_directory

_HEAD_SIZE = 64


@dataclass(frozen=True, kw_only=True)
class SmallShape:
    """Size of the draft."""

    hidden_size: int = 192
    num_layers: int = 2
    intermediate_size: int = 768


class Small:
    """A draft that is a model of its own, and how it learns."""

    def __init__(self, target: PreTrainedModel, shape: SmallShape) -> None:
        """Args:
        target: whose vocabulary, context and embeddings it takes over.
        shape: its size; hidden_size is a multiple of 64 and at most the target's.

        Raises:
            ValueError: a hidden_size that it cannot have.
        """
        of_target = target.config.get_text_config()
        size = shape.hidden_size
        if size % _HEAD_SIZE or not 0 < size <= of_target.hidden_size:
            raise ValueError(f"hidden_size is {size}; take a multiple of {_HEAD_SIZE} up to {of_target.hidden_size}")
        names = ("vocab_size", "max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")
        config = LlamaConfig(
            **{name: getattr(of_target, name) for name in names},
            hidden_size=size,
            intermediate_size=shape.intermediate_size,
            num_hidden_layers=shape.num_layers,
            num_attention_heads=size // _HEAD_SIZE,
            tie_word_embeddings=True,
        )
        self.model = LlamaForCausalLM(config)
        self.module: nn.Module = self.model
        self.model.model.embed_tokens.weight.data.copy_(_directions(target.get_output_embeddings().weight, size))

    def said(self, batch: Batch, num_depths: int) -> Iterator[Float[Tensor, "learned vocab"]]:
        """Logits of the whole vocabulary; a model of its own says the same at every depth, so once."""
        hidden = self.model.model(input_ids=batch.ids, use_cache=False).last_hidden_state
        yield self.model.lm_head(hidden[batch.is_learned])

    def places(self, tokens: Int[Tensor, "learned top"]) -> Int[Tensor, "learned top"]:
        """Its vocabulary is the target's."""
        return tokens

    def save(self, directory: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        """Write the draft in bfloat16, and the target's tokenizer beside it."""
        with atomic_directory(directory) as folder:
            self.model.bfloat16().save_pretrained(folder)
            tokenizer.save_pretrained(folder)


@torch.no_grad()
def _directions(rows: Float[Tensor, "vocab hidden"], size: int) -> Float[Tensor, "vocab small"]:
    """The rows in their first `size` principal directions, as long as a new model's embeddings are."""
    centred = rows.float() - rows.float().mean(0)
    _, directions = torch.linalg.eigh(centred.T @ centred)
    reduced = centred @ directions[:, -size:]
    return reduced * (0.02 / reduced.std())
