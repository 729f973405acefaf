"""Reading a released SpecDec++ head (arXiv 2405.19715) into an `AcceptanceHead`.

The official module is `Sequential(ResBlock, …, ResBlock, Linear(hidden, 2))`, whose D blocks are one shared object:

    model.{0 … D-1}.linear.{weight, bias}   the same tensors D times, which the file stores once
    model.{D}.{weight, bias}                two logits, softmax, class 1 = accept

softmax(z)_1 = sigmoid(z_1 - z_0), so the difference of the two rows gives the same probability with one logit. The
shared block is copied D times. Official heads are fed-time, without scalars, for labels at temperature 1 (decoded with
top-k 50), trained with w_acc = 1.
"""

import re
from dataclasses import asdict
from pathlib import Path

from torch import Tensor

from heads.model.files import local_directory, read_head_files
from heads.model.head import AcceptanceHead, Provenance


def read_official_head(source: str | Path, provenance: Provenance) -> AcceptanceHead:
    """The head in a directory (config.json and model.safetensors) of the official format, or on the hub; errors as of
    `AcceptanceHead.from_pretrained`. `provenance` has what that config does not: reject weight, models.
    """
    directory = local_directory(source)
    config, tensors = read_head_files(directory)
    config = {name: config[name] for name in ("hidden_size", "num_layers")} | asdict(provenance)
    return AcceptanceHead.from_tensors(config, _converted(tensors, config["num_layers"]), source=directory)


def _converted(tensors: dict[str, Tensor], depth: int) -> dict[str, Tensor]:
    """Tensors of an `AcceptanceHead`: one logit z_1 - z_0, and D separate blocks, of which the file may have one."""
    num_stored = len([name for name in tensors if name.endswith("linear.weight")])
    converted = dict[str, Tensor]()
    for name, tensor in tensors.items():
        block, part = name.removeprefix("model.").split(".", 1) if re.match(r"model\.\d+\.", name) else ("", name)
        if part.startswith("linear."):
            blocks = range(depth) if num_stored == 1 else [block]
            converted |= {f"blocks.{index}.{part.removeprefix('linear.')}": tensor.clone() for index in blocks}
        else:
            converted[f"out.{part}"] = tensor.diff(dim=0)
    return converted
