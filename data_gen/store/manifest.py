"""manifest.json: what the data of a directory is, so that a run with other settings refuses to mix its shards in.

Everything that decides the rows is compared. `recorded` is not: git commit, machine, thread count, paths of local models (their weights are
compared by fingerprint instead), engine and time-outs. Bytes are promised equal for equal hardware and thread count only; rows have the
same law anyway.
"""

import hashlib
import json
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedTokenizerBase

from configs.schema import Config, ModelSource
from data_gen.prompts.prompt import Prompt
from data_gen.prompts.splits import Split
from data_gen.store.shards import write_atomic

FORMAT = 1
_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "pyarrow")
_UNCOMPARED = {"dir", "engine", "ray", "server", "responses", "split_ids", "num_train", "num_dev", "num_test"}
_SAMPLE_BYTES = 2**20


def make_manifest(config: Config, tokenizer: PreTrainedTokenizerBase, splits: Mapping[Split, Sequence[Prompt]]) -> dict[str, Any]:
    """The manifest of a run, before any model is loaded."""
    data = {name: value for name, value in asdict(config.data).items() if name not in _UNCOMPARED}
    return {
        "format": FORMAT,
        "target": describe_model(config.pair.target, trust_remote_code=config.pair.trust_remote_code),
        "draft": describe_model(config.pair.draft, trust_remote_code=config.pair.trust_remote_code),
        "tokenizer": _digest(_tokenizer_text(tokenizer)),
        "chat_template": _digest(str(tokenizer.chat_template)) if config.data.template == "chat" else None,
        "sampling": asdict(config.pair.sampling),
        **data,
        "split": {name: {"prompts": len(prompts), "sha256": _digest(repr(list(prompts)))} for name, prompts in splits.items()},
        "versions": {name: _version(name) for name in _PACKAGES},
        "recorded": {
            "git_commit": _git_commit(),
            "python": platform.python_version(),
            "machine": f"{platform.system()} {platform.machine()}",
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            "num_threads": config.pair.num_threads or torch.get_num_threads(),
            "engine": config.data.engine,
            "target_path": config.pair.target.path,
            "draft_path": config.pair.draft.path,
            "command": sys.argv,
        },
    }


def describe_model(source: ModelSource, *, trust_remote_code: bool = False) -> dict[str, Any]:
    """Name, revision and a fingerprint of one model, without loading its weights.

    A hub model is fixed by its commit. A local one by sha256 over the name, size, first and last MiB of each weights file: quick for 140
    GB, and different after any further training.
    """
    try:
        model_config = AutoConfig.from_pretrained(source.path, revision=source.revision or "main", trust_remote_code=trust_remote_code)
    except OSError as error:
        raise FileNotFoundError(
            f"no model at {source.path!r} (revision {source.revision or 'main'}): {str(error).splitlines()[0]}"
        ) from error
    local = Path(source.path).is_dir()
    return {
        "name": Path(source.path).name if local else source.path,
        "revision": source.revision,
        "commit": getattr(model_config, "_commit_hash", None),
        "fingerprint": _fingerprint(Path(source.path)) if local else None,
        "dtype": source.dtype,
        "hidden_size": model_config.get_text_config().hidden_size,
    }


def read_manifest(directory: str | Path) -> dict[str, Any]:
    """The manifest of a data directory.

    Raises:
        FileNotFoundError: no data has been made there.
    """
    path = Path(directory) / "manifest.json"
    if not path.is_file():
        raise FileNotFoundError(f"no {path}: run `python -m data_gen` with this config first")
    return dict(json.loads(path.read_text()))


def settle(directory: str | Path, manifest: Mapping[str, Any], *, setting: str = "data.dir") -> None:
    """Write the manifest into a new directory, or compare it with the one that is there.

    Args:
        directory: made if it is not there.
        manifest: of this run.
        setting: the key of the config that names the directory.

    Raises:
        ValueError: names the first key that differs, and both values.
    """
    path = Path(directory) / "manifest.json"
    if not path.exists():
        write_atomic(path, json.dumps(manifest, indent=2).encode())
        return
    differing = difference(json.loads(path.read_text()), json.loads(json.dumps(manifest)))
    if differing is not None:
        key, there, here = differing
        raise ValueError(
            f"{path} differs in {key}: {there!r} there, {here!r} in this run; choose another {setting}, or delete {Path(directory)} to "
            "make its content anew"
        )


def difference(there: Any, here: Any, key: str = "") -> tuple[str, Any, Any] | None:
    """(dotted key, value there, value here) of the first compared entry that differs; None if there is none."""
    if isinstance(there, dict) and isinstance(here, dict):
        for name in [*there, *(name for name in here if name not in there)]:
            if not key and name == "recorded":
                continue
            found = difference(there.get(name), here.get(name), f"{key}.{name}" if key else name)
            if found is not None:
                return found
        return None
    return None if there == here else (key, there, here)


def _tokenizer_text(tokenizer: PreTrainedTokenizerBase) -> str:
    """Everything that decides how text becomes ids."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return str(backend.to_str()) if backend is not None else json.dumps(sorted(tokenizer.get_vocab().items()))


def _fingerprint(directory: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(directory.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            digest.update(file.read(_SAMPLE_BYTES))
            file.seek(max(0, size - _SAMPLE_BYTES))
            digest.update(file.read())
    return digest.hexdigest()


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git_commit() -> str | None:
    """Of the project's checkout, if it is one."""
    try:
        answer = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10, check=False
        )
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None
