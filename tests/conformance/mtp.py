"""Tiny random targets whose checkpoint has an MTP layer under the names of the released ones, in float64."""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from configs.schema import ModelSource
from lm import FeatureDraft, load_model
from lm.features.loading import feature_draft_of
from tests.conformance.families import FAMILIES as ALL
from tests.conformance.families import build

FAMILIES = ("deepseek_v3", "qwen3_next")
_AFTER = "model.layers.2.", "model.layers.2.", ("eh_proj", "enorm", "hnorm", "shared_head.norm")
_APART = "mtp.layers.0.", "mtp.", ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
LAYOUTS = {
    **dict.fromkeys(("deepseek_v3", "glm4_moe", "glm4_moe_lite", "axk1", "youtu", "hy_v3"), _AFTER),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid"), _APART),
}
"""For each family: prefix of the layer, prefix and names of what comes before and after it."""
SEED = 2
"""Of weights with which the draft is right now and then."""
_DIRECTORIES = TemporaryDirectory()


def write(family: str, directory: Path) -> Path:
    """Save a model of one layer more, which becomes the MTP layer."""
    [made] = [one for one in ALL if one.name.startswith(family)][:1]
    kinds = {name: [*values, values[-1]] for name, values in made.settings.items() if name == "layer_types"}
    settings = {**made.settings, **kinds, "num_hidden_layers": 3, "vocab_size": 7}
    build(made._replace(settings=settings), SEED).save_pretrained(directory)
    config = json.loads((directory / "config.json").read_text()) | {"num_hidden_layers": 2}
    config |= {name: values[:-1] for name, values in config.items() if isinstance(values, list) and len(values) == 3}
    (directory / "config.json").write_text(json.dumps(config))
    layer, prefix, names = LAYOUTS[family]
    saved = load_file(directory / "model.safetensors")
    tensors = {
        name.replace("model.layers.2.", layer): tensor
        for whole, values in saved.items()
        for name, tensor in _released(whole, values)
    }
    generator = torch.Generator().manual_seed(SEED)
    width = config["hidden_size"]
    for name in names:
        shape = (width, 2 * width) if name in ("eh_proj", "fc") else (width,)
        tensors[f"{prefix}{name}.weight"] = 0.3 * torch.randn(shape, generator=generator, dtype=torch.float64)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory


def _released(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The matrices of each expert, which transformers keeps in one tensor."""
    prefix, _, kind = name.rpartition(".")
    if not prefix.endswith("experts") or tensor.dim() != 3:
        yield name, tensor
        return
    parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
    for expert, matrices in enumerate(tensor):
        for part, matrix in zip(parts, matrices.chunk(len(parts)), strict=True):
            yield f"{prefix}.{expert}.{part}.weight", matrix.contiguous()


@cache
def target(family: str) -> PreTrainedModel:
    """The target, from its directory."""
    model = load_model(ModelSource(path=str(write(family, Path(_DIRECTORIES.name, family))), dtype="float64"))
    model.set_experts_implementation("batched_mm")
    model.generation_config.eos_token_id = None
    return model


@cache
def draft(family: str) -> FeatureDraft:
    """The target's MTP layer, from the same directory."""
    source = ModelSource(path=f"{target(family).name_or_path}#mtp")
    return feature_draft_of(source, target(family))
