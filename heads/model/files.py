"""A head on disk: `config.json` and `model.safetensors`, written whole and read strictly. Nothing is ever unpickled."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

WEIGHTS = "model.safetensors"
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
IS_PICKLED = (
    "is a pickled checkpoint, which can run code when read; convert it where you trust it: "
    "`safetensors.torch.save_file({name: t.clone() for name, t in torch.load(path, weights_only=True).items()}, 'model.safetensors')` "
    "(clone, since the official blocks share their tensors)"
)


def write_head_files(directory: Path, tensors: Mapping[str, Tensor], config: dict[str, Any]) -> None:
    """Write both files, each to a temporary name first, so that no half-written file ever has the final name."""
    directory.mkdir(parents=True, exist_ok=True)
    contiguous = {name: t.contiguous().cpu() for name, t in tensors.items()}
    save_file(contiguous, directory / f"{WEIGHTS}.tmp", metadata={"format": "pt"})
    (directory / "config.json.tmp").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    for name in (WEIGHTS, "config.json"):
        os.replace(directory / f"{name}.tmp", directory / name)


def read_head_files(
    source: str, config: dict[str, Any] | None, *, expected: Callable[[dict[str, Any]], dict[str, tuple[int, ...]]], where: dict[str, Any]
) -> dict[str, Tensor]:
    """The tensors of a saved head, checked by name, shape and finiteness.

    Args:
        source: a directory or a hub id.
        config: its config.json, None if there is none.
        expected: name and shape of each tensor that a config stands for.
        where: revision, cache and token, as huggingface_hub hands them over.
    """
    if config is None:
        raise FileNotFoundError(f"no config.json in {source!r}; a head is a directory with config.json and {WEIGHTS}")
    for key in ("hidden_size", "num_layers"):
        if key not in config:
            raise ValueError(
                f"config.json of {source!r} has no {key!r}, so it describes no acceptance head; export one with `python -m heads export`"
            )
    tensors = read_safetensors(weights_path(source, where))
    check_tensors(tensors, expected(config), source=source)
    return tensors


def weights_path(source: str, where: dict[str, Any]) -> Path:
    """Where the weights of `source` lie, downloaded if it is no directory."""
    if os.path.isdir(source):
        path = Path(source) / WEIGHTS
        if not path.is_file():
            pickled = sorted(p.name for p in Path(source).iterdir() if p.suffix in PICKLES)
            if pickled:
                raise ValueError(f"{source!r} has no {WEIGHTS} but {pickled[0]}, which {IS_PICKLED}")
            raise FileNotFoundError(f"no {WEIGHTS} in {source!r}")
        return path
    keys = ("revision", "cache_dir", "force_download", "token", "local_files_only")
    try:
        return Path(hf_hub_download(repo_id=source, filename=WEIGHTS, **{k: where[k] for k in keys if k in where}))
    except EntryNotFoundError as error:
        raise FileNotFoundError(f"hub repository {source!r} has no {WEIGHTS}; a pickled checkpoint is not read") from error


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Every tensor of one safetensors file.

    Raises:
        ValueError: not safetensors (truncated, or a pickle by that name).
    """
    if path.suffix in PICKLES:
        raise ValueError(f"{path} {IS_PICKLED}")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is no whole safetensors file ({error}); fetch or export it again") from error


def check_tensors(tensors: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]], *, source: object) -> None:
    """Raise ValueError naming what is missing, left over, misshapen or not finite."""
    problems = [f"{name} is missing" for name in sorted(expected.keys() - tensors.keys())]
    problems += [f"{name} is not part of the architecture" for name in sorted(tensors.keys() - expected.keys())]
    for name in sorted(expected.keys() & tensors.keys()):
        if tuple(tensors[name].shape) != expected[name]:
            problems.append(f"{name} has shape {tuple(tensors[name].shape)} where config.json implies {expected[name]}")
        elif not torch.isfinite(tensors[name]).all():
            problems.append(f"{name} has NaN or infinite values")
    if problems:
        raise ValueError(f"weights of head {str(source)!r} do not fit its config.json: {'; '.join(problems)}; export the head again")
