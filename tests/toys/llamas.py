"""The configuration of a tiny Llama, of which tests change what they are about."""

from typing import Any

from transformers import LlamaConfig

SIZES = {"vocab_size": 20, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def llama(**changes: Any) -> LlamaConfig:
    """`SIZES` with `changes`: llama(vocab_size=40, num_hidden_layers=1)."""
    return LlamaConfig(**(SIZES | changes))
