"""Directories of models, without transformers: why one holds none, and how many weights a file has."""

import json
import math
from pathlib import Path

from safetensors import safe_open

# types of safetensors that hold one weight per number
_UNPACKED = {"F64", "F32", "F16", "BF16"}


def refuse_no_model(path: str) -> None:
    """Raise FileNotFoundError for a file and for a directory without config.json, ValueError for a LoRA adapter,
    with or without a model beside it.
    """
    folder = Path(path)
    if folder.is_file():
        raise FileNotFoundError(f"{path} is a file; give the directory of the model, which has config.json")
    if not folder.is_dir():
        return
    adapter = folder / "adapter_config.json"
    has_model = (folder / "config.json").is_file()
    if adapter.is_file():
        base = _base_of(adapter)
        kind = f"an adapter{f' (LoRA) of {base}' if base else ''}"
        if has_model:
            raise ValueError(
                f"{path} has a model and {kind}, and which of them is meant is not clear; remove adapter_config.json "
                "if the adapter is merged into the model, else merge it (peft: merge_and_unload, then save_pretrained)"
            )
        raise ValueError(
            f"{path} is {kind}, not a model; merge it into its base model (peft: merge_and_unload, then "
            "save_pretrained) and give that directory"
        )
    if not has_model:
        below = sorted(file.parent.name for file in folder.glob("*/config.json"))
        hint = f"; the models below it are {', '.join(below)}" if below else ""
        raise FileNotFoundError(f"{path} is a directory without config.json: no model is there{hint}; check the path")


def _base_of(adapter: Path) -> str | None:
    try:
        base = json.loads(adapter.read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (ValueError, AttributeError):
        return None
    return None if base is None else str(base)


def num_weights_in(path: str) -> int | None:
    """Number of a local model's weights, from the header of its one weights file. None where the file does not say:
    shards, packed weights, buffers among them, or an output layer beside the embedding, which may be tied to it.
    """
    files = list(Path(path).glob("*.safetensors"))
    if len(files) != 1:
        return None
    total = 0
    with safe_open(files[0], "np") as opened:
        names = opened.keys()
        if any(name.startswith("lm_head") or name.endswith("inv_freq") for name in names):
            return None
        for name in names:
            part = opened.get_slice(name)
            if part.get_dtype() not in _UNPACKED:
                return None
            total += math.prod(part.get_shape())
    return total
