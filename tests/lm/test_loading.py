"""Loading a model: settings that it cannot honour end in one line, and a lack of memory is named as that."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

from configs.schema import ModelSource, PairConfig
from lm import load_model, load_pair
from lm.pair import weight_bytes
from lm.parallel import check_slices, slices_of

TINY = str(Path(__file__).parents[2] / "checkpoints" / "tiny" / "target")
SOURCE = ModelSource(path=TINY, dtype="float32", device_map="cpu")
NARROW = """
import resource, sys
from configs.schema import ModelSource
from lm import load_model
import lm.pair
load_model(ModelSource(path=sys.argv[2], device_map="cpu"))  # whatever is imported late is there now
held = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmSize")) * 1024
resource.setrlimit(resource.RLIMIT_AS, (held + 2**26,) * 2)
try:
    load_model(ModelSource(path=sys.argv[1], device_map="cpu", dtype="float64"))
except ValueError as error:
    print(error)
"""


def test_a_lack_of_memory_while_loading_says_what_the_weights_take(tmp_path: Path):
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 8}
    LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=16000)).save_pretrained(tmp_path)
    command = [sys.executable, "-c", NARROW, tmp_path, TINY]
    [line] = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300).stdout.splitlines()
    need = weight_bytes(ModelSource(path=str(tmp_path), dtype="float64")) / 1e9
    start = f"out of memory while {tmp_path} was loaded (device_map cpu): its weights alone take {need:,.1f}"
    assert line.startswith(start)
    assert "a smaller dtype" in line


def test_weight_bytes_are_those_of_the_loaded_model_and_quantised_layers_take_a_scale_per_64_weights():
    for dtype, width in (("float32", 4), ("bfloat16", 2)):
        source = replace(SOURCE, dtype=dtype)
        assert weight_bytes(source) == width * load_model(source).num_parameters()
    model = load_model(SOURCE)
    tables = {id(table): table.numel() for table in (model.get_input_embeddings().weight, model.lm_head.weight)}
    in_tables = sum(tables.values())
    in_layers = model.num_parameters() - in_tables
    for quantization, width in (("4bit", 0.5), ("8bit", 1.0), ({"quant_method": "hqq", "nbits": 4}, 0.5)):
        source = replace(SOURCE, quantization=quantization)
        assert weight_bytes(source) == pytest.approx(4 * in_tables + (width + 1 / 16) * in_layers)


def test_attention_is_the_one_that_is_named():
    eager, default = load_model(replace(SOURCE, attn_implementation="eager")), load_model(SOURCE)
    assert (eager.config._attn_implementation, default.config._attn_implementation) == ("eager", "sdpa")
    ids = torch.tensor([[5, 6, 7, 8]])
    assert torch.allclose(eager(ids).logits, default(ids).logits, atol=1e-4)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"attn_implementation": "flash_attention_9"}, 'attn_implementation of .*attention_9"` is not supported'),
        ({"quantization": {"quant_method": "none_such"}}, "none_such.*write 4bit, 8bit"),
        ({"quantization": {"nbits": 4}}, "no `quant_method`.*write 4bit, 8bit"),
        ({"quantization": "4bit"}, "package that is not installed.*pip install -U bitsandbytes"),
        ({"quantization": "8bit"}, "package that is not installed.*pip install -U bitsandbytes"),
    ],
)
def test_settings_that_cannot_be_honoured_end_in_one_line(settings, said: str):
    with pytest.raises(ValueError, match=said) as caught:
        load_model(replace(SOURCE, **settings))
    assert "\n" not in str(caught.value)


SLICED = replace(SOURCE, device_map=None, tp_plan="auto")


@pytest.mark.parametrize(
    ("source", "family", "count", "said"),
    [
        (replace(SLICED, device_map="cpu"), TINY, 2, "device_map 'cpu'; leave one of them out"),
        (replace(SLICED, quantization="4bit"), TINY, 2, "quantization '4bit'; leave one of them out"),
        (SLICED, TINY, 3, "in 3 processes, and num_attention_heads 4 is no multiple of 3"),
        (SLICED, "gpt2", 2, "transformers has no such plan for gpt2; use device_map: auto"),
    ],
)
def test_what_cannot_be_sliced_is_refused(source, family, count: int, said: str):
    config = AutoConfig.from_pretrained(TINY) if family == TINY else AutoConfig.for_model(family)
    with pytest.raises(ValueError, match=said):
        check_slices(source, config, count)


def test_slices_are_for_torchrun_and_for_making_data(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ValueError, match=r"not started by torchrun; start it as torchrun --standalone"):
        load_model(SLICED)
    with pytest.raises(ValueError, match=r"pair\.target\.tp_plan is for making data"):
        load_pair(PairConfig(target=SLICED, draft=SOURCE))
    assert slices_of({"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "here"}) == (1, 4)
    assert slices_of({"SLURM_PROCID": "1", "RANK": "1", "WORLD_SIZE": "4"}) is None
