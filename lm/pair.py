"""Load a target, a draft and perhaps a micro model, and check that they fit.

They fit if their tokenizers map the same tokens to the same ids. Logits may be wider than the tokenizer (padded
vocabularies, as Qwen's): every model's logits are cut to `Pair.vocab_size`, so the extra ids get probability 0.
The target's may be narrower, too (Gemma-3 1B's tokenizer has an id for images that has no logit): such ids are
never emitted.
"""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate.utils.memory import clear_device_cache
from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.quantizers.auto import AutoQuantizationConfig
from transformers.utils import logging

from configs.schema import ModelSource, PairConfig
from lm.features.base import FeatureDraft
from lm.features.loading import feature_draft_of
from lm.features.released import released_layout_of
from lm.folders import refuse_no_model
from lm.forwards import eos_ids_of
from lm.linears import pack
from lm.parallel import refuse_sliced, slicing_of

_OUT_OF_MEMORY = ("DefaultCPUAllocator", "ALLOC_FAILED", "Cannot allocate memory", "CUDA out of memory")
_BITSANDBYTES: dict[str, dict[str, str | bool]] = {
    "4bit": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "bfloat16"},
    "8bit": {"load_in_8bit": True},
}


@dataclass(frozen=True)
class Pair:
    """Models that fit, and their tokenizer; `drafting` is the draft of either kind."""

    target: PreTrainedModel
    drafting: PreTrainedModel | FeatureDraft
    micro: PreTrainedModel | None
    tokenizer: PreTrainedTokenizerBase

    @property
    def draft(self) -> PreTrainedModel:
        """The draft, a language model; ValueError for a feature draft."""
        if isinstance(self.drafting, FeatureDraft):
            raise ValueError(_needs_target(type(self.drafting).__name__))
        return self.drafting

    @cached_property
    def vocab_size(self) -> int:
        """Width of every distribution."""
        return vocab_size_of(self.tokenizer, self.target.config)

    @property
    def eos_ids(self) -> frozenset[int]:
        """The end-of-sequence ids of the target's generation config, or the tokenizer's."""
        return eos_ids_of(self.target.generation_config) or eos_ids_of(self.tokenizer)


def vocab_size_of(tokenizer: PreTrainedTokenizerBase, of_target: PretrainedConfig | None = None) -> int:
    """One more than the largest id of the tokenizer (`len` is less if ids have gaps), or that the target emits."""
    num_ids = 1 + max(tokenizer.get_vocab().values())
    return num_ids if of_target is None else min(num_ids, int(of_target.get_text_config().vocab_size))


def load_pair(config: PairConfig) -> Pair:
    """Load every model of `config`, in evaluation mode, and check that they fit. FileNotFoundError for a path without a
    model (`load_model`); ValueError for tokenizers that differ, or logits narrower than what the target emits.
    """
    refuse_sliced(config, "this")
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    tokenizer = load_pair_tokenizer(config)
    models = {name: load_model(source) for name, source in _sources(config).items()}
    target = models["target"]
    drafting = models.get("draft") or feature_draft_of(config.draft, target)
    pair = Pair(target, drafting, models.get("micro"), tokenizer)
    for name, model in models.items():
        check_width(model.config, pair.vocab_size, name)
    return pair


def load_pair_tokenizer(config: PairConfig) -> PreTrainedTokenizerBase:
    """The target's tokenizer, without loading a model; ValueError if another model's differs."""
    tokenizer = load_tokenizer(config.target)
    ids = tokenizer.get_vocab()
    for name, source in _sources(config).items():
        others = load_tokenizer(source).get_vocab()
        if differing := {token for token, _ in ids.items() ^ others.items()}:
            token = min(differing)
            raise ValueError(
                f"the tokenizers of target {config.target.path} and {name} {source.path} differ in {len(differing)} "
                f"tokens, first {token!r}: id {ids.get(token)} against {others.get(token)}; speculative decoding "
                "needs one token -> id map, choose models of one family"
            )
    return tokenizer


def _sources(config: PairConfig) -> dict[str, ModelSource]:
    sources = {"target": config.target}
    if not released_layout_of(config.draft):
        sources["draft"] = config.draft
    if config.micro:
        sources["micro"] = config.micro
    return sources


def refuse_feature_draft(config: PairConfig) -> None:
    """Raise ValueError if pair.draft is a feature draft."""
    if layout := released_layout_of(config.draft):
        raise ValueError(_needs_target(f"{layout} directory ({config.draft.path})"))


def _needs_target(kind: str) -> str:
    return (
        f"pair.draft is a feature draft, an {kind}, which drafts only beside the target whose states it reads; this "
        "needs a draft that is a language model: set pair.draft.path"
    )


def load_tokenizer(source: ModelSource) -> PreTrainedTokenizerBase:
    """The tokenizer of a model."""
    refuse_no_model(source.path)
    with _reading(source, "tokenizer"):
        return transformers.AutoTokenizer.from_pretrained(source.path, **repository_of(source))


def load_model(source: ModelSource, *, device: torch.device | None = None) -> PreTrainedModel:
    """A causal language model in evaluation mode, on `device` if that is given; only safetensors are read.
    FileNotFoundError for a path that is neither a local model directory nor an available hub id; ValueError for weights
    that lack tensors or cannot be read, too little memory, or settings that model or machine do not support.
    """
    settings = _settings_of(source, device=device)
    refuse_no_model(source.path)
    with _reading(source, "config.json or weights"):
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
            source.path,
            dtype=source.dtype,
            use_safetensors=True,
            output_loading_info=True,
            **repository_of(source),
            **settings,
        )
    model, loading = loaded
    if missing := sorted(loading["missing_keys"]):  # transformers would leave them random
        raise ValueError(
            f"the weights of {source.path} lack {len(missing)} tensors, first {missing[0]}; fetch or copy the model "
            "again"
        )
    layers = {"output layer": model.get_output_embeddings(), "input embeddings": model.get_input_embeddings()}
    for part, layer in layers.items():  # accelerate has offloaded those, and their weights are read directly
        if getattr(getattr(layer, "weight", None), "is_meta", False):
            raise ValueError(
                f"the weight of the {part} of {source.path} did not fit and was offloaded (device_map "
                f"{source.device_map!r}; it is on meta), and every position needs it; give it its own device in "
                "device_map, free memory, or choose a smaller dtype"
            )
    model.eval()
    if source.packed:
        pack(model, source.path)
    return model


def model_config(source: ModelSource) -> PretrainedConfig:
    """The config.json of a model; FileNotFoundError if the source has no model."""
    with _reading(source, "config.json"):
        return transformers.AutoConfig.from_pretrained(source.path, **repository_of(source))


def load_generation_config(source: ModelSource) -> GenerationConfig | None:
    """The generation_config.json of a model, read without its weights; None if it has none."""
    file = Path(source.path, "generation_config.json")
    try:
        with _reading(source, file.name):
            return GenerationConfig.from_pretrained(source.path, revision=source.revision or "main")
    except FileNotFoundError:
        if file.is_file():
            raise
        return None  # the directory or the hub has none, or the hub cannot be reached


def repository_of(source: ModelSource) -> dict[str, str | bool]:
    """Arguments of every `from_pretrained`: the revision, and whether the repository's code may run."""
    revision = source.revision or "main"
    if source.trust_remote_code and not (Path(source.path).is_dir() or re.fullmatch("[0-9a-f]{40}", revision)):
        _warn_of_moving_code(source.path, revision)
    return {"revision": revision, "trust_remote_code": source.trust_remote_code}


@cache
def _warn_of_moving_code(path: str, revision: str) -> None:
    print(
        f"warning: {path}: trust_remote_code runs whatever code revision {revision} holds today; set this model's "
        "revision to the commit (40 hexadecimal digits) whose code you have read",
        file=sys.stderr,
    )


def _settings_of(source: ModelSource, *, device: torch.device | None) -> dict[str, object]:
    attention = source.attn_implementation
    settings: dict[str, object] = {} if attention is None else {"attn_implementation": attention}
    if source.tp_plan is not None:
        return settings | {"distributed_config": slicing_of(source, model_config(source))}
    device_map = source.device_map if device is None else str(device)
    if device_map is None:
        device_map = "cuda:0" if torch.cuda.is_available() else "cpu"
    if "cuda" in str(device_map) and not torch.cuda.is_available():
        raise ValueError(
            f"device_map {device_map!r} of {source.path} needs CUDA, and this machine has none; use device_map: cpu"
        )
    if source.quantization is not None:
        try:
            settings["quantization_config"] = AutoQuantizationConfig.from_dict(_fields_of(source.quantization))
        except (ValueError, TypeError, ImportError) as error:
            cause = " ".join(str(error).split())[:300]
            raise ValueError(
                f"quantization {source.quantization!r} of {source.path}: {cause}; write 4bit, 8bit, or quant_method "
                "and the fields of transformers' class for it"
            ) from error
    return settings | {"device_map": device_map}


def _fields_of(quantization: str | dict[str, object] | None) -> dict[str, Any]:
    return dict(quantization) if isinstance(quantization, dict) else dict(_BITSANDBYTES.get(str(quantization), {}))


def is_out_of_memory(error: BaseException) -> bool:
    """True if this error or a cause of it is a lack of memory; torch has no separate type for the CPU's."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or any(sign in str(error) for sign in _OUT_OF_MEMORY):
        return True
    return error.__cause__ is not None and is_out_of_memory(error.__cause__)


free_memory = partial(clear_device_cache, garbage_collection=True)
"""Free the memory of models that are out of use: they have reference cycles, and allocators keep memory."""


def without_weights(source: ModelSource) -> PreTrainedModel:
    """A model on the device `meta`, from its config alone: every shape and method, no numbers."""
    config = model_config(source)
    with torch.device("meta"), _reading(source, "config.json"):
        model: PreTrainedModel = transformers.AutoModelForCausalLM.from_config(
            config, trust_remote_code=source.trust_remote_code
        )
    return model


def weight_bytes(source: ModelSource) -> float:
    """Bytes of a model's weights, from its config alone: layers as they are quantised, tables in the model's dtype."""
    model = without_weights(source)
    fields = _fields_of(source.quantization)
    width = dtype_bytes(source, model.config)
    num_bits = 4 if fields.get("load_in_4bit") else 8 if fields.get("load_in_8bit") else 16
    num_bits = next((fields[name] for name in ("bits", "nbits", "w_bit") if name in fields), num_bits)
    # a quantised layer has a scale of half a byte per eight weights
    layer_width = width if source.quantization is None else min(width, num_bits / 8 + 4 / 64)
    layers = model.get_input_embeddings(), model.get_output_embeddings()
    num_in_tables = sum(weight.numel() for weight in {layer.get_parameter("weight") for layer in layers})
    return float(num_in_tables * width + (model.num_parameters() - num_in_tables) * layer_width)


def dtype_bytes(source: ModelSource, config: PretrainedConfig) -> int:
    """Bytes of one number: of the YAML's dtype, or of the stored one."""
    dtype: object = getattr(torch, source.dtype, None) if source.dtype != "auto" else config.get_text_config().dtype
    return dtype.itemsize if isinstance(dtype, torch.dtype) else torch.float32.itemsize


@contextmanager
def _reading(source: ModelSource, part: str) -> Iterator[None]:
    """Turn what transformers and tokenizers raise over broken files (anything, even bare `Exception`) into one
    line. Progress bars of loading weights are hidden meanwhile, those of downloads are not.
    """
    has_bars = logging.is_progress_bar_enabled()
    hides_downloads = are_progress_bars_disabled()
    logging.disable_progress_bar()
    if not hides_downloads:
        enable_progress_bars()
    try:
        yield
    except Exception as error:
        raise _refusal_of(error, source, part) from error
    finally:
        if has_bars:
            logging.enable_progress_bar()


def _refusal_of(error: Exception, source: ModelSource, part: str) -> Exception:
    path = source.path
    cause = " ".join(str(error).split())[:300]
    if is_out_of_memory(error):
        free_memory()
        device = source.device_map or ("cuda" if torch.cuda.is_available() else "cpu")
        return ValueError(
            f"out of memory while {path} was loaded (device_map {device}): its weights alone take "
            f"{weight_bytes(source) / 1e9:,.1f} GB; `acceptance-heads plan` adds up the rest. Free memory, or choose "
            "device_map: auto over more GPUs, tp_plan: auto, a smaller dtype, quantization: 4bit, or data.mode: "
            "sequential, which loads one model at a time"
        )
    if isinstance(error, ImportError):
        return ValueError(f"{path} needs a package that is not installed: {cause}")
    if isinstance(error, OSError) and Path(path).is_dir():  # a shard is missing, or a file cannot be read
        return FileNotFoundError(f"the {part} of {path} cannot be read: {cause}; fetch or copy the model again")
    if isinstance(error, OSError):
        return FileNotFoundError(
            f"no model with safetensors weights at {path!r} (revision {source.revision or 'main'}): neither a local "
            "model directory nor a hub id that can be reached; check the path, or `hf download` it first"
        )
    if source.attn_implementation is not None and "attn_implementation" in cause:
        return ValueError(f"attn_implementation of {path}: {cause}")
    return ValueError(
        f"the {part} of {path} cannot be read ({type(error).__name__}: {cause}); fetch or copy the model again, and "
        "check the settings of this model"
    )


def check_widths(config: PairConfig) -> None:
    """`check_width` of every model by its config.json, without loading weights."""
    vocab_size = vocab_size_of(load_tokenizer(config.target), model_config(config.target))
    for name, source in _sources(config).items():
        check_width(model_config(source), vocab_size, name)


def check_width(config: PretrainedConfig, vocab_size: int, name: str) -> None:
    """Raise ValueError if a model with this config lacks logits for a token that may be emitted."""
    if (width := int(config.get_text_config().vocab_size)) < vocab_size:
        raise ValueError(
            f"{name} has logits for {width} ids and {vocab_size} are in use; resize its embeddings or use its own "
            "tokenizer"
        )
