"""Tiny random models of the families that transformers builds from a config, by kind of cache.

Of a few families there are two rows: their exactness depends on a size in their config.
"""

from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB_SIZE = 40
WINDOW = 8
_SIZES = {"vocab_size": VOCAB_SIZE, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
_SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
_SIZES |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 256}
_MIXED = ["sliding_attention", "full_attention"]
_OF_8 = {"head_dim": 8}
_SLIDING = {"sliding_window": WINDOW}
_SLIDING_OF_8 = _SLIDING | _OF_8
_PART = {"partial_rotary_factor": 0.5}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_SHARED = {"shared_expert_intermediate_size": 16}
_GROUPS = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1}
_FIRST = {"first_k_dense_replace": 1}
_NAMED = _MOE | _GROUPS | _FIRST | {"num_local_experts": 4}
_MLA = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
_MLA |= {"num_key_value_heads": 4}
_DEEPSEEK = _MLA | _GROUPS | {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_INDEXED = _DEEPSEEK | {"index_topk": 4, "index_head_dim": 8, "index_n_heads": 16}
_PER_LAYER = {"vocab_size_per_layer_input": VOCAB_SIZE, "hidden_size_per_layer_input": 8}
_MAMBA_2 = {"mamba_d_state": 4, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_expand": 2, "mamba_n_groups": 1}
_MAMBA_2 |= {"mamba_chunk_size": 4}
_CHUNKED = {"attention_chunk_size": WINDOW, "layer_types": ["chunked_attention", "full_attention"]}
_CHUNKED |= {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 32}
_ZAMBA_2 = {"mamba_ngroups": 1, "num_mem_blocks": 1, "n_mamba_heads": 4, "num_hidden_layers": 3}
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


def _alike(names: str, cache: str, settings: dict[str, Any], note: str = "") -> list[Family]:
    return [Family(name, cache, settings, note) for name in names.split()]


_GPT_NEO = {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": WINDOW}
FULL = [
    Family("llama", "full", {}, "grouped queries"),
    Family("llama", "full", {"tie_word_embeddings": True, "num_key_value_heads": 4}, "tied"),
    Family("qwen2", "full", {}),
    *_alike("qwen3 gemma", "full", _OF_8),
    Family("olmo2", "full", {}),
    Family("glm4", "full", _OF_8),
    Family("granite", "full", {"logits_scaling": 3.0}, "scaled logits"),
    Family("cohere", "full", {}, "scaled logits"),
    Family("nemotron", "full", {}),
    Family("smollm3", "full", {}, "layers without positions"),
    Family("gpt_neox", "full", {"rotary_pct": 0.5}, "partial rotary"),
    *_alike("phi stablelm persimmon", "full", _PART, "partial rotary"),
    *_alike("apertus arcee bitnet diffllama ernie4_5 glm hyperclovax jais2", "full", {}),
    *_alike("nanochat olmo seed_oss", "full", _OF_8),
    *_alike("gptj codegen", "full", {**_GPT2, "rotary_dim": 4}),
    Family("gpt_neox_japanese", "full", {}),
    Family("ctrl", "full", {**_GPT2, "dff": 32}),
    *_alike("bert bert-generation roformer xlm-roberta", "full", {"is_decoder": True}),
    Family("doge", "full", {}, "all keys kept"),
    Family("doge", "full", {"keep_window_size": 6}, "few keys kept"),
    Family("cpmant", "full", {}),
    Family("gpt2", "full", _GPT2, "learned positions"),
    Family("opt", "full", {"ffn_dim": 32, "word_embed_proj_dim": 16}, "learned positions"),
    Family("gpt_bigcode", "full", _GPT2, "multi-query"),
    Family("gpt_neo", "full", _GPT_NEO),
    Family("biogpt", "full", {}),
    Family("roberta", "full", {"is_decoder": True, "type_vocab_size": 1}, "offset positions"),
    Family("bloom", "full", {"n_layer": 2, "n_head": 4}, "ALiBi"),
    Family("falcon", "full", {"alibi": True}, "ALiBi"),
    Family("mpt", "full", {"d_model": 16, "n_heads": 4, "n_layers": 2, "max_seq_len": 256}, "ALiBi"),
]
EXPERTS = [
    Family("mixtral", "full", _EXPERTS, "experts"),
    Family("qwen2_moe", "full", _MOE | _SHARED, "experts"),
    Family("qwen3_moe", "full", _MOE | _OF_8, "experts"),
    Family("olmoe", "full", {"num_experts": 4, "num_experts_per_tok": 2}, "experts"),
    Family("granitemoe", "full", _EXPERTS, "experts"),
    *_alike("glm4_moe ernie4_5_moe granitemoeshared flex_olmo minimax_m2", "full", _NAMED, "experts"),
    *_alike("phimoe solar_open hy_v3 laguna", "full", _NAMED, "experts"),
]
LATENT = [
    *_alike("deepseek_v2 deepseek_v3", "latent (MLA)", _DEEPSEEK | _FIRST),
    Family("minicpm3", "latent (MLA)", _MLA),
    *_alike("glm4_moe_lite axk1 youtu", "latent (MLA)", _DEEPSEEK | _FIRST),
]
WINDOWS = [
    *_alike("mistral starcoder2 phi3", "sliding", _SLIDING),
    *_alike("ministral ministral3", "sliding", _SLIDING_OF_8),
    *_alike("afmoe exaone_moe", "sliding", _MOE | _SLIDING_OF_8, "experts"),
    Family("gemma2", "mixed", _SLIDING_OF_8, "soft-capped logits"),
    Family("gemma3_text", "mixed", _SLIDING_OF_8 | {"layer_types": _MIXED}),
    Family("qwen2", "mixed", _SLIDING | {"use_sliding_window": True, "max_window_layers": 1}, "max_window_layers"),
    *_alike("cwm granite_swa vaultgemma", "mixed", _SLIDING_OF_8),
    *_alike("granitemoe_swa cohere2_moe mimo_v2_flash", "mixed", _NAMED | _SLIDING_OF_8, "experts"),
    Family("gemma4_text", "mixed", _SLIDING_OF_8 | _PER_LAYER | {"layer_types": _MIXED}),
    *_alike("cohere2 olmo3 exaone4", "mixed", _SLIDING | {"layer_types": _MIXED}),
    Family("gpt_oss", "mixed", _SLIDING_OF_8 | _EXPERTS, "sinks, experts"),
    Family("modernbert-decoder", "mixed", {"local_attention": WINDOW, "layer_types": _MIXED}),
    Family("llama4_text", "chunked", _OF_8 | _CHUNKED),
]
_BOTH = "recurrent and full"
_JAMBA = {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "use_mamba_kernels": False}
_GRANITE = {"layer_types": ["mamba", "attention"], "num_local_experts": 2, "num_experts_per_tok": 1}
_GEMMA = {"num_hidden_layers": 3, "attention_window_size": WINDOW, "lru_width": 16}
STATES = [
    Family("lfm2", "convolutional", {"layer_types": ["conv", "full_attention"]}),
    Family("mamba", "recurrent", {"state_size": 4}),
    Family("mamba2", "recurrent", {"num_heads": 4, "head_dim": 8, "state_size": 4, "n_groups": 1, "chunk_size": 4}),
    Family("falcon_mamba", "recurrent", {"state_size": 4}),
    Family("recurrent_gemma", "recurrent and sliding", _GEMMA),
    Family("jamba", _BOTH, _JAMBA),
    Family("bamba", _BOTH, {**_MAMBA_2, "attn_layer_indices": [1]}),
    Family("granitemoehybrid", _BOTH, _MAMBA_2 | _GRANITE | {"shared_intermediate_size": 16}),
    Family("falcon_h1", _BOTH, {**_MAMBA_2, "mamba_d_ssm": 32}, "both in each layer"),
    Family("zamba2", _BOTH, _MAMBA_2 | _ZAMBA_2 | {"layers_block_type": ["mamba", "hybrid", "mamba"]}),
    Family("qwen3_next", _BOTH, _MOE | _LINEAR | _OF_8 | _SHARED | {"layer_types": _HYBRID}),
    Family("olmo_hybrid", _BOTH, {"layer_types": _HYBRID}),
    Family("qwen3_5_text", _BOTH, _LINEAR | _OF_8 | {"layer_types": _HYBRID}),
    Family("qwen3_5_moe_text", _BOTH, _LINEAR | _MOE | _OF_8 | {"layer_types": _HYBRID}, "experts"),
]
_GEMMA_3N = {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "laurel_rank": 4, "layer_types": 2 * _MIXED}
OTHERS = [
    Family("deepseek_v32", "indexed", _INDEXED | _FIRST),
    Family("deepseek_v32", "indexed", _INDEXED | _FIRST | {"index_n_heads": 4}, "few index heads"),
    Family("glm_moe_dsa", "indexed", _INDEXED),
    Family("deepseek_v4", "compressed", {}),
    Family("gemma3n_text", "shared keys", _SLIDING_OF_8 | _PER_LAYER | _GEMMA_3N),
    Family("rwkv", "of its own", {"attention_hidden_size": 16, "context_length": 256}),
    Family("xlstm", "of its own", {"num_heads": 2, "num_blocks": 2}),
    Family("minimax", "of its own", _EXPERTS),
    Family("openai-gpt", "none", _GPT2),
    Family("xlm", "none", {"emb_dim": 16, "n_layers": 2, "n_heads": 4}),
]
FAMILIES = FULL + EXPERTS + LATENT + WINDOWS + STATES + OTHERS
