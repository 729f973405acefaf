"""Reading a released SpecDec++ head (arXiv 2405.19715) into an `AcceptanceHead`.

The official module is `Sequential(ResBlock, …, ResBlock, Linear(hidden, 2))`, whose D blocks are one shared object:

    model.{0 … D-1}.linear.{weight, bias}   the same tensors D times, which the file stores once
    model.{D}.{weight, bias}                two logits, softmax, class 1 = accept

softmax(z)_1 = sigmoid(z_1 - z_0), so the difference of the two rows gives the same probability with one logit. The
shared block is copied D times. Official heads are fed-time, without scalars, for labels at temperature 1 (decoded with
top-k 50), trained with w_acc = 1.
"""

from pathlib import Path
from typing import Any

from torch import Tensor

from heads.model.files import check_no_pickle, check_width, checked, local_directory, read_safetensors
from heads.model.head import AcceptanceHead, check_shape
from heads.model.provenance import Provenance
from store.json_files import read_json


def read_official_head(source: str | Path, provenance: Provenance) -> AcceptanceHead:
    """The head in a directory (config.json and model.safetensors) of the official format.

    Args:
        source: a local path or a hub id.
        provenance: what the official config does not contain: reject weight, models.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a pickled checkpoint, or tensors that do not fit the config.
    """
    source = local_directory(source)
    path = source / "model.safetensors" if source.is_dir() else source
    config_path = path.parent / "config.json"
    check_no_pickle(path)
    if missing := [file for file in (path, config_path) if not file.is_file()]:
        raise FileNotFoundError(
            f"no {missing[0].name} at {path.parent}; an official head is a directory with config.json and "
            "model.safetensors"
        )
    hidden_size, depth = _shape(read_json(config_path, remedy="fetch it again"), config_path)
    tensors = _unshared(read_safetensors(path), depth)
    check_width(hidden_size, tensors, source=path.parent)
    tensors = checked(tensors, _official_shapes(hidden_size, depth), source=path)
    head = AcceptanceHead(hidden_size, depth, provenance=provenance)
    head.load_state_dict(_converted(tensors, depth), strict=True)
    return head.eval()


def _shape(config: dict[str, Any], path: Path) -> tuple[int, int]:
    if "hidden_size" not in config:
        raise ValueError(f"{path} has no 'hidden_size', so it is not a SpecDec++ head; name the directory of one")
    hidden_size, depth = config["hidden_size"], config.get("num_layers", 0)
    if type(hidden_size) is not int or type(depth) is not int:
        raise ValueError(
            f"{path}: hidden_size is {hidden_size!r} and num_layers {depth!r}, expected integers; fetch it again"
        )
    try:
        check_shape(hidden_size, depth, "fed")
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return hidden_size, depth


def _unshared(tensors: dict[str, Tensor], depth: int) -> dict[str, Tensor]:
    """The tensors with the shared block, which a file may store once, as every block."""
    stored = [i for i in range(depth) if f"model.{i}.linear.weight" in tensors]
    shared = {part: tensors.get(f"model.{stored[0]}.linear.{part}") for part in ("weight", "bias") if len(stored) == 1}
    copies = {f"model.{i}.linear.{part}": t for i in range(depth) for part, t in shared.items() if t is not None}
    return tensors | copies


def _official_shapes(hidden_size: int, depth: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {f"model.{depth}.weight": (2, hidden_size), f"model.{depth}.bias": (2,)}
    for i in range(depth):
        shapes |= {f"model.{i}.linear.weight": (hidden_size, hidden_size), f"model.{i}.linear.bias": (hidden_size,)}
    return shapes


def _converted(tensors: dict[str, Tensor], depth: int) -> dict[str, Tensor]:
    """Tensors of an `AcceptanceHead`: one logit z_1 - z_0, D separate blocks."""
    weight, bias = tensors[f"model.{depth}.weight"], tensors[f"model.{depth}.bias"]
    renamed = {"out.weight": (weight[1] - weight[0])[None], "out.bias": (bias[1] - bias[0])[None]}
    for i in range(depth):
        renamed |= {f"blocks.{i}.{part}": tensors[f"model.{i}.linear.{part}"].clone() for part in ("weight", "bias")}
    return renamed
