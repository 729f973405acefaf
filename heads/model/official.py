"""Reading a released SpecDec++ head (arXiv 2405.19715) into an `AcceptanceHead`.

The official module is `Sequential(ResBlock, …, ResBlock, Linear(hidden, 2))`, whose D blocks are one shared object:

    model.{0 … D-1}.linear.{weight, bias}   the same tensors D times, which the file stores once
    model.{D}.{weight, bias}                two logits, softmax, class 1 = accept

softmax(z)_1 = sigmoid(z_1 - z_0), so the difference of the two rows gives the same probability with one logit. The
shared block is copied D times. Official heads are fed-time, without scalars, for labels at temperature 1 (decoded with
top-k 50), trained with w_acc = 1.
"""

from pathlib import Path

from torch import Tensor

from heads.model.files import check_no_pickle, checked, local_directory, read_head_config, read_safetensors
from heads.model.head import AcceptanceHead, check_shape
from heads.model.provenance import Provenance


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
    config = read_head_config(config_path, keys=("hidden_size",), remedy="name the directory of a SpecDec++ head")
    width, depth = config["hidden_size"], config.get("num_layers", 0)
    try:
        check_shape(width, depth, "fed")
    except ValueError as error:
        raise ValueError(f"{config_path}: {error}") from error
    weights = _converted(read_safetensors(path), width, depth, path)
    head = AcceptanceHead(width, depth, provenance=provenance)
    head.load_state_dict(weights, strict=True)
    return head.eval()


def _converted(tensors: dict[str, Tensor], width: int, depth: int, path: Path) -> dict[str, Tensor]:
    """Tensors of an `AcceptanceHead`: one logit z_1 - z_0, and D separate blocks, of which the file may have one."""
    stored = [block for block in range(depth) if f"model.{block}.linear.weight" in tensors]
    shapes: dict[str, tuple[int, ...]] = {f"model.{depth}.weight": (2, width), f"model.{depth}.bias": (2,)}
    for part, shape in (("weight", (width, width)), ("bias", (width,))):
        shapes |= {f"model.{block}.linear.{part}": shape for block in range(depth)}
        if len(stored) == 1 and (shared := tensors.get(f"model.{stored[0]}.linear.{part}")) is not None:
            tensors = tensors | {f"model.{block}.linear.{part}": shared for block in range(depth)}
    tensors = checked(tensors, shapes, source=path)
    logit = {f"out.{part}": tensors.pop(f"model.{depth}.{part}").diff(dim=0) for part in ("weight", "bias")}
    blocks = {name.replace("model.", "blocks.").replace(".linear", ""): t.clone() for name, t in tensors.items()}
    return logit | blocks
