"""manifest.json: what the files of a directory were made from, so that a run with other settings refuses to add shards of its own.

`settle` and `read_manifest` serve every directory of shards, also those of traces. Everything that decides the rows is compared. The entry
`recorded` is not: git commit, machine, thread count, engine, and the paths of local models, whose weights are compared by fingerprint
instead. Equal manifests promise equal bytes on equal hardware with the same thread count only; on other hardware rows follow the same law.
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
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, PreTrainedTokenizerBase

from configs.schema import DataConfig, ModelSource, PairConfig
from data_gen.prompts.prompt import Prompt
from data_gen.prompts.splits import Split
from data_gen.store.json_files import read_json
from data_gen.store.shards import write_atomic

FORMAT = 1
_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "pyarrow")
_UNCOMPARED = {"dir", "engine", "ray", "server", "responses", "split_ids", "num_train", "num_dev", "num_test", "max_error_share"}
_SAMPLE_BYTES = 2**20


def make_manifest(
    pair: PairConfig, data: DataConfig, *, tokenizer: PreTrainedTokenizerBase, splits: Mapping[Split, Sequence[Prompt]]
) -> dict[str, Any]:
    """The manifest of a run, before any model is loaded."""
    return {
        "format": FORMAT,
        "target": describe_model(pair.target, trust_remote_code=pair.trust_remote_code),
        "draft": describe_model(pair.draft, trust_remote_code=pair.trust_remote_code),
        "tokenizer": _digest(_tokenizer_text(tokenizer)),
        "chat_template": _digest(str(tokenizer.chat_template)) if data.template == "chat" else None,
        "sampling": asdict(pair.sampling),
        **{name: value for name, value in asdict(data).items() if name not in _UNCOMPARED},
        "split": {name: {"prompts": len(prompts), "sha256": _digest(repr(list(prompts)))} for name, prompts in splits.items()},
        "versions": {name: _version(name) for name in _PACKAGES},
        "recorded": {
            "git_commit": git_commit(),
            "python": platform.python_version(),
            "machine": f"{platform.system()} {platform.machine()}",
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            "num_threads": pair.num_threads or torch.get_num_threads(),
            "engine": data.engine,
            "target_path": pair.target.path,
            "draft_path": pair.draft.path,
            "command": sys.argv,
        },
    }


def describe_model(source: ModelSource, *, trust_remote_code: bool = False) -> dict[str, Any]:
    """Name, revision and a fingerprint of one model, without loading its weights.

    A hub model is identified by its commit; a local one by a sha256 over the name, the size and the first and last MiB of each weights
    file, which is quick for 140 GB and changes with any further training.

    Raises:
        FileNotFoundError: neither a local model directory nor a hub id that can be reached.
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


def read_manifest(directory: str | Path, *, command: str = "data_gen") -> dict[str, Any]:
    """The manifest of a directory of shards.

    Args:
        directory: where the shards are.
        command: the part after `python -m` of the command that makes such a directory, for the message.

    Raises:
        FileNotFoundError: nothing has been made there.
    """
    path = Path(directory) / "manifest.json"
    if not path.is_file():
        raise FileNotFoundError(f"no {path}: run `python -m {command}` with this config first")
    return read_json(path, remedy=f"put the original back, or delete {directory} to start anew")


def settle(directory: str | Path, manifest: Mapping[str, Any], *, setting: str = "data.dir") -> None:
    """Write the manifest into a new directory, or compare it with the one in an old directory.

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
    mismatch = _first_mismatch(read_manifest(directory), json.loads(json.dumps(manifest)))  # through JSON: tuples become lists
    if mismatch is not None:
        raise ValueError(
            f"{path} differs in {mismatch.key}: {mismatch.on_disk!r} there, {mismatch.in_run!r} in this run; choose another {setting}, or "
            f"delete {directory} to start anew"
        )


class _Mismatch(NamedTuple):
    """An entry that differs."""

    key: str
    """Dotted path of the entry."""
    on_disk: Any
    in_run: Any


def _first_mismatch(on_disk: Any, in_run: Any, key: str = "") -> _Mismatch | None:
    """The first compared entry that differs, in the order on disk; None if there is none."""
    if not isinstance(on_disk, dict) or not isinstance(in_run, dict):
        return None if on_disk == in_run else _Mismatch(key, on_disk, in_run)
    names = (name for name in dict.fromkeys([*on_disk, *in_run]) if key or name != "recorded")
    mismatches = (_first_mismatch(on_disk.get(name), in_run.get(name), f"{key}.{name}" if key else name) for name in names)
    return next((mismatch for mismatch in mismatches if mismatch is not None), None)


def _tokenizer_text(tokenizer: PreTrainedTokenizerBase) -> str:
    """Everything that decides how text becomes ids."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return str(backend.to_str()) if backend is not None else json.dumps(sorted(tokenizer.get_vocab().items()))


def _fingerprint(directory: Path) -> str:
    """sha256 over samples of a model's weights files."""
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


def git_commit() -> str | None:
    """The commit of the project's checkout; None where it is installed without git."""
    try:
        answer = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10, check=False
        )
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None
