"""A toy pair on disk: two random Llamas of a few thousand parameters with one byte-level tokenizer, logits wide enough
to be uneven.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from configs.schema import Config, DataConfig, ModelSource, PairConfig

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
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>", additional_special_tokens=["<u>", "<a>"]
    )
    fast.chat_template = CHAT
    fast.save_pretrained(directory)
    config = LlamaConfig(
        vocab_size=len(tokens) + 4,  # a padded vocabulary
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
        initializer_range=scale,
    )
    torch.manual_seed(seed)
    LlamaForCausalLM(config).save_pretrained(directory)


@pytest.fixture(scope="session")
def toy_pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with target and draft."""
    folder = tmp_path_factory.mktemp("toy")
    save_toy(folder / "target", hidden_size=16, seed=1)
    save_toy(folder / "draft", hidden_size=8, seed=2, scale=0.3)
    return folder


@pytest.fixture(scope="session")
def models(toy_pair: Path) -> dict[str, PreTrainedModel]:
    """The toy pair, loaded."""
    return {name: AutoModelForCausalLM.from_pretrained(toy_pair / name).eval() for name in ("target", "draft")}


@pytest.fixture
def prompts_file(tmp_path: Path) -> Path:
    """Twelve prompts of differing length."""
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        "".join(
            json.dumps({"id": f"p{i}", "instruction": "Say it " + "again " * (i % 5), "input": "x" * (i % 3)}) + "\n"
            for i in range(12)
        )
    )
    return path


@pytest.fixture
def toy_config(toy_pair: Path, prompts_file: Path, tmp_path: Path) -> Config:
    """Eight training and four test prompts in shards of three, ten tokens each."""
    return Config(
        pair=PairConfig(
            target=ModelSource(path=str(toy_pair / "target")),
            draft=ModelSource(path=str(toy_pair / "draft")),
            num_threads=1,
        ),
        data=DataConfig(
            dir=str(tmp_path / "data"),
            prompts=str(prompts_file),
            split_weights=(2, 0, 1),
            num_train=8,
            num_dev=0,
            num_test=4,
            max_prompt_tokens=60,
            max_new_tokens=10,
            rows_per_shard=3,
            batch_size=2,
        ),
    )


@pytest.fixture
def with_data():
    """with_data(config, **changes): the config with other `data` settings."""
    return lambda config, **changes: replace(config, data=replace(config.data, **changes))
