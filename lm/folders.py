"""Directories that hold no model, and why."""

import json
from pathlib import Path


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
    """The base model that an adapter_config.json names."""
    try:
        base = json.loads(adapter.read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (ValueError, AttributeError):
        return None
    return None if base is None else str(base)
