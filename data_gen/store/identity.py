"""Identifies a model without loading it: a hub model by its commit, a local one by hashes of its files.

    weights        sha256 over all weights files (and the model's own code, if any)
    config         sha256 over config.json and generation_config.json, without the version that wrote them

Large files are hashed once: hashes are cached under path, size and modification time.
"""

import hashlib
import json
import os
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig

from configs.schema import ModelSource
from lm.features.released import MTP, commit_of, width_of, without_mtp
from lm.pair import repository_of
from store.shards import sha256_of, write_atomic

_LARGE_BYTES = 2**26
"""Minimum size of a file for which hashes are cached."""
_SLOW_BYTES = 2**32
"""Minimum size of files whose hashing is announced."""
_IGNORED_KEYS = ("transformers_version", "_name_or_path")


def describe_model(source: ModelSource) -> dict[str, Any]:
    """Name, revision, commit and hashes of a model; FileNotFoundError if it is not there, ValueError if invalid."""
    if (target := without_mtp(source)) != source:  # the target's files hold its MTP layer
        described = describe_model(target)
        return described | {key: f"{described[key]}{MTP}" for key in ("name", "commit", "weights") if described[key]}
    try:
        width = width_of(source)
        if width is not None:  # a feature draft; transformers does not know every layout
            commit = commit_of(source)
        else:
            config = AutoConfig.from_pretrained(source.path, **repository_of(source))
            commit, width = getattr(config, "_commit_hash", None), config.get_text_config().hidden_size
    except OSError as error:
        raise FileNotFoundError(
            f"no model at {source.path!r} (revision {source.revision or 'main'}): {str(error).splitlines()[0]}"
        ) from error
    except StrictDataclassError as error:
        raise ValueError(
            f"transformers cannot read config.json of {source.path!r}: {' '.join(str(error).split())}"
        ) from error
    folder = Path(source.path)
    is_local = folder.is_dir()
    return {
        "name": folder.name if is_local else source.path,
        "revision": source.revision,
        "commit": commit,
        "weights": _weights(folder) if is_local else None,
        "config": _configs(folder) if is_local else None,
        "dtype": source.dtype,
        "hidden_size": width,
        # omitted if null, as in manifests written before the setting existed
        **({} if source.quantization is None else {"quantization": source.quantization}),
    }


def same_model(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool | None:
    """Whether two descriptions are of the same weights; None if they cannot be compared."""
    for key in ("weights", "commit"):
        if first.get(key) and second.get(key):
            return bool(first[key] == second[key])
    return None


def _weights(folder: Path) -> str:
    paths = sorted([*folder.glob("*.safetensors"), *folder.glob("*.py")])
    names = [f"{path.resolve()} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in paths]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "acceptance-heads", "sha256.json")
    known: dict[str, str] = {}
    with suppress(OSError, ValueError):  # missing or unreadable: hash everything again
        known = dict(json.loads(cache.read_text()))
    new = {name: path for name, path in zip(names, paths, strict=True) if name not in known}
    num_bytes = sum(path.stat().st_size for path in new.values())
    if num_bytes >= _SLOW_BYTES:
        print(f"{folder}: hashing {num_bytes / 1e9:,.0f} GB of weights (only once)", file=sys.stderr, flush=True)
    with ThreadPoolExecutor() as pool:
        known |= zip(new, pool.map(sha256_of, new.values()), strict=True)
    if any(path.stat().st_size >= _LARGE_BYTES for path in new.values()):
        with suppress(OSError, ValueError):  # the cache cannot be written: hash again next time
            write_atomic(cache, json.dumps(known, indent=0).encode())
    lines = [f"{path.name} {known[name]}" for path, name in zip(paths, names, strict=True)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _configs(folder: Path) -> str:
    configs = []
    for path in (folder / "config.json", folder / "generation_config.json"):
        values = json.loads(path.read_text()) if path.is_file() else {}
        configs.append({key: value for key, value in values.items() if key not in _IGNORED_KEYS})
    return hashlib.sha256(json.dumps(configs, sort_keys=True).encode()).hexdigest()
