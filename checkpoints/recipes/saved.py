"""How drafts are written: in bfloat16, in the layout of the released ones; a directory appears whole or not at all."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedConfig

from store.shards import atomic_directory


def save_draft(
    directory: Path,
    config: PreTrainedConfig,
    architecture: str,
    tensors: Mapping[str, Tensor],
    **more: Any,
) -> None:
    """Write config.json and model.safetensors; `more`: further keys of the config. Integers keep their type."""
    values = config.to_diff_dict() | {"architectures": [architecture], "dtype": "bfloat16", **more}
    halved = {
        name: (tensor.bfloat16() if tensor.is_floating_point() else tensor).detach().contiguous()
        for name, tensor in tensors.items()
    }
    with atomic_directory(directory) as folder:
        (folder / "config.json").write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        save_file(halved, folder / "model.safetensors", metadata={"format": "pt"})
