"""A toy pair on disk: two random Llamas of a few thousand parameters with one byte-level tokenizer."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHAT = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}<a>{{ m['content'] }}<end>{% else %}<u>{{ m['content'] "
    "}}\n{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)


def save_toy(directory: Path, *, hidden_size: int, seed: int, scale: float = 0.4) -> None:
    """A Llama and its tokenizer; `scale` spreads the weights, so that distributions are neither flat nor one-hot."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<pad>", "<end>", "<u>", "<a>", *alphabet]
    tokenizer = Tokenizer(BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {"pad_token": "<pad>", "eos_token": "<end>", "additional_special_tokens": ["<u>", "<a>"]}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    fast.chat_template = CHAT
    fast.save_pretrained(directory)
    sizes = {"hidden_size": hidden_size, "intermediate_size": 2 * hidden_size, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256}
    sizes |= {"vocab_size": len(tokens) + 4}  # a padded vocabulary
    ids = {"eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None}
    torch.manual_seed(seed)
    LlamaForCausalLM(LlamaConfig(**sizes, **ids, initializer_range=scale)).save_pretrained(directory)
