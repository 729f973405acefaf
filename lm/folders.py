"""Directories that hold no model, and why."""

import json
from pathlib import Path


def refuse_no_model(path: str) -> None:
    """Raise FileNotFoundError for a directory without config.json, ValueError for one with a LoRA adapter alone."""
    folder = Path(path)
    if not folder.is_dir() or (folder / "config.json").is_file():
        return
    adapter = folder / "adapter_config.json"
    if adapter.is_file():
        try:
            base = json.loads(adapter.read_text(encoding="utf-8")).get("base_model_name_or_path")
        except (ValueError, AttributeError):
            base = None
        raise ValueError(
            f"{path} is an adapter{f' (LoRA) of {base}' if base else ''}, not a model; merge it into its base model "
            "(peft: merge_and_unload, then save_pretrained) and give that directory"
        )
    below = sorted(file.parent.name for file in folder.glob("*/config.json"))
    hint = f"; the models below it are {', '.join(below)}" if below else ""
    raise FileNotFoundError(f"{path} is a directory without config.json: no model is there{hint}; check the path")
