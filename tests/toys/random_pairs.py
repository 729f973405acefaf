"""Random pairs of several architectures, in float64."""

from collections.abc import Sequence

import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

SIZES = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"max_position_embeddings": 64}
IDS = {"eos_token_id": None, "bos_token_id": 0, "pad_token_id": 0}
CONFIGS = {
    "llama": LlamaConfig(**SIZES, **IDS, intermediate_size=32),
    "qwen2": transformers.Qwen2Config(**SIZES, **IDS, intermediate_size=32, num_key_value_heads=1),
    "gpt_neox": transformers.GPTNeoXConfig(**SIZES, **IDS, intermediate_size=32),
    "gpt2": transformers.GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=64, **IDS),
    "opt": transformers.OPTConfig(**SIZES, **IDS, ffn_dim=32, word_embed_proj_dim=16),
}


def random_pair(architecture: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A random target in float64, and a draft that is the same with noise, so that some drafts are accepted."""
    target, draft = (AutoModelForCausalLM.from_config(CONFIGS[architecture]).double().eval() for _ in range(2))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for ours, theirs in zip(draft.parameters(), target.parameters(), strict=True):
            if theirs.dim() > 1:
                theirs.copy_(0.4 * torch.randn(theirs.shape, generator=generator, dtype=torch.float64))
            ours.copy_(theirs + 0.03 * torch.randn(theirs.shape, generator=generator, dtype=torch.float64))
    return target, draft


def greedy_of(target: PreTrainedModel, prompt: Sequence[int], length: int) -> list[int]:
    """What plain generate says after the prompt, greedily."""
    ids = torch.tensor([list(prompt)])
    return target.generate(ids, do_sample=False, max_new_tokens=length)[0, len(prompt) :].tolist()
