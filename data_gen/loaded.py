"""A loaded model as a source: the directory or hub commit that it came from if it is unmodified, or else a saved copy.

"Unmodified" is not assumed but compared: every tensor of the model, bit by bit, with the file that it came from;
config and generation config; and the tokenizer with its chat template. A model that differs, or that cannot be
compared (quantised, offloaded or sliced weights, files with other names of tensors, a repository's own code), is
saved.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from configs.schema import ModelSource
from data_gen.store.manifest import IGNORED_KEYS, tokenizer_text
from lm import model_config
from lm.pair import load_generation_config, load_tokenizer
from store.hub import HUB_ERRORS
from store.shards import atomic_directory

_SET_BY_LOADING = {*IGNORED_KEYS, "dtype", "_from_model_config"}
_DTYPES: dict[torch.dtype, Literal["float64", "float32", "bfloat16", "float16"]] = {
    torch.float64: "float64",
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}
_STATE_OF_CALLS = ("padding", "truncation")
"""Entries of a tokenizer's JSON that its last call leaves there."""


def source_of_loaded(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, copy: Path) -> ModelSource:
    """The origin of an unmodified model and its tokenizer, or `copy`, where a modified one is saved; prints which."""
    path = str(model.name_or_path)
    folder = _folder_of(path)
    difference = "its origin is not on this machine" if folder is None else _difference(model, tokenizer, folder)
    if folder is not None and difference is None:
        print(f"{copy.name}: {path}; the loaded model is unmodified")
        is_stored = model.dtype == model_config(ModelSource(path=str(folder))).dtype
        # huggingface_hub names a snapshot by its commit
        revision = None if Path(path).is_dir() else folder.name
        return ModelSource(path=path, revision=revision, dtype="auto" if is_stored else _DTYPES[model.dtype])
    print(f"{copy.name}: the loaded model is saved in {copy}, because {difference}")
    copy.parent.mkdir(parents=True, exist_ok=True)
    with atomic_directory(copy) as directory:
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
    return ModelSource(path=str(copy))


def _folder_of(path: str) -> Path | None:
    """The directory with the files of a model; of the hub, the newest snapshot in the cache, which may be
    another than the loaded one. None if this machine has neither.
    """
    if path and Path(path).is_dir():
        return Path(path)
    try:
        return Path(snapshot_download(path, local_files_only=True))
    except HUB_ERRORS:
        return None


def _difference(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> str | None:
    """What a model or its tokenizer has not of the files in `folder`; None if nothing differs."""
    if model.dtype not in _DTYPES:
        return f"its weights are of type {model.dtype}"
    source = ModelSource(path=str(folder))
    try:
        config = model_config(source)
        stored = load_tokenizer(source)
        generation = load_generation_config(source) or GenerationConfig.from_model_config(config)
    except (ValueError, FileNotFoundError) as error:
        return f"{folder} cannot be compared ({error})"
    if (name := _different_tensor(model.state_dict(), folder, dtype=model.dtype)) is not None:
        return f"its weights differ from {folder}, first {name}"
    if _settings_of(model.config) != _settings_of(config):
        return f"its config differs from {folder}/config.json"
    if _settings_of(model.generation_config) != _settings_of(generation):
        return f"its generation config differs from that of {folder}"
    if _described(tokenizer) != _described(stored):
        return f"its tokenizer or chat template differs from that in {folder}"
    return None


def _different_tensor(tensors: Mapping[str, Tensor], folder: Path, *, dtype: torch.dtype) -> str | None:
    """The first tensor of a model that is not the one of its name in the folder's files, converted to `dtype` if
    it has floats, or a view of one that is.
    """
    stored = set()
    for name, value in _tensors_in(folder):
        expected = value.to(dtype) if value.is_floating_point() else value
        if not _is_same(tensors.get(name), expected):
            return name
        stored.add(name)
    seen = {(tensors[name].data_ptr(), tensors[name].shape) for name in stored}  # tied weights are stored once
    rest = (name for name in tensors if name not in stored)
    return next((name for name in rest if (tensors[name].data_ptr(), tensors[name].shape) not in seen), None)


def _is_same(tensor: Tensor | None, expected: Tensor) -> bool:
    """Whether a tensor has these numbers; a quantised or sliced one has another type, and one on `meta` has none."""
    if type(tensor) is not Tensor or tensor.is_meta or tensor.dtype != expected.dtype:
        return False
    return torch.equal(tensor.cpu(), expected)


def _tensors_in(folder: Path) -> Iterator[tuple[str, Tensor]]:
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118, the file is not a mapping
                yield name, file.get_tensor(name)


def _settings_of(config: PreTrainedConfig | GenerationConfig | None) -> dict[object, object]:
    """A config without what loading sets, also in the configs inside it."""
    return {} if config is None else _without_state(config.to_dict())


def _without_state(values: Mapping[str, object] | Mapping[int, object]) -> dict[object, object]:
    kept = {name: value for name, value in values.items() if name not in _SET_BY_LOADING}
    return {name: _without_state(value) if isinstance(value, dict) else value for name, value in kept.items()}


def _described(tokenizer: PreTrainedTokenizerBase) -> list[object]:
    values = json.loads(tokenizer_text(tokenizer))
    if isinstance(values, dict):
        values = {name: value for name, value in values.items() if name not in _STATE_OF_CALLS}
    return [values, tokenizer.chat_template, tokenizer.special_tokens_map]
