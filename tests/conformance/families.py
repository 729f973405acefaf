"""Tiny random models of the families that transformers builds from a config, by kind of cache; windows and chunks are 8
tokens.

Of a few families there are two rows: their exactness depends on a size in their config.
"""

from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB_SIZE = 40
WINDOW = 8
_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 256}
_MIXED = ["sliding_attention", "full_attention"]
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_NAMED_EXPERTS = {
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_MLA = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
_DEEPSEEK = _MLA | {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
}
_INDEXER = {"index_topk": 4, "index_head_dim": 8, "index_n_heads": 16}
_MAMBA_2 = {
    "mamba_d_state": 4,
    "mamba_n_heads": 4,
    "mamba_d_head": 8,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 4,
}
_LINEAR = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
_HYBRID = ["linear_attention", "full_attention"]


class Family(NamedTuple):
    """One row of the table."""

    model_type: str
    cache: str
    """Kind of cache."""
    settings: dict[str, Any]
    """What its config needs besides the common sizes."""
    note: str = ""

    @property
    def name(self) -> str:
        return f"{self.model_type} ({self.note})" if self.note else self.model_type


def build(family: Family, seed: int = 0) -> PreTrainedModel:
    """A random model in float64; its weights are spread enough for its choices to differ from token to token."""
    config = AutoConfig.for_model(family.model_type, **(_SIZES | family.settings))
    torch.manual_seed(seed)
    # the default, grouped matrix products, has no float64; this is compiled like it
    model = AutoModelForCausalLM.from_config(config, experts_implementation="batched_mm").double().eval()
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.copy_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


FULL = [
    Family("llama", "full", {}, "grouped queries"),
    Family("llama", "full", {"tie_word_embeddings": True, "num_key_value_heads": 4}, "tied"),
    Family("qwen2", "full", {}),
    Family("qwen3", "full", {"head_dim": 8}),
    Family("gemma", "full", {"head_dim": 8}),
    Family("olmo2", "full", {}),
    Family("glm4", "full", {"head_dim": 8}),
    Family("granite", "full", {"logits_scaling": 3.0}, "scaled logits"),
    Family("cohere", "full", {}, "scaled logits"),
    Family("nemotron", "full", {}),
    Family("smollm3", "full", {}, "layers without positions"),
    Family("gpt_neox", "full", {"rotary_pct": 0.5}, "partial rotary"),
    Family("phi", "full", {"partial_rotary_factor": 0.5}, "partial rotary"),
    Family("stablelm", "full", {"partial_rotary_factor": 0.5}, "partial rotary"),
    Family("persimmon", "full", {"partial_rotary_factor": 0.5}, "partial rotary"),
    *(
        Family(name, "full", {})
        for name in ("apertus", "arcee", "bitnet", "diffllama", "ernie4_5", "glm", "hyperclovax", "jais2")
    ),
    *(Family(name, "full", {"head_dim": 8}) for name in ("nanochat", "olmo", "seed_oss")),
    *(Family(name, "full", {**_GPT2, "rotary_dim": 4}) for name in ("gptj", "codegen")),
    Family("gpt_neox_japanese", "full", {}),
    Family("ctrl", "full", {**_GPT2, "dff": 32}),
    *(Family(name, "full", {"is_decoder": True}) for name in ("bert", "bert-generation", "roformer", "xlm-roberta")),
    Family("doge", "full", {}, "all keys kept"),
    Family("doge", "full", {"keep_window_size": 6}, "few keys kept"),
    Family("cpmant", "full", {}),
    Family("gpt2", "full", _GPT2, "learned positions"),
    Family("opt", "full", {"ffn_dim": 32, "word_embed_proj_dim": 16}, "learned positions"),
    Family("gpt_bigcode", "full", _GPT2, "multi-query"),
    Family(
        "gpt_neo",
        "full",
        {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": WINDOW},
    ),
    Family("biogpt", "full", {}),
    Family("roberta", "full", {"is_decoder": True, "type_vocab_size": 1}, "offset positions"),
    Family("bloom", "full", {"n_layer": 2, "n_head": 4}, "ALiBi"),
    Family("falcon", "full", {"alibi": True}, "ALiBi"),
    Family("mpt", "full", {"d_model": 16, "n_heads": 4, "n_layers": 2, "max_seq_len": 256}, "ALiBi"),
]
EXPERTS = [
    Family("mixtral", "full", {"num_local_experts": 4, "num_experts_per_tok": 2}, "experts"),
    Family("qwen2_moe", "full", {**_MOE, "shared_expert_intermediate_size": 16}, "experts"),
    Family("qwen3_moe", "full", {**_MOE, "head_dim": 8}, "experts"),
    Family("olmoe", "full", {"num_experts": 4, "num_experts_per_tok": 2}, "experts"),
    Family("granitemoe", "full", {"num_local_experts": 4, "num_experts_per_tok": 2}, "experts"),
]
EXPERTS += [
    Family(name, "full", _MOE | _NAMED_EXPERTS, "experts")
    for name in (
        "glm4_moe",
        "ernie4_5_moe",
        "granitemoeshared",
        "flex_olmo",
        "minimax_m2",
        "phimoe",
        "solar_open",
        "hy_v3",
        "laguna",
    )
]
LATENT = [
    Family("deepseek_v2", "latent (MLA)", {**_DEEPSEEK, "first_k_dense_replace": 1}),
    Family("deepseek_v3", "latent (MLA)", {**_DEEPSEEK, "first_k_dense_replace": 1}),
    Family("minicpm3", "latent (MLA)", _MLA),
    *(
        Family(name, "latent (MLA)", {**_DEEPSEEK, "first_k_dense_replace": 1})
        for name in ("glm4_moe_lite", "axk1", "youtu")
    ),
]
WINDOWS = [
    Family("mistral", "sliding", {"sliding_window": WINDOW}),
    Family("starcoder2", "sliding", {"sliding_window": WINDOW}),
    Family("phi3", "sliding", {"sliding_window": WINDOW}),
    *(Family(name, "sliding", {"sliding_window": WINDOW, "head_dim": 8}) for name in ("ministral", "ministral3")),
    *(
        Family(name, "sliding", _MOE | {"sliding_window": WINDOW, "head_dim": 8}, "experts")
        for name in ("afmoe", "exaone_moe")
    ),
    Family("gemma2", "mixed", {"sliding_window": WINDOW, "head_dim": 8}, "soft-capped logits"),
    Family("gemma3_text", "mixed", {"sliding_window": WINDOW, "head_dim": 8, "layer_types": _MIXED}),
    Family(
        "qwen2",
        "mixed",
        {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": WINDOW},
        "max_window_layers",
    ),
    *(
        Family(name, "mixed", {"sliding_window": WINDOW, "head_dim": 8})
        for name in ("cwm", "granite_swa", "vaultgemma")
    ),
    *(
        Family(name, "mixed", _MOE | _NAMED_EXPERTS | {"sliding_window": WINDOW, "head_dim": 8}, "experts")
        for name in ("granitemoe_swa", "cohere2_moe", "mimo_v2_flash")
    ),
    Family(
        "gemma4_text",
        "mixed",
        {
            "sliding_window": WINDOW,
            "head_dim": 8,
            "layer_types": _MIXED,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "hidden_size_per_layer_input": 8,
        },
    ),
    Family("cohere2", "mixed", {"sliding_window": WINDOW, "layer_types": _MIXED}),
    Family("olmo3", "mixed", {"sliding_window": WINDOW, "layer_types": _MIXED}),
    Family("exaone4", "mixed", {"sliding_window": WINDOW, "layer_types": _MIXED}),
    Family(
        "gpt_oss",
        "mixed",
        {"sliding_window": WINDOW, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
        "sinks, experts",
    ),
    Family("modernbert-decoder", "mixed", {"local_attention": WINDOW, "layer_types": _MIXED}),
    Family(
        "llama4_text",
        "chunked",
        {
            "attention_chunk_size": WINDOW,
            "layer_types": ["chunked_attention", "full_attention"],
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "head_dim": 8,
            "intermediate_size_mlp": 32,
        },
    ),
]
STATES = [
    Family("lfm2", "convolutional", {"layer_types": ["conv", "full_attention"]}),
    Family("mamba", "recurrent", {"state_size": 4}),
    Family("mamba2", "recurrent", {"num_heads": 4, "head_dim": 8, "state_size": 4, "n_groups": 1, "chunk_size": 4}),
    Family("falcon_mamba", "recurrent", {"state_size": 4}),
    Family(
        "recurrent_gemma",
        "recurrent and sliding",
        {"num_hidden_layers": 3, "attention_window_size": WINDOW, "lru_width": 16},
    ),
    Family(
        "jamba",
        "recurrent and full",
        {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "use_mamba_kernels": False},
    ),
    Family("bamba", "recurrent and full", {**_MAMBA_2, "attn_layer_indices": [1]}),
    Family(
        "granitemoehybrid",
        "recurrent and full",
        {
            **_MAMBA_2,
            "layer_types": ["mamba", "attention"],
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "shared_intermediate_size": 16,
        },
    ),
    Family("falcon_h1", "recurrent and full", {**_MAMBA_2, "mamba_d_ssm": 32}, "both in each layer"),
    Family(
        "zamba2",
        "recurrent and full",
        {
            **_MAMBA_2,
            "mamba_ngroups": 1,
            "num_mem_blocks": 1,
            "n_mamba_heads": 4,
            "num_hidden_layers": 3,
            "layers_block_type": ["mamba", "hybrid", "mamba"],
        },
    ),
    Family(
        "qwen3_next",
        "recurrent and full",
        {**_MOE, **_LINEAR, "head_dim": 8, "layer_types": _HYBRID, "shared_expert_intermediate_size": 16},
    ),
    Family("olmo_hybrid", "recurrent and full", {"layer_types": _HYBRID}),
    Family("qwen3_5_text", "recurrent and full", {**_LINEAR, "head_dim": 8, "layer_types": _HYBRID}),
    Family(
        "qwen3_5_moe_text", "recurrent and full", {**_LINEAR, **_MOE, "head_dim": 8, "layer_types": _HYBRID}, "experts"
    ),
]
OTHERS = [
    Family("deepseek_v32", "indexed", {**_DEEPSEEK, **_INDEXER, "first_k_dense_replace": 1}),
    Family(
        "deepseek_v32",
        "indexed",
        {**_DEEPSEEK, **_INDEXER, "index_n_heads": 4, "first_k_dense_replace": 1},
        "few index heads",
    ),
    Family("glm_moe_dsa", "indexed", {**_DEEPSEEK, **_INDEXER}),
    Family("deepseek_v4", "compressed", {}),
    Family(
        "gemma3n_text",
        "shared keys",
        {
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "sliding_window": WINDOW,
            "head_dim": 8,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "hidden_size_per_layer_input": 8,
            "laurel_rank": 4,
            "layer_types": 2 * _MIXED,
        },
    ),
    Family("rwkv", "of its own", {"attention_hidden_size": 16, "context_length": 256}),
    Family("xlstm", "of its own", {"num_heads": 2, "num_blocks": 2}),
    Family("minimax", "of its own", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    Family("openai-gpt", "none", _GPT2),
    Family("xlm", "none", {"emb_dim": 16, "n_layers": 2, "n_heads": 4}),
]
FAMILIES = FULL + EXPERTS + LATENT + WINDOWS + STATES + OTHERS
