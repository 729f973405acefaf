"""A head on disk, `config.json` and `model.safetensors`, written atomically and read strictly, from a directory or from
the hub. Nothing is unpickled.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from configs.hints import first_of
from configs.paths import check_local
from heads.model.published import portable
from lm.sampling import FLOATS
from store.hub import HUB_ERRORS
from store.json_files import Json, read_json
from store.shards import write_atomic

WEIGHTS = "model.safetensors"
FILES = ("config.json", WEIGHTS, "README.md")
"""Files of an exported head; no others are downloaded."""
_KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("hidden_size", "num_layers"), (int,)),
    **dict.fromkeys(("timing", "architecture"), (str,)),
    "scalars": (bool, list),
    **dict.fromkeys(("embedding", "is_normalised"), (bool,)),
    **dict.fromkeys(("accept_weight", "reject_weight", "calibration_temperature"), (int, float)),
    "mixing_ratio": (int, float, type(None)),
    "license": (str, type(None)),
    **dict.fromkeys(("draft", "target", "sampling", "training", "metrics", "recommended"), (dict,)),
}
"""Key of config.json -> allowed types."""
_LARGEST = 1e15
"""Largest weight: a product of two layers of such weights, over any width, is still finite in float32."""
LEAST_KL = 1e-6
"""Nats per token; a signal of a smaller KL counts as this, since its KL divides."""
EXPORT_RECORD = "heads.json"
"""File in a folder of exported heads: the run and the names of the heads of the newest export."""
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
IS_PICKLED = (
    "is a pickled checkpoint, which can run code when it is loaded; if you trust it, convert it: "
    "`safetensors.torch.save_file({name: t.clone() for name, t in torch.load(path, weights_only=True).items()}, "
    "'model.safetensors')` (clone, because the official blocks share their tensors)"
)
_EXPORT = "export the head again with `acceptance-heads export`"


def local_directory(source: str | Path, **download: Any) -> Path:
    """The local path of a head; a hub id (owner/name) is downloaded with the arguments of `snapshot_download`.
    FileNotFoundError if there is neither, ValueError for a URL.
    """
    if not isinstance(source, str | Path):
        raise ValueError(f"{type(source).__name__} is neither a path nor a hub id of a head; pass one of them")
    check_local(source, "the path of a head", may_be_on_hub=True)
    path = Path(source)
    if path.exists():
        return path
    if path.is_absolute() or len(path.parts) != 2 or path.parent.exists():
        raise FileNotFoundError(
            f"no exported head at {path}; run `acceptance-heads export`, which writes one directory per head of a sweep"
        )
    return downloaded(str(source), kind="head", allow_patterns=[*FILES], **download)


def downloaded(name: str, *, kind: str, **download: Any) -> Path:
    """The files of a hub repository; FileNotFoundError if they cannot be downloaded."""
    try:
        return Path(snapshot_download(name, **download))
    except HUB_ERRORS as error:
        raise FileNotFoundError(
            f"no {kind} at {name!r}: no such directory, and the download from the hub failed ("
            f"{' '.join(str(error).split())}); check the name, `hf auth login` for a private one, or name a "
            "directory"
        ) from error


def record_export(root: Path, names: Iterable[str], *, run: str | None) -> None:
    """Write which heads in `root` are of this training run; earlier exports of the same run stay in the record."""
    heads = set(names)
    path = root / EXPORT_RECORD
    if run is not None and path.is_file():
        earlier = read_json(path, remedy=_EXPORT, keys=("run", "heads"))
        if earlier["run"] == run:
            heads |= set(earlier["heads"])
    write_atomic(path, f"{json.dumps({'run': run, 'heads': sorted(heads)}, indent=1)}\n".encode())


def exported_heads(root: Path) -> tuple[list[Path], list[Path]]:
    """Directories of the heads of the newest export into `root` and of imported heads, and those of earlier training
    runs. Without a record, as of version 0.2.0, all are of the newest one.
    """
    directories = sorted(path.parent for path in root.glob("**/config.json"))
    record = root / EXPORT_RECORD
    if not record.is_file():
        return directories, []
    names = set(read_json(record, remedy=_EXPORT, keys=("run", "heads"))["heads"])
    newest = [
        directory for directory in directories if str(directory.relative_to(root)) in names or _is_imported(directory)
    ]
    return newest, [directory for directory in directories if directory not in newest]


def note_on_earlier(heads: Sequence[Path], root: Path) -> str:
    """A line about heads in `root` that the newest export did not write."""
    names = first_of([str(path.relative_to(root)) for path in heads])
    return (
        f"note: {root} also has heads of an earlier run ({names}), which evaluate and tune leave out; name "
        "them in decode.heads to compare them, or delete them"
    )


def _is_imported(directory: Path) -> bool:
    """Whether a head comes from `acceptance-heads import`, so that no training run has it in its record."""
    training = read_json(directory / "config.json", remedy=_EXPORT).get("training")
    return isinstance(training, dict) and "imported_from" in training


def write_head_config(path: Path, config: Json) -> None:
    """Write config.json atomically, without paths of this machine."""
    write_atomic(path, (json.dumps(portable(config), indent=2, sort_keys=True) + "\n").encode())


def read_head_config(path: Path, *, keys: Sequence[str] = ()) -> Json:
    """The config.json of a head; ValueError if it is not a JSON object with `keys` or a value has the wrong type."""
    config = read_json(path, remedy=_EXPORT, keys=keys)
    for key in [key for key in _KINDS if key in config]:
        value = config[key]
        kinds = _KINDS[key]
        is_bool_for_number = isinstance(value, bool) and bool not in kinds
        is_list_of_others = isinstance(value, list) and not all(isinstance(item, str) for item in value)
        if not isinstance(value, kinds) or is_bool_for_number or is_list_of_others:
            names = " or ".join("null" if kind is type(None) else kind.__name__ for kind in kinds)
            raise ValueError(f"{path}: {key} is {value!r}, expected {names}; {_EXPORT}")
    return config


def rank_of(metrics: Mapping[str, float]) -> tuple[bool, float]:
    """Orders heads by the `metrics` of their config.json, best first: by calibrated KL on dev as a part of that of the
    draft's own signal, which is comparable between timings, unlike KLs. Heads of version 0.2.0, which were not compared
    with this signal, come last, by KL alone (True, inf without any metrics).
    """
    kl = metrics.get("calibrated_kl", math.inf)
    if "signal_kl" in metrics:
        return False, kl / max(metrics["signal_kl"], LEAST_KL)
    return True, kl


def read_head_files(directory: Path) -> tuple[Json, dict[str, Tensor]]:
    """config.json and the tensors of a head, which `checked` compares."""
    path = directory / "config.json"
    weights = directory / WEIGHTS
    if not directory.is_dir():
        raise FileNotFoundError(f"{directory} is a file, not an exported head; name the head's directory")
    if not path.is_file():
        raise FileNotFoundError(f"no config.json in {directory}; a head is a directory with config.json and {WEIGHTS}")
    config = read_head_config(path, keys=("hidden_size", "num_layers"))
    if pickled := [] if weights.is_file() else [p for p in sorted(directory.glob("*")) if p.suffix in PICKLES]:
        raise ValueError(f"{pickled[0]} {IS_PICKLED}")
    if not weights.is_file():
        raise FileNotFoundError(f"no {WEIGHTS} in {directory}; {_EXPORT}")
    return config, read_safetensors(weights)


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Every tensor of a safetensors file; ValueError if it is truncated."""
    try:
        return load_file(path)
    except (SafetensorError, KeyError) as error:  # KeyError: a dtype that torch does not have
        raise ValueError(f"{path} is not a complete safetensors file ({error}); fetch or export it again") from error


def checked(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of the tensors in float32; ValueError for one that has another kind of numbers or is not finite."""
    for name, tensor in tensors.items():
        if tensor.dtype not in FLOATS:
            raise ValueError(f"{name} has dtype {tensor.dtype}, expected float16, bfloat16, float32 or float64")
        if not (tensor.abs() < _LARGEST).all():
            raise ValueError(f"{name} has NaN or values above {_LARGEST:g}, which overflow float32")
    return {name: tensor.to(torch.float32, copy=True) for name, tensor in tensors.items()}
