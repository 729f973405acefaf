"""Loading models and pairs: settings that cannot be honoured and models that do not fit end in one line."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from huggingface_hub.utils import are_progress_bars_disabled
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

from configs import ModelSource, PairConfig
from data_gen.store.manifest import describe_model
from lm import Pair, load_model, load_pair, vocab_size_of
from lm.pair import _warn_of_moving_code, repository_of, weight_bytes
from lm.parallel import check_slices, slices_of
from tests.toys.small_pair import llama

TINY = Path(__file__, "../../../checkpoints/tiny").resolve()
CONFIG = llama(vocab_size=24, intermediate_size=16, max_position_embeddings=64)


def tiny_pair(**changes) -> PairConfig:
    return PairConfig(**{role: ModelSource(path=str(TINY / role)) for role in ("target", "draft")} | changes)


@pytest.mark.parametrize(
    ("offloaded", "part"), [("lm_head", "output layer"), ("model.embed_tokens", "input embeddings")]
)
def test_an_output_layer_or_embeddings_that_were_offloaded_are_refused(offloaded, part, tmp_path):
    """accelerate leaves a weight on `meta` and brings it for the module's own forward alone."""
    LlamaForCausalLM(CONFIG).save_pretrained(tmp_path)
    modules = ("model.embed_tokens", "model.layers", "model.norm", "model.rotary_emb", "lm_head")
    places = {name: "disk" if name == offloaded else "cpu" for name in modules}
    message = rf"^the weight of the {part} of .* was offloaded \(.*; it is on meta\), .* in device_map, free"
    with pytest.raises(ValueError, match=message):
        load_model(ModelSource(path=str(tmp_path), device_map=places))


@pytest.mark.parametrize("role", ["target", "draft", "micro"])
@pytest.mark.parametrize(
    ("files", "complaint"),
    [
        (
            {"adapter_config.json": '{"base_model_name_or_path": "x/y"}'},
            r"FOLDER is an adapter \(LoRA\) of x/y, not a model",
        ),
        ({"adapter_config.json": "{"}, "FOLDER is an adapter, not a model; merge it"),
        (
            {"adapter_config.json": '{"base_model_name_or_path": "x/y"}', "config.json": "{}"},
            r"FOLDER has a model and an adapter \(LoRA\) of x/y, and which of them is meant is not clear; remove",
        ),
        (
            {"a/config.json": "{}", "b/config.json": "{}"},
            "FOLDER is a directory without config.json.* below it are a, b;",
        ),
        ({}, "FOLDER is a directory without config.json: no model is there; check"),
    ],
)
def test_a_directory_without_a_model_is_named_whichever_model_it_is(role, files, complaint, tmp_path):
    folder = tmp_path / "adapter"
    folder.mkdir()
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content)
    source = ModelSource(path=str(folder))
    for read in (lambda: load_pair(tiny_pair(**{role: source})), lambda: describe_model(source)):
        with pytest.raises((FileNotFoundError, ValueError), match=complaint.replace("FOLDER", str(folder))):
            read()


def test_a_missing_shard_of_a_model_is_named(tmp_path):
    LlamaForCausalLM(CONFIG).save_pretrained(tmp_path, max_shard_size="4KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(FileNotFoundError, match=rf"weights of {tmp_path} cannot be read: .*{shard.name}"):
        load_model(ModelSource(path=str(tmp_path)))


def test_tokenizers_that_differ_are_refused_by_the_first_token_that_does(tmp_path):
    shutil.copytree(TINY / "draft", tmp_path, dirs_exist_ok=True)
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    first, second = sorted(vocab, key=vocab.get)[-2:]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ValueError, match="differ in 2 tokens"):
        load_pair(tiny_pair(draft=ModelSource(path=str(tmp_path))))


def tokenizer_of(vocab):
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(vocab, unk_token="a")), unk_token="a")


def test_the_width_of_distributions_is_the_largest_id_and_no_more_than_the_targets_logits():
    gaps, model = tokenizer_of({"a": 0, "b": 1, "c": 9}), AutoModelForCausalLM.from_config(CONFIG)
    assert len(gaps) == 3
    assert Pair(model, model, None, gaps).vocab_size == vocab_size_of(gaps) == 10
    wider = tokenizer_of({str(place): place for place in range(24)} | {"a": 24})
    assert len(wider) == 25
    assert Pair(model, model, None, wider).vocab_size == 24


@pytest.mark.parametrize("trusts", [{"target": True}, {"draft": True}, {}])
def test_code_of_a_repository_runs_for_the_model_that_is_trusted_alone(trusts, tmp_path, capsys):
    """Each directory has an architecture of its own, which transformers knows by the directory's code alone."""
    sources = {}
    for name in ("target", "draft"):
        path = shutil.copytree(TINY / name, tmp_path / name)
        config = json.loads((path / "config.json").read_text())
        auto = {"AutoConfig": "code.Ours", "AutoModelForCausalLM": "code.OurModel"}
        (path / "config.json").write_text(json.dumps(config | {"model_type": f"our_{name}", "auto_map": auto}))
        (path / "code.py").write_text(
            "from transformers import LlamaConfig, LlamaForCausalLM\n"
            f"class Ours(LlamaConfig):\n    model_type = 'our_{name}'\n"
            "class OurModel(LlamaForCausalLM):\n    config_class = Ours\n"
        )
        sources[name] = ModelSource(path=str(path), trust_remote_code=trusts.get(name, False))
    for name, source in sources.items():
        if trusts.get(name):
            assert type(load_model(source)).__name__ == "OurModel"
        else:
            with pytest.raises(ValueError, match="contains custom code"):
                load_model(source)
    assert "warning" not in capsys.readouterr().err  # a directory is what it is


@pytest.mark.parametrize(("revision", "is_warned"), [(None, True), ("main", True), ("a" * 40, False)])
def test_code_at_a_floating_revision_is_warned_of_once(revision, is_warned, capsys):
    _warn_of_moving_code.cache_clear()
    for _ in range(2):
        repository_of(ModelSource(path="org/model", revision=revision, trust_remote_code=True))
        repository_of(ModelSource(path="org/model", revision=revision))
    assert capsys.readouterr().err.count("warning: org/model: trust_remote_code") == is_warned


def test_a_model_is_read_without_bars_and_those_of_downloads_stay(capsys):
    load_model(ModelSource(path=str(TINY / "draft")))
    assert capsys.readouterr().err == ""
    assert logging.is_progress_bar_enabled()
    assert not are_progress_bars_disabled()


SOURCE = ModelSource(path=str(TINY / "target"), dtype="float32", device_map="cpu")
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


def test_a_lack_of_memory_while_loading_says_what_the_weights_take(tmp_path):
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 8}
    LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=16000)).save_pretrained(tmp_path)
    command = [sys.executable, "-c", NARROW, tmp_path, SOURCE.path]
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


SLICED = replace(SOURCE, device_map=None, tp_plan="auto")
LLAMA, GPT2 = AutoConfig.for_model("llama", num_attention_heads=4), AutoConfig.for_model("gpt2")


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (lambda: load_pair(tiny_pair(draft=ModelSource(path="no/thing"))), "neither a local model directory"),
        (lambda: load_model(replace(SOURCE, dtype="int3")), "dtype"),
        pytest.param(
            lambda: load_model(replace(SOURCE, device_map="cuda:0")),
            "CUDA",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="it is there"),
        ),
        (
            lambda: load_model(replace(SOURCE, attn_implementation="flash_attention_9")),
            'attn_implementation of .*attention_9"` is not supported',
        ),
        *(
            (lambda value=value: load_model(replace(SOURCE, quantization=value)), message)
            for value, message in (
                ({"quant_method": "none_such"}, "none_such.*write 4bit, 8bit"),
                ({"nbits": 4}, "no `quant_method`.*write 4bit, 8bit"),
                ("4bit", "package that is not installed.*pip install -U bitsandbytes"),
                ("8bit", "package that is not installed.*pip install -U bitsandbytes"),
            )
        ),
        (lambda: load_model(SLICED), "not started by torchrun; start it as torchrun --standalone"),
        (lambda: load_pair(PairConfig(target=SLICED, draft=SOURCE)), r"pair\.target\.tp_plan is for making data"),
        (lambda: check_slices(replace(SLICED, device_map="cpu"), LLAMA, 2), "device_map 'cpu'; leave one of them out"),
        (
            lambda: check_slices(replace(SLICED, quantization="4bit"), LLAMA, 2),
            "quantization '4bit'; leave one of them out",
        ),
        (lambda: check_slices(SLICED, LLAMA, 3), "in 3 processes, and num_attention_heads 4 is no multiple of 3"),
        (lambda: check_slices(SLICED, GPT2, 2), "transformers has no such plan for gpt2; use device_map: auto"),
    ],
)
def test_what_cannot_be_loaded_or_sliced_is_refused_in_one_line(refused, message, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises((ValueError, FileNotFoundError), match=message) as refusal:
        refused()
    assert "\n" not in str(refusal.value)


def test_the_slice_of_a_process_is_torchruns(monkeypatch):
    for name, value in {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "here"}.items():
        monkeypatch.setenv(name, value)
    assert slices_of("pair.target") == (1, 4)
